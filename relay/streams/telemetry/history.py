"""The last samples of one stream, bounded by count, and by bytes over all streams.

Must not know who reads them.
"""

from collections import deque
from dataclasses import dataclass

MAX_SAMPLES = 300
MAX_BYTES_OF_ALL = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its place in the stream from 1, the node's time, and its ASCII JSON."""

    number: int
    ts_ms: int
    text: str


class HistoryBytes:
    """How many bytes the histories of one relay have together."""

    __slots__ = ("limit", "used")

    def __init__(self, limit: int = MAX_BYTES_OF_ALL) -> None:
        self.limit = limit
        self.used = 0


class History:
    """The samples of one stream, oldest first. It has at least the latest."""

    __slots__ = ("_bytes", "_max_samples", "_samples", "count")

    def __init__(self, in_all: HistoryBytes, max_samples: int = MAX_SAMPLES) -> None:
        self._bytes = in_all
        self._max_samples = max_samples
        self._samples: deque[Sample] = deque()
        self.count = 0

    @property
    def latest(self) -> Sample | None:
        """The newest sample."""
        return self._samples[-1] if self._samples else None

    def append(self, ts_ms: int, text: str) -> Sample:
        """Add a sample; the oldest make space for it. While all histories are full, each shortens itself."""
        self.count += 1
        sample = Sample(self.count, ts_ms, text)
        self._samples.append(sample)
        self._bytes.used += len(text)
        while len(self._samples) > self._max_samples or (
            self._bytes.used > self._bytes.limit and len(self._samples) > 1
        ):
            self._bytes.used -= len(self._samples.popleft().text)
        return sample

    def since(self, ts_ms: int) -> list[Sample]:
        """Return the samples that the node took after ``ts_ms``, by its own clock."""
        return [sample for sample in self._samples if sample.ts_ms > ts_ms]

    def lost_after(self, number: int) -> int:
        """Return how many samples after the one of that number are not here any more."""
        first = self._samples[0].number if self._samples else self.count + 1
        return max(0, first - number - 1)

    def clear(self) -> None:
        """Drop all samples."""
        self._bytes.used -= sum(len(sample.text) for sample in self._samples)
        self._samples.clear()
