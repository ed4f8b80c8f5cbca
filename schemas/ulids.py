"""ULIDs: upper case for messages and calls, lower case for nodes.

Must not read the clock or the system's randomness: both are arguments.
"""

from collections.abc import Callable

from ulid import ULID

_RANDOM_BYTES = 10
_TIME_BYTES = 6


class UlidSource:
    """Makes ULIDs from a clock in milliseconds and a source of random bytes."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes

    def new(self) -> str:
        """Return a fresh ULID in upper case, as in message and correlation ids."""
        stamp = self._now_ms().to_bytes(_TIME_BYTES, "big")
        return str(ULID.from_bytes(stamp + self._random_bytes(_RANDOM_BYTES)))

    def new_node_id(self) -> str:
        """Return a fresh ULID in lower case, as in node ids (RFC-0001 section 2)."""
        return self.new().lower()
