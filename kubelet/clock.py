"""The system's clock, for composition roots and commands. Everything else takes a clock as an argument."""

import time


def now_ms() -> int:
    """Return the system's wall time in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
