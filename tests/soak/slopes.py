"""Whether what a process uses grows: slopes, and what of them is not flat. Pure functions of samples.

The slope is that of the least that was used in each of ten parts of the time: what is in flight is given
back, and there is more of it while the machine is busy, but what leaks is never given back. It is Theil and
Sen's, the median of the slopes between all pairs. The beginning is left out, in which caches are filled. In
a run of ``LONG_S`` this is the first half, in which the heap takes its shape too: what grows after
it is a leak, however slow.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from operator import attrgetter, itemgetter
from statistics import median

MIB = 1 << 20
CALLS_PER_S = 50
SMALLEST_BYTES = 32
"""The smallest object of Python and a reference to it: a call that leaks anything leaks as much."""

LONG_S = 5300.0
"""Between the first sample and the last of 90 minutes, which are a little less apart than it lasts."""
LONG_LIMIT = 0.4 * MIB
"""In bytes per hour, of the second half of a long run."""

_WARM_UP = 1 / 3
_LONGEST_WARM_UP_S = 300.0
_PARTS = 10
_HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Sample:
    """What a process used ``at_s`` seconds after the beginning; ``memory`` is its anonymous one, in bytes."""

    at_s: float
    process: str
    memory: int
    descriptors: int
    threads: int
    tasks: int


@dataclass(frozen=True, slots=True)
class Limit:
    """How much growth is no leak: ``always``, and ``per_hour`` besides."""

    always: float
    per_hour: float = 0.0


LIMITS: Mapping[str, Limit] = {
    # The allocator returns no arena in which anything is left: what was in flight at once on a busy machine
    # leaves a larger heap behind, once. Six MiB were measured at a load of 25 on two cores.
    "memory": Limit(8 * MIB, SMALLEST_BYTES * CALLS_PER_S * _HOUR_S),
    # A session, a connection or a broker's restart that leaks one leaks more of them, also in a minute.
    "descriptors": Limit(2),
    "threads": Limit(2),
    "tasks": Limit(2),
}


@dataclass(frozen=True, slots=True)
class Slope:
    """How fast a process's use of something has grown after the warm-up.

    Attributes:
        middle: the median of what it used.
        per_hour: the slope.
        limit_per_hour: above it, it is not flat.
    """

    process: str
    what: str
    middle: float
    per_hour: float
    limit_per_hour: float

    @property
    def is_flat(self) -> bool:
        """Whether nothing leaks that can be told from noise. What shrinks is flat."""
        return self.per_hour <= self.limit_per_hour


def slopes(samples: Sequence[Sample], processes: Iterable[str] = ()) -> list[Slope]:
    """Return the slope of everything that each process used.

    Raises:
        ValueError: there are fewer than two samples of a process after its warm-up, or none of one of
            ``processes``.
    """
    sampled = {sample.process for sample in samples}
    for process in processes:
        if process not in sampled:
            raise ValueError(f"too few samples of {process}")
    return list(_slopes(samples))


def _slopes(samples: Sequence[Sample]) -> Iterator[Slope]:
    by_process = attrgetter("process")
    for process, own in groupby(sorted(samples, key=by_process), by_process):
        ordered = sorted(own, key=attrgetter("at_s"))
        is_long = ordered[-1].at_s - ordered[0].at_s >= LONG_S
        steady = _steady(ordered, is_long=is_long)
        if len(steady) < 2:
            raise ValueError(f"too few samples of {process}")
        hours = (steady[-1].at_s - steady[0].at_s) / _HOUR_S
        for what, limit in LIMITS.items():
            used = [(sample.at_s, float(getattr(sample, what))) for sample in steady]
            allowed = limit.always / hours + limit.per_hour
            if is_long and what == "memory":
                allowed = LONG_LIMIT
            middle = median(value for _, value in used)
            yield Slope(process, what, middle, theil_sen(_lowest(used)) * _HOUR_S, allowed)


def _steady(ordered: Sequence[Sample], *, is_long: bool) -> Sequence[Sample]:
    began_s, ended_s = ordered[0].at_s, ordered[-1].at_s
    warm_s = min((ended_s - began_s) * _WARM_UP, _LONGEST_WARM_UP_S)
    warm_s = began_s + ((ended_s - began_s) / 2 if is_long else warm_s)
    return [sample for sample in ordered if sample.at_s >= warm_s]


def _lowest(used: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the lowest point of each part."""
    size = max(1, len(used) // _PARTS)
    return [min(used[first : first + size], key=itemgetter(1)) for first in range(0, len(used), size)]


def theil_sen(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between any two of ``points``, which are at different times."""
    return median((later - early) / (end - begin) for (begin, early), (end, later) in combinations(points, 2))
