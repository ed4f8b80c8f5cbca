"""Sums up the samples of one node: their times, and the minimum, mean and maximum of each number.

Must not know a kind by name, nor gather the samples.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from schemas.times import with_iso

MAX_NUMBERS = 128
"""Of so many numbers, the first of a sample, an answer has statistics: a sample may have thousands."""


def summed_up(samples: Sequence[Mapping[str, Any]], moments: Mapping[str, str]) -> dict[str, Any]:
    """Return the summary of ``samples``, whose ``moments`` are times and no measurements."""
    series: dict[str, list[float]] = {}
    moment = next(iter(moments.values()), "")
    dated = [with_iso(sample, moments) for sample in samples]
    for sample in samples:
        for path, number in _numbers({key: value for key, value in sample.items() if key not in moments}):
            if path in series or len(series) < MAX_NUMBERS:
                series.setdefault(path, []).append(number)
    return {
        "times": [sample[moment] for sample in dated if moment in sample],
        "numbers": [{"name": path, **_statistics(numbers)} for path, numbers in series.items()],
    }


def _statistics(numbers: Sequence[float]) -> dict[str, float]:
    mean = round(sum(numbers) / len(numbers), 3)
    return {"min": min(numbers), "mean": mean, "max": max(numbers)}


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for name, member in value.items():
            yield from _numbers(member, f"{path}.{name}" if path else name)
    elif isinstance(value, list):
        for place, member in enumerate(value):
            yield from _numbers(member, f"{path}.{place}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value
