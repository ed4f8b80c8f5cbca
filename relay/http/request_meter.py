"""Meters what is sent over HTTP by its source, before it is parsed (docs/decisions/0097).

A source is an agent, or the address that a connection comes from until an agent is proven. Above its rate,
what it sends waits, each connection in its turn, and nothing more of that is read. The paths that load
balancers and monitoring ask have shares of their own, so that a flood of anything else leaves them theirs.
Must not interpret a request.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from enum import StrEnum
from typing import NamedTuple

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.limits.rate_limits import PER_AGENT, Allowance, evict_idle
from schemas.faults import OncePerPlace
from schemas.pacing import TokenBucket

BYTES_LIKE_A_REQUEST = 4096
"""Parsing this many bytes costs about as much as serving a request that is refused."""
READ_COST = 1 / 16
"""The least that one read costs: it may bring a single byte."""
TLS_COST = 2.0
"""What a connection over TLS costs, in connections without."""

PER_ADDRESS = 600.0
"""Requests a second of one address, and so many at once. Connections: half of it, over TLS a quarter."""
PER_MACHINE = 2 * PER_ADDRESS
"""Of this machine: a proxy here that ``trusted_proxies`` does not name sends for all its clients."""
OVER_AGENT_RPS = 1.25
"""Requests of an agent, for each call that it may make: over that limit it is to get a retry time first."""
_LEAST_PER_S, _LEAST_AT_ONCE = 20.0, 60.0
HEALTH_PER_S, METRICS_PER_S = 100.0, 2.0
_METRICS_AT_ONCE = 10.0
PER_TURN = 4
"""What a source may begin in one turn of the event loop: what is ready of others comes between."""
_MAX_LANES = 20_000


class SourceKind(StrEnum):
    """What a source is; the value is fit for a counter's label."""

    __hash__ = str.__hash__  # at each request: an enumeration's own is in Python

    ADDRESS = "address"
    THIS_MACHINE = "this_machine"
    AGENT = "agent"


class RequestSource(NamedTuple):
    """Where a request comes from: an agent's name, or a group of addresses."""

    kind: SourceKind
    key: Hashable

    @classmethod
    def of_group(cls, group: str | None) -> "RequestSource":
        """Return the source of ``address_group(...)``."""
        return THIS_MACHINE if group is None else cls(SourceKind.ADDRESS, group)


THIS_MACHINE = RequestSource(SourceKind.THIS_MACHINE, "")


class Share(StrEnum):
    """What a request asks for, where that has a rate of its own."""

    __hash__ = str.__hash__  # as above

    REQUESTS = "requests"
    CONNECTIONS = "connections"
    HEALTH = "health"
    METRICS = "metrics"


_STARTS = {
    b"%b /%b%b" % (method, path, end): share
    for method in (b"GET", b"HEAD")
    for path, share in (
        (b"healthz", Share.HEALTH),
        (b"readyz", Share.HEALTH),
        (b"metrics", Share.METRICS),
    )
    for end in (b" ", b"?")
}
_ALL_STARTS = tuple(_STARTS)


def share_of(start: bytes | bytearray) -> Share:
    """Return the share of a request that begins with ``start``, its method and target."""
    if not start.startswith(_ALL_STARTS):
        return Share.REQUESTS
    return next(share for text, share in _STARTS.items() if start.startswith(text))


Resume = Callable[[], object]


class Lane:
    """The rate of one share of a source, and the connections that wait for it.

    Those that have not been served yet come first: a load balancer opens one for each check, and a flood
    holds many.
    """

    __slots__ = ("_again", "_begun", "_bucket", "_burst", "_monotonic", "_new", "_timer")

    def __init__(self, rate: float, burst: float, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._burst = burst
        self._bucket = TokenBucket(rate, burst, monotonic())
        self._new: dict[Resume, float] = {}
        self._again: dict[Resume, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._begun = 0  # in this turn

    def take(self, cost: float) -> bool:
        """Take ``cost`` if it is there, and nothing waits for it."""
        if self._timer is not None:
            return False
        return self._bucket.take(self._monotonic(), min(cost, self._burst)) == 0

    def has(self, cost: float) -> bool:
        """Return whether ``take`` would take ``cost`` now."""
        return self._timer is None and not self.is_exhausted(cost)

    def begin(self, cost: float) -> bool:
        """Take ``cost`` as ``take`` does, if there is also room for it in this turn."""
        if self._begun >= PER_TURN or not self.take(cost):
            return False
        if self._begun == 0:
            asyncio.get_running_loop().call_soon(self._end_turn)
        self._begun += 1
        return True

    def wait(self, cost: float, resume: Resume, *, is_new: bool) -> None:
        """Call ``resume`` once ``cost`` is taken, in its turn."""
        (self._new if is_new else self._again)[resume] = min(cost, self._burst)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(0, self._admit)

    def is_exhausted(self, cost: float) -> bool:
        """Return whether ``cost`` is not there."""
        return self._bucket.take(self._monotonic(), cost=0.0, kept=min(cost, self._burst)) > 0

    def leave(self, resume: Resume) -> None:
        self._new.pop(resume, None)
        self._again.pop(resume, None)

    def is_idle(self, now: float) -> bool:
        return self._timer is None and self._bucket.is_full(now)

    def change(self, rate: float, burst: float) -> None:
        self._burst = burst
        self._bucket.change(rate, burst)

    def _end_turn(self) -> None:
        self._begun = 0

    def _admit(self) -> None:
        """Let those go on whose turn it is; come back while others wait."""
        loop, wait_s = asyncio.get_running_loop(), 0.0
        for _ in range(PER_TURN):
            if not (waiting := self._new or self._again):
                self._timer = None
                return
            resume, cost = next(iter(waiting.items()))
            if (wait_s := self._bucket.take(self._monotonic(), min(cost, self._burst))) > 0:
                break
            del waiting[resume]
            loop.call_soon(resume)
        self._timer = loop.call_later(wait_s, self._admit)


@define(eq=False, repr=False)
class RequestMeter:
    """The lanes of all sources; ``on_wait`` is called with the source of what has to wait, or is refused."""

    _per_agent: Allowance = PER_AGENT
    _monotonic: Callable[[], float] = time.monotonic
    _on_wait: Callable[[RequestSource], None] = lambda _: None
    _lanes: OrderedDict[tuple[RequestSource, Share], Lane] = field(init=False, factory=OrderedDict)

    def change(self, per_agent: Allowance) -> None:
        """Apply another limit of agents from now on."""
        self._per_agent = per_agent
        for (source, share), lane in self._lanes.items():
            lane.change(*self._rate_of(source, share))

    def take(self, source: RequestSource, share: Share, cost: float) -> bool:
        """Take ``cost`` and return True, or return False if ``source`` is over its rate."""
        if self._lane(source, share).take(cost):
            return True
        self._on_wait(source)
        return False

    def has(self, source: RequestSource, share: Share, cost: float) -> bool:
        """Return whether ``take`` would take ``cost`` now."""
        return self._lane(source, share).has(cost)

    def enter(
        self, source: RequestSource, share: Share, cost: float, resume: Resume, *, is_new: bool
    ) -> Lane | None:
        """Take ``cost`` and return None; or return the lane in which ``resume`` waits to be called."""
        lane = self._lane(source, share)
        if lane.begin(cost):
            return None
        if lane.is_exhausted(cost):  # and not for a turn
            self._on_wait(source)
        lane.wait(cost, resume, is_new=is_new)
        return lane

    async def entered(self, source: RequestSource, cost: float) -> None:
        """Return when a new connection of ``source``, which costs so much, may be served."""
        turn = asyncio.get_running_loop().create_future()

        def resume() -> None:
            if not turn.done():
                turn.set_result(None)

        if (lane := self.enter(source, Share.CONNECTIONS, cost, resume, is_new=True)) is not None:
            try:
                await turn
            finally:
                lane.leave(resume)

    def _lane(self, source: RequestSource, share: Share) -> Lane:
        lane = self._lanes.get((source, share))
        if lane is None:
            # One that is not idle is never evicted, so there can be more.
            evict_idle(self._lanes, _MAX_LANES, self._monotonic())
            lane = Lane(*self._rate_of(source, share), self._monotonic)
            self._lanes[source, share] = lane
        else:
            self._lanes.move_to_end((source, share))
        return lane

    def _rate_of(self, source: RequestSource, share: Share) -> tuple[float, float]:
        """Return the rate a second, and how much there may be at once."""
        if share is Share.HEALTH:
            return HEALTH_PER_S, HEALTH_PER_S
        if share is Share.METRICS:
            return METRICS_PER_S, _METRICS_AT_ONCE
        if source.kind is SourceKind.AGENT:
            rate = OVER_AGENT_RPS * self._per_agent.rate
            return max(_LEAST_PER_S, rate), max(_LEAST_AT_ONCE, rate)
        rate = PER_MACHINE if source.kind is SourceKind.THIS_MACHINE else PER_ADDRESS
        return (rate / 2, rate / 2) if share is Share.CONNECTIONS else (rate, rate)


def waiting_log(log: FilteringBoundLogger, monotonic: Callable[[], float]) -> Callable[[RequestSource], None]:
    """Return what logs that sources are over their rate, each kind of them once a minute."""
    once = OncePerPlace()

    def report(source: RequestSource) -> None:
        if (suppressed := once.suppressed_before(source.kind, monotonic())) is None:
            return
        facts: dict[str, Hashable] = {"kept_back": suppressed}
        if source.kind is SourceKind.ADDRESS:
            facts["address"] = source.key
        log.warning("requests over their rate wait", source=source.kind, **facts)

    return report
