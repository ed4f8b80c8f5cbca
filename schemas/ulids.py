"""The ULIDs of messages, calls and tokens, in upper case. The id of a node is made by ``node_ids``.

Not encoded by python-ulid: a running node makes them, and that package loads 1.6 MiB of modules, most of it
to look up its own version. Must not read the clock or the system's randomness: both are arguments.
"""

from collections.abc import Callable

_RANDOM_BYTES = 10
_LAST_MS = (1 << 48) - 1
_FORTY_BITS, _TEN_BITS = (1 << 40) - 1, (1 << 10) - 1
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = tuple(first + second for first in _CROCKFORD for second in _CROCKFORD)
"""Ten bits in each: several ids are made for every call, and ``base64`` takes three times as long."""


class UlidSource:
    """Makes ULIDs from a clock in milliseconds and a source of random bytes."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._stamp: tuple[int | None, str] = (None, "")

    def new(self) -> str:
        """Return a fresh ULID, as in message and correlation ids.

        Raises:
            OverflowError: the time does not fit 48 bits.
        """
        now_ms = self._now_ms()
        if now_ms != self._stamp[0]:  # several are made in one millisecond
            if not 0 <= now_ms <= _LAST_MS:
                raise OverflowError(now_ms)
            self._stamp = now_ms, _PAIRS[now_ms >> 40] + _encoded(now_ms & _FORTY_BITS)
        random = int.from_bytes(self._random_bytes(_RANDOM_BYTES), "big")
        return self._stamp[1] + _encoded(random >> 40) + _encoded(random & _FORTY_BITS)


def _encoded(number: int) -> str:
    """Return ``number``, of 40 bits, as eight characters."""
    return (
        _PAIRS[number >> 30]
        + _PAIRS[number >> 20 & _TEN_BITS]
        + _PAIRS[number >> 10 & _TEN_BITS]
        + _PAIRS[number & _TEN_BITS]
    )
