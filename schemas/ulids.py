"""The ULIDs of messages, calls and tokens, in upper case, and the ids of new nodes, in lower case.

A running node makes the former, and does without python-ulid: that loads 1.6 MiB of modules, most of it to
look up its own version. Must not read the clock or the system's randomness: both are arguments.
"""

import re
from collections.abc import Callable

GIVEN_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""The form of a correlation id that a caller gives to its call: a ULID, a UUID, or an id of its own."""

_LAST_MS = (1 << 48) - 1
_RANDOM_DIGITS = 16
_AHEAD = 32
"""For so many ULIDs the random digits are taken at once: the system takes as long for those as for one."""
_DIGITS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_DIGIT_OF_BYTE = (_DIGITS * 8).encode("ascii")
"""That of its last five bits. A random byte for each digit costs less than to cut ten bytes into sixteen."""


class UlidSource:
    """Makes ULIDs from a clock in milliseconds and a source of random bytes."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._second: tuple[int | None, str] = (None, "")
        self._random: list[str] = []

    def new(self) -> str:
        """Return a fresh ULID, as in message and correlation ids.

        Raises:
            OverflowError: the time does not fit 48 bits.
        """
        now_ms = self._now_ms()
        second = now_ms >> 10  # about one: the eight digits of a time that stay for so long
        if second != self._second[0]:
            if not 0 <= now_ms <= _LAST_MS:
                raise OverflowError(now_ms)
            self._second = second, "".join(_DIGITS[second >> shift & 31] for shift in range(35, -1, -5))
        if not self._random:
            digits = self._random_bytes(_RANDOM_DIGITS * _AHEAD).translate(_DIGIT_OF_BYTE).decode("ascii")
            self._random = [digits[at : at + _RANDOM_DIGITS] for at in range(0, len(digits), _RANDOM_DIGITS)]
        return f"{self._second[1]}{_DIGITS[now_ms >> 5 & 31]}{_DIGITS[now_ms & 31]}{self._random.pop()}"


_TIME_BYTES = 6
_RANDOM_BYTES = 10


def new_node_id(now_ms: int, random_bytes: Callable[[int], bytes]) -> str:
    """Return the id of a node that is made at ``now_ms`` (RFC-0001 section 2)."""
    from ulid import ULID  # noqa: PLC0415 - a running node has its id, and does without the library

    made = ULID(now_ms.to_bytes(_TIME_BYTES, "big") + random_bytes(_RANDOM_BYTES))
    return str(made).lower()
