"""Limits connections: their number, by holder or by address, and the time until the holder is known.

Until a node or an agent is authenticated, a connection counts towards its address. From then on it counts
towards that node or agent: many of them may share one address. What is sent is metered by the same
(docs/decisions/0097). Must not read data.
"""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import StrEnum

from attrs import define, field
from prometheus_client import Counter
from starlette.types import Scope
from structlog.typing import FilteringBoundLogger

from relay.http.proxies import TrustedProxies
from relay.http.request_meter import RequestMeter, RequestSource, Share, SourceKind
from schemas.addresses import address_group
from schemas.faults import OncePerPlace

CONNECTION_IN_STATE = "edge.connection"
"""The key of the ``AcceptedConnection`` in the ASGI ``state`` of what is served over it."""

REQUEST_TIMEOUT_S = 10.0
"""How long a request, or the handshake of a node, may take."""

_RESERVED = 64
_PER_ADDRESS = 128
_PER_HOLDER = 256
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits of connections: in ``total``, ``unauthenticated``, of one address and of one holder."""

    total: int
    unauthenticated: int
    per_address: int
    per_holder: int

    @classmethod
    def below(cls, descriptors: int) -> "Bounds":
        """Return the limits of a process that may open ``descriptors``, some of which it needs for itself.

        Unauthenticated ones get half of them at most, so that the other half stays for authenticated holders.
        """
        total = max(_SHARE * 2, descriptors - _RESERVED)
        unauthenticated = total // 2
        return cls(
            total,
            unauthenticated,
            min(_PER_ADDRESS, unauthenticated // _SHARE),
            min(_PER_HOLDER, total // _SHARE),
        )

    @staticmethod
    def descriptors_for(connections: int) -> int:
        """Return how many descriptors a process needs for ``total`` to be ``connections`` or more."""
        return connections + _RESERVED


class ConnectionRefusal(StrEnum):
    """Why a connection was rejected: which limit is reached; the value is fit for a counter's label."""

    ADDRESS = "address"
    TOTAL = "total"
    STRANGERS = "strangers"
    HOLDER = "holder"
    DESCRIPTORS = "descriptors"
    PROXY = "proxy"


@define(eq=False, repr=False)
class Connections:
    """The open connections, within ``bounds``. Rejected ones are counted in ``refused``.

    ``on_refused`` is called with the reason of each. A connection of one of ``proxies`` has no address of its
    own: each request on it has one.
    """

    _bounds: Bounds
    _refused: Counter
    request_timeout_s: float = REQUEST_TIMEOUT_S
    _on_refused: Callable[[ConnectionRefusal], None] = lambda _: None
    meter: RequestMeter = field(factory=RequestMeter)
    proxies: TrustedProxies = field(factory=TrustedProxies)
    _open: "set[AcceptedConnection]" = field(init=False, factory=set)
    _unauthenticated: int = field(init=False, default=0)
    _waiting: "OrderedDict[AcceptedConnection, None]" = field(init=False, factory=OrderedDict)
    # Keys with a count of zero are removed: there are more addresses than memory for them.
    _by_address: defaultdict[Hashable, int] = field(init=False, factory=lambda: defaultdict(int))
    _by_holder: defaultdict[Hashable, int] = field(init=False, factory=lambda: defaultdict(int))

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, address: str) -> "AcceptedConnection | None":
        """Return a connection from ``address``, whose timer runs; None if a limit is reached."""
        is_proxy = self.proxies.trusts(address)
        group = None if is_proxy else address_group(address)
        if not self._has_room_for(group):
            self.refuse(ConnectionRefusal.ADDRESS)
        elif len(self._open) >= self._bounds.total:
            self.refuse(ConnectionRefusal.TOTAL)
        elif self._unauthenticated >= self._bounds.unauthenticated and not self._evict_longest_waiting():
            self.refuse(ConnectionRefusal.STRANGERS)
        else:
            connection = AcceptedConnection(self, address, group, is_proxy=is_proxy)
            self._open.add(connection)
            self._count_unauthenticated(group, 1)
            connection.expect()
            return connection
        return None

    def regroup(self, connection: "AcceptedConnection", group: str | None) -> bool:
        """Count an unauthenticated ``connection`` towards ``group`` instead; return False if that is full."""
        if not self._has_room_for(group):
            self.refuse(ConnectionRefusal.ADDRESS)
            return False
        if connection in self._open and connection.holder is None:
            self._uncount(connection)
            self._count_unauthenticated(group, 1)
        return True

    def wait(self, connection: "AcceptedConnection") -> None:
        """Add ``connection`` to those that wait, in their order, if it is unauthenticated."""
        if connection.holder is None:
            self._waiting[connection] = None

    def wait_no_more(self, connection: "AcceptedConnection") -> None:
        self._waiting.pop(connection, None)

    def refuse(self, reason: ConnectionRefusal) -> None:
        self._refused.labels(reason).inc()
        self._on_refused(reason)

    def abort(self) -> None:
        for connection in list(self._open):
            connection.abort()

    def _has_room_for(self, group: str | None) -> bool:
        return group is None or self._by_address.get(group, 0) < self._bounds.per_address

    def has_room(self, holder: Hashable) -> bool:
        return self._by_holder.get(holder, 0) < self._bounds.per_holder

    def take(self, connection: "AcceptedConnection", holder: Hashable) -> bool:
        if not self.has_room(holder):
            self.refuse(ConnectionRefusal.HOLDER)
            return False
        self._uncount(connection)
        self._by_holder[holder] += 1
        return True

    def end(self, connection: "AcceptedConnection") -> None:
        if connection in self._open:
            self._open.remove(connection)
            self._uncount(connection)

    def _evict_longest_waiting(self) -> bool:
        """Abort the unauthenticated connection that waits longest; return False if none waits.

        Rejecting the newest would let silent connections keep out all others until their timeout.
        """
        if not self._waiting:
            return False
        longest = next(iter(self._waiting))
        self.refuse(ConnectionRefusal.STRANGERS)
        longest.abort()
        longest.end()
        return True

    def _uncount(self, connection: "AcceptedConnection") -> None:
        if connection.holder is None:
            self._count_unauthenticated(connection.group, -1)
        else:
            _add(self._by_holder, connection.holder, -1)

    def _count_unauthenticated(self, group: str | None, change: int) -> None:
        self._unauthenticated += change
        if group is not None:
            _add(self._by_address, group, change)


class AcceptedConnection:
    """One connection, from its acceptance to its end.

    One timer aborts it. It runs from the acceptance until a request is complete or a node is
    authenticated, also through the upgrade, and again while another request is being received.

    Attributes:
        address: where it comes from.
        group: the addresses that it counts towards while it is unauthenticated.
        holder: the node or agent that it counts towards; None while it is unauthenticated.
        source: what is sent is metered by; None where a proxy forwards what many send.
    """

    __slots__ = (
        "_abort",
        "_connections",
        "_is_upgraded",
        "_timer",
        "address",
        "group",
        "holder",
        "source",
    )

    def __init__(self, connections: Connections, address: str, group: str | None, *, is_proxy: bool) -> None:
        self.address = address
        self.group = group
        self.holder: Hashable | None = None
        self.source = None if is_proxy else RequestSource.of_group(group)
        self._connections = connections
        self._is_upgraded = False
        self._timer: asyncio.TimerHandle | None = None
        self._abort: Callable[[], object] | None = None

    def begin(self, abort: Callable[[], object]) -> None:
        """Set how it is aborted: at first its handshake, then its transport."""
        self._abort = abort

    @property
    def meter(self) -> RequestMeter:
        return self._connections.meter

    @property
    def proxies(self) -> TrustedProxies:
        return self._connections.proxies

    def come_from(self, address: str) -> bool:
        """Count towards ``address``, whose connection a proxy has passed on; return False if that is full."""
        is_proxy = self._connections.proxies.trusts(address)
        group = None if is_proxy else address_group(address)
        if not self._connections.regroup(self, group):
            return False
        self.address, self.group = address, group
        self.source = None if is_proxy else RequestSource.of_group(group)
        return True

    def become_of(self, address: str) -> bool:
        """Count towards ``address``, whose upgrade a proxy forwards; return False if a limit is reached."""
        return self.come_from(address) and (
            self.source is None or self.meter.take(self.source, Share.REQUESTS, 1)
        )

    def upgrade(self) -> None:
        """Expect no further requests, but the node's authentication."""
        self._is_upgraded = True
        self.expect()

    def expect(self) -> None:
        if self._timer is None:
            loop, timeout_s = asyncio.get_running_loop(), self._connections.request_timeout_s
            self._timer = loop.call_later(timeout_s, self.abort)
            self._connections.wait(self)

    def rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._connections.wait_no_more(self)

    def may_admit(self, holder: Hashable) -> bool:
        return holder == self.holder or self._connections.has_room(holder)

    def admit(self, holder: Hashable) -> bool:
        """Count towards ``holder`` from now on; return False, without a change, if its limit is reached."""
        if holder == self.holder:
            return True
        if not self._connections.take(self, holder):
            return False
        self.holder = holder
        if self.source is not None:
            self.source = RequestSource(SourceKind.AGENT, holder)
        self._connections.wait_no_more(self)
        if self._is_upgraded:
            self.rest()  # an agent's request goes on: its body is still to be received
        return True

    def abort(self) -> None:
        """Abort, without sending what is left."""
        if self._abort is not None:
            self._abort()

    def end(self) -> None:
        """Stop counting: it is closed."""
        self.rest()
        self._connections.end(self)


def admit(scope: Scope, holder: Hashable) -> bool:
    """Count the connection of ``scope`` towards ``holder``; return False if its limit is reached."""
    connection: AcceptedConnection | None = scope.get("state", {}).get(CONNECTION_IN_STATE)
    return connection is None or connection.admit(holder)


def _add(counts: defaultdict[Hashable, int], key: Hashable, change: int) -> None:
    counts[key] += change
    if not counts[key]:
        del counts[key]


def refusal_log(
    log: FilteringBoundLogger,
    bounds: Bounds,
    descriptors: int,
    monotonic: Callable[[], float] = time.monotonic,
) -> Callable[[ConnectionRefusal], None]:
    """Return what logs refused connections, each reason once a minute: often all that tells of a node.

    ``descriptors`` is how many files the process may open, from which ``bounds`` are; ``monotonic`` is in
    seconds.
    """
    once = OncePerPlace()

    def report(reason: ConnectionRefusal) -> None:
        suppressed = once.suppressed_before(reason, monotonic())
        if suppressed is not None:
            log.warning(
                "connections refused",
                reason=reason,
                connections=bounds.total,
                open_files=descriptors,
                kept_back=suppressed,
            )

    return report
