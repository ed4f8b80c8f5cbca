"""One stream: the samples of one capability of one node, and all that follow them, each at its own cadence.

The node samples once, at the shortest interval and with all parts that a subscriber wants. The last samples
are kept, bounded by count, and by bytes over all streams. Times are seconds of a monotonic clock. Must not
send frames, nor know how samples reach an agent: ``hub`` does.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from attrs import define, field
from pydantic_core import from_json

from relay.auth.agent_tokens import Principal
from relay.fleet.tools import Tool
from relay.observability.ascii_json import encoded
from schemas.errors import ToolError
from schemas.tally import Tally


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


MAX_SAMPLES = 300
MAX_BYTES_OF_ALL = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its place in the stream from 1, the node's time, and its ASCII JSON.

    Attributes:
        is_set_back: whether an earlier sample has the same time or a later one.
    """

    number: int
    ts_ms: int
    text: str
    is_set_back: bool


@define(eq=False, repr=False)
class HistoryBytes:
    """How many bytes the histories of one relay have together."""

    limit: int = MAX_BYTES_OF_ALL
    used: int = field(init=False, default=0)


@define(eq=False, repr=False)
class History:
    """The samples of one stream, oldest first. It has at least the latest."""

    _in_all: HistoryBytes
    _max_samples: int = MAX_SAMPLES
    _samples: deque[Sample] = field(init=False, factory=deque)
    _highest_ms: int = field(init=False, default=-1)
    count: int = field(init=False, default=0)

    @property
    def latest(self) -> Sample | None:
        return self._samples[-1] if self._samples else None

    def append(self, ts_ms: int, text: str) -> Sample:
        """Add a sample; the oldest make space for it. While all histories are full, each shortens itself."""
        self.count += 1
        sample = Sample(self.count, ts_ms, text, is_set_back=ts_ms <= self._highest_ms)
        self._highest_ms = max(self._highest_ms, ts_ms)
        self._samples.append(sample)
        self._in_all.used += len(text)
        while len(self._samples) > self._max_samples or (
            self._in_all.used > self._in_all.limit and len(self._samples) > 1
        ):
            self._in_all.used -= len(self._samples.popleft().text)
        return sample

    def since(self, ts_ms: int, seen: int) -> list[Sample]:
        """Return the samples that the node took after ``ts_ms``, by its own clock.

        After that was set back, also those that the reader, which has read up to number ``seen``, has not.
        """
        return [
            sample
            for sample in self._samples
            if sample.ts_ms > ts_ms or (sample.is_set_back and sample.number > seen)
        ]

    def lost_after(self, number: int) -> int:
        """Return how many samples after the one of that number are not here any more."""
        first = self._samples[0].number if self._samples else self.count + 1
        return max(0, first - number - 1)

    def clear(self) -> None:
        self._in_all.used -= sum(len(sample.text) for sample in self._samples)
        self._samples.clear()


MIN_LEASE_S = 30.0
_INTERVALS = 3


def lease_s(interval_s: float) -> float:
    """Return how long a lease lasts: three intervals, and at least 30 s."""
    return max(_INTERVALS * interval_s, MIN_LEASE_S)


@define(eq=False, repr=False)
class Subscription:
    """One subscriber.

    Attributes:
        include: the parts of a sample that it wants; None for all.
        on_sample: is called with each sample at its cadence. Must not block.
        on_end: is called once when the relay ends it, with the reason.
        expires_s: when its lease ends, on the hub's monotonic clock.
        cadence: which samples it takes.
        seen: the number of the newest sample that its agent has read.
    """

    principal: Principal
    interval_ms: int
    include: frozenset[str] | None
    on_sample: Callable[[Sample], None]
    on_end: Callable[[ToolError], None]
    seen: int
    expires_s: float = 0.0
    cadence: Cadence = field(factory=Cadence)

    @property
    def interval_s(self) -> float:
        return self.interval_ms / 1000

    def begin(self, now_s: float) -> None:
        self.renew(now_s)
        self.cadence.due_s = now_s + self.interval_s

    def renew(self, now_s: float) -> None:
        self.expires_s = now_s + lease_s(self.interval_s)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a node is to sample: how often, and which parts; None for all."""

    interval_ms: int
    include: frozenset[str] | None


@define(eq=False, repr=False)
class Stream:
    """One stream.

    Attributes:
        tool: the one that was called to start it.
        tenant: of the node, and so of every subscriber.
        leased: the terms of the node's current lease; None while it has none that is known.
        leased_s: when that was sent.
        cadence: which samples it takes: a node can send more often, because others have leased it too.
        received_s: when the last sample arrived.
    """

    tool: Tool
    tenant: str
    history: History
    received_s: float
    leased: Terms | None = field(init=False, default=None)
    leased_s: float = field(init=False)
    cadence: Cadence = field(init=False)
    _required: frozenset[str] = field(init=False)
    _subscriptions: dict[Hashable, Subscription] = field(init=False, factory=dict)
    _intervals: Tally[int] = field(init=False, factory=Tally)
    _includes: Tally[frozenset[str] | None] = field(init=False, factory=Tally)

    def __attrs_post_init__(self) -> None:
        self.leased_s = self.received_s
        self.cadence = Cadence(self.received_s)
        self._required = frozenset(self.tool.surface.output_schema.get("required", ()))

    def __len__(self) -> int:
        return len(self._subscriptions)

    def __iter__(self) -> Iterator[tuple[Hashable, Subscription]]:
        return iter(list(self._subscriptions.items()))

    def get(self, key: Hashable) -> Subscription | None:
        return self._subscriptions.get(key)

    def add(self, key: Hashable, subscription: Subscription) -> None:
        """Add a subscription, in the place of one with the same key."""
        self.remove(key)
        self._subscriptions[key] = subscription
        self._intervals[subscription.interval_ms] += 1
        self._includes[subscription.include] += 1

    def remove(self, key: Hashable) -> Subscription | None:
        subscription = self._subscriptions.pop(key, None)
        if subscription is not None:
            self._intervals[subscription.interval_ms] -= 1
            self._includes[subscription.include] -= 1
        return subscription

    def terms(self) -> Terms | None:
        """Return what the node is to sample now; None without a subscriber."""
        if not self._subscriptions:
            return None
        wanted = None if None in self._includes else frozenset[str]().union(*filter(None, self._includes))
        return Terms(min(self._intervals), wanted)

    def take(self, ts_ms: int, text: str, now_s: float) -> dict[Hashable, Exception]:
        """Handle a sample, and give it to all for whom it is due; return whose subscription raised what."""
        failed: dict[Hashable, Exception] = {}
        sample = self.history.append(ts_ms, text)
        # Half of the stream's interval.
        tolerance_s = min(self._intervals, default=0) / 2000
        self.received_s = now_s
        for key, subscription in self:
            try:
                if subscription.cadence.takes(now_s, subscription.interval_s, tolerance_s):
                    subscription.on_sample(sample)
            except Exception as error:  # noqa: BLE001 - a bug of one must not keep the sample from the others
                failed[key] = error
        return failed

    def shown(self, sample: Sample, include: frozenset[str] | None) -> str:
        """Return the text of ``sample`` with the parts of ``include``, and those that every sample has."""
        if include is None:
            return sample.text
        parts: Mapping[str, Any] = from_json(sample.text)
        if parts.keys() <= include | self._required:
            return sample.text
        return encoded(
            {name: part for name, part in parts.items() if name in include or name in self._required}
        )
