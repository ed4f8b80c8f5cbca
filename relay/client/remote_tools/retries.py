"""When a failed attempt is repeated: exponential delays with full jitter.

Must not decide whether a call may be repeated: that depends on the contract and the error.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often, and after which delays. ``attempts`` counts the first; 1 never repeats."""

    attempts: int = 4
    first_delay_s: float = 0.1
    longest_delay_s: float = 5.0

    def delay_s(self, attempt: int, retry_after_ms: int | None, chance: Callable[[], float]) -> float:
        """Return the seconds after failed ``attempt`` (1 is the first); ``chance`` is uniform in [0, 1).

        A server's ``retry_after_ms`` is a minimum; the jitter on top keeps callers from returning at once.
        """
        bound_s = min(self.longest_delay_s, self.first_delay_s * 2.0 ** min(attempt - 1, 32))
        return (retry_after_ms or 0) / 1000 + bound_s * chance()
