"""What every check of a history uses: what a violation is, and what was disturbed or lagged when.

A caller whose link was disturbed, or whose relay ended, sees a broken connection: the outcome is unknown
then, and that is no violation. A loop that lagged moves a deadline by as much as it lagged meanwhile.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from tests.chaos.history import History

TOLERANCE_MS = 250


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise: of which sort, in which call or node, and what was seen."""

    sort: str
    subject: str
    seen: str

    def __str__(self) -> str:
        return f"{self.sort}: {self.subject}: {self.seen}"


class Evidence:
    """What was disturbed, and how much the loops lagged."""

    def __init__(self, history: History) -> None:
        lags = sorted(history.lags, key=lambda lag: lag.at_ms)
        self._lag_times = [lag.at_ms for lag in lags]
        self._lag_sums = [0.0, *accumulate(lag.lag_ms for lag in lags)]
        self._began: defaultdict[str, list[int]] = defaultdict(list)
        # Of those that began up to each: when the last one ended.
        self._ended: defaultdict[str, list[int]] = defaultdict(list)
        for one in sorted(history.disturbances, key=lambda disturbance: disturbance.began_ms):
            latest = self._ended[one.what][-1:]
            self._began[one.what].append(one.began_ms)
            self._ended[one.what].append(max([one.ended_ms, *latest]))

    def lag_between(self, began_ms: float, ended_ms: float) -> float:
        """Return how much the loops lagged between two times, in milliseconds in total."""
        # A lag is noted when it is over: one that has begun before the end may be noted after it.
        first = bisect_left(self._lag_times, began_ms)
        last = min(bisect_right(self._lag_times, ended_ms) + 1, len(self._lag_times))
        return self._lag_sums[last] - self._lag_sums[first] if last > first else 0.0

    def is_overdue(self, began_ms: int, ended_ms: int, longest_ms: int) -> bool:
        """Return whether what is to take ``longest_ms`` at most took longer, beyond tolerance and lag."""
        return ended_ms - began_ms > longest_ms + TOLERANCE_MS + self.lag_between(began_ms, ended_ms)

    def is_disturbed(self, began_ms: int, ended_ms: int, *what: str) -> bool:
        """Return whether one of ``what`` was disturbed, or a moment before: connections end after it."""
        for one in what:
            count = bisect_right(self._began[one], ended_ms)
            if not count:
                continue
            latest_ms = self._ended[one][count - 1]
            if began_ms <= latest_ms + TOLERANCE_MS + self.lag_between(latest_ms, began_ms):
                return True
        return False


Check = Callable[[History, Evidence], Iterator[Violation]]
