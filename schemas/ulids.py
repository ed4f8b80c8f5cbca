"""ULIDs: upper case for messages and calls, lower case for nodes.

Encoded here, because the usual library keeps half a mebibyte of every node. Must not read the clock or the
system's randomness: both come in.
"""

from base64 import b32encode
from collections.abc import Callable

_RANDOM_BYTES = 10
_TIME_BYTES = 6

_CROCKFORD = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"0123456789ABCDEFGHJKMNPQRSTVWXYZ")
# Base 32 is computed from the first bit on and a ULID's value from the last: four zero bytes before the 16
# make a whole number of characters, of which the first six are zeros.
_PADDING = bytes(4)
_PADDING_CHARACTERS = 6


class UlidSource:
    """Makes ULIDs from a clock in milliseconds and a source of random bytes."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def new(self) -> str:
        """Return a fresh ULID in upper case, as messages and correlation ids have it."""
        stamp = self._now_ms().to_bytes(_TIME_BYTES, "big")
        encoded = b32encode(_PADDING + stamp + self._random_bytes(_RANDOM_BYTES)).translate(_CROCKFORD)
        return encoded[_PADDING_CHARACTERS:].decode("ascii")

    def new_node_id(self) -> str:
        """Return a fresh ULID in lower case, as a node id is written (RFC-0001 section 2)."""
        return self.new().lower()
