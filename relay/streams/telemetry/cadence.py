"""Which of the samples that arrive are the ones that are due, at an interval of their reader's own.

Must not know samples, nor who reads them.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Cadence:
    """Due times on a grid, so that delays do not add up. Times are seconds of a monotonic clock.

    Attributes:
        due_s: when the next sample is due.
    """

    due_s: float = 0.0

    def takes(self, now_s: float, interval_s: float, tolerance_s: float) -> bool:
        """Return whether the sample that has arrived is the one that is due, and count it.

        Within ``tolerance_s``: samples arrive earlier or later than they are taken.
        """
        # What this interval could not have set is of a longer one before it.
        if now_s + tolerance_s < self.due_s <= now_s + 1.5 * interval_s:
            return False
        # After a gap the grid begins anew.
        self.due_s = max(self.due_s + interval_s, now_s + interval_s / 2)
        return True
