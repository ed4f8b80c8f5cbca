"""The ULIDs of messages, calls and tokens, in upper case. The id of a node is made by ``node_ids``.

Not encoded by python-ulid: a running node makes them, and that package loads 1.6 MiB of modules, most of it
to look up its own version. Must not read the clock or the system's randomness: both are arguments.
"""

from base64 import b32encode
from collections.abc import Callable

_TIME_BYTES = 6
_TIME_CHARACTERS = 10
_RANDOM_BYTES = 10

# The same five bits a character, in Crockford's alphabet.
_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789ABCDEFGHJKMNPQRSTVWXYZ")


class UlidSource:
    """Makes ULIDs from a clock in milliseconds and a source of random bytes."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._stamp: tuple[int | None, str] = (None, "")

    def new(self) -> str:
        """Return a fresh ULID, as in message and correlation ids."""
        now_ms = self._now_ms()
        if now_ms != self._stamp[0]:  # several are made in one millisecond
            self._stamp = now_ms, _encoded(now_ms.to_bytes(_TIME_BYTES, "big"))[-_TIME_CHARACTERS:]
        return self._stamp[1] + _encoded(self._random_bytes(_RANDOM_BYTES))


def _encoded(number: bytes) -> str:
    """Return ``number``, of at most ten bytes, as sixteen characters."""
    return b32encode(number.rjust(_RANDOM_BYTES, b"\0")).translate(_CROCKFORD).decode("ascii")
