"""One stream: the samples of one capability of one node, and everyone that follows them.

The node samples once, at the shortest interval and with all parts that a subscriber wants. Must not send
frames: ``leases`` does.
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from relay.ascii_json import encoded
from relay.fleet.tools import Tool
from relay.streams.telemetry.cadence import Cadence
from relay.streams.telemetry.history import History, Sample
from relay.streams.telemetry.subscription import Subscription


@dataclass(frozen=True, slots=True)
class Terms:
    """What a node is to sample: how often, and which parts; None for all."""

    interval_ms: int
    include: frozenset[str] | None


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

    __slots__ = (
        "_includes",
        "_intervals",
        "_required",
        "_subscriptions",
        "cadence",
        "history",
        "leased",
        "leased_s",
        "received_s",
        "tenant",
        "tool",
    )

    def __init__(self, tool: Tool, tenant: str, history: History, now_s: float) -> None:
        self.tool = tool
        self.tenant = tenant
        self.history = history
        self.leased: Terms | None = None
        self.leased_s = now_s
        self.cadence = Cadence(now_s)
        self.received_s = now_s
        self._required = frozenset(tool.surface.output_schema.get("required", ()))
        self._subscriptions: dict[Hashable, Subscription] = {}
        self._intervals: Counter[int] = Counter()
        self._includes: Counter[frozenset[str] | None] = Counter()

    def __len__(self) -> int:
        return len(self._subscriptions)

    def __iter__(self) -> Iterator[tuple[Hashable, Subscription]]:
        return iter(list(self._subscriptions.items()))

    def get(self, key: Hashable) -> Subscription | None:
        """Return the subscription of that key."""
        return self._subscriptions.get(key)

    def add(self, key: Hashable, subscription: Subscription) -> None:
        """Add a subscription, in the place of one with the same key."""
        self.remove(key)
        self._subscriptions[key] = subscription
        self._intervals[subscription.interval_ms] += 1
        self._includes[subscription.include] += 1

    def remove(self, key: Hashable) -> Subscription | None:
        """Remove the subscription of that key and return it."""
        subscription = self._subscriptions.pop(key, None)
        if subscription is not None:
            _less(self._intervals, subscription.interval_ms)
            _less(self._includes, subscription.include)
        return subscription

    def terms(self) -> Terms | None:
        """Return what the node is to sample now; None without a subscriber."""
        if not self._subscriptions:
            return None
        wanted = None if None in self._includes else frozenset[str]().union(*filter(None, self._includes))
        return Terms(min(self._intervals), wanted)

    def take(self, ts_ms: int, text: str, now_s: float) -> dict[Hashable, Exception]:
        """Take in a sample, and give it to all for whom it is due; return whose subscription raised what."""
        failed: dict[Hashable, Exception] = {}
        sample = self.history.append(ts_ms, text)
        interval_s = min(self._intervals, default=0) / 1000
        self.received_s = now_s
        for key, subscription in self:
            try:
                if subscription.takes(now_s, interval_s):
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


def _less(counter: "Counter[Any]", key: Hashable) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
