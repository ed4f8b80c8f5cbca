"""ULIDs: upper case for messages and calls, lower case for nodes.

Must not read the clock or the system's randomness: both are arguments.
"""

from collections.abc import Callable

from ulid.base32 import encode_randomness, encode_timestamp

_RANDOM_BYTES = 10
_TIME_BYTES = 6


class UlidSource:
    """Makes ULIDs from a clock in milliseconds and a source of random bytes."""

    def __init__(self, now_ms: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
        self._now_ms = now_ms
        self._random_bytes = random_bytes
        self._stamp: tuple[int | None, str] = (None, "")

    def new(self) -> str:
        """Return a fresh ULID in upper case, as in message and correlation ids."""
        now_ms = self._now_ms()
        if now_ms != self._stamp[0]:  # several are made in one millisecond
            self._stamp = now_ms, encode_timestamp(now_ms.to_bytes(_TIME_BYTES, "big"))
        return self._stamp[1] + encode_randomness(self._random_bytes(_RANDOM_BYTES))

    def new_node_id(self) -> str:
        """Return a fresh ULID in lower case, as in node ids (RFC-0001 section 2)."""
        return self.new().lower()
