"""The connections that the relay holds: how many, for whom, and how long before that is known.

Until a node's session or an agent's token is known, a connection is a stranger's and counts towards its
address. From then on it counts towards that node or agent: many of them may share one address. Must not read
what is sent.
"""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter
from starlette.types import Scope

from relay.address_groups import address_group

CONNECTION_IN_STATE = "edge.connection"
"""Where the ``Connection`` is in the ``state`` of what is served over it."""

REQUEST_TIMEOUT_S = 10.0
"""How long a request, or what comes before a node's session, may take."""

_RESERVED = 64
_PER_ADDRESS = 128
_PER_HOLDER = 256
_SHARE = 4


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many connections there may be: in ``total``, of ``strangers``, of one address and of one holder."""

    total: int
    strangers: int
    per_address: int
    per_holder: int

    @classmethod
    def below(cls, descriptors: int) -> "Bounds":
        """Return the bounds of a process that may open ``descriptors``, some of which it needs for itself.

        Strangers have half of the room at most, so that those who were admitted keep the other half.
        """
        total = max(_SHARE * 2, descriptors - _RESERVED)
        strangers = total // 2
        return cls(
            total, strangers, min(_PER_ADDRESS, strangers // _SHARE), min(_PER_HOLDER, total // _SHARE)
        )


class Connections:
    """The open connections, within ``bounds``. What is refused is counted in ``refused``."""

    def __init__(
        self, bounds: Bounds, refused: Counter, request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        self.request_timeout_s = request_timeout_s
        self._bounds = bounds
        self._refused = refused
        self._open: set[Connection] = set()
        self._strangers = 0
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        # Those without any are forgotten: there are more addresses than there is room to remember them.
        self._by_address: defaultdict[Hashable, int] = defaultdict(int)
        self._by_holder: defaultdict[Hashable, int] = defaultdict(int)

    def __len__(self) -> int:
        return len(self._open)

    def begin(self, address: str) -> "Connection | None":
        """Return a stranger's connection from ``address``, whose time runs; None if there is no room."""
        group = address_group(address)
        if group is not None and self._by_address.get(group, 0) >= self._bounds.per_address:
            self.refuse("address")
        elif len(self._open) >= self._bounds.total:
            self.refuse("total")
        elif self._strangers >= self._bounds.strangers and not self._make_room():
            self.refuse("strangers")
        else:
            connection = Connection(self, group)
            self._open.add(connection)
            self._count_stranger(group, 1)
            connection.expect()
            return connection
        return None

    def wait(self, connection: "Connection") -> None:
        """Note that ``connection`` waits, and since when; of strangers only."""
        if connection.holder is None:
            self._waiting[connection] = None

    def wait_no_more(self, connection: "Connection") -> None:
        """Note that ``connection`` does not wait, or that it is no stranger's."""
        self._waiting.pop(connection, None)

    def refuse(self, reason: str) -> None:
        """Count one that was refused; ``reason`` is a fixed word."""
        self._refused.labels(reason).inc()

    def abort(self) -> None:
        """End all at once, whatever is left to send."""
        for connection in list(self._open):
            connection.abort()

    def take(self, connection: "Connection", holder: Hashable) -> bool:
        """Count ``connection`` towards ``holder``, unless that one has as many as it may."""
        if self._by_holder.get(holder, 0) >= self._bounds.per_holder:
            self.refuse("holder")
            return False
        self._uncount(connection)
        self._by_holder[holder] += 1
        return True

    def end(self, connection: "Connection") -> None:
        """Count ``connection`` no more."""
        if connection in self._open:
            self._open.remove(connection)
            self._uncount(connection)

    def _make_room(self) -> bool:
        """End the stranger that waits longest; return False if none does.

        To refuse the newest would let those who say nothing keep out all others for as long as they may wait.
        """
        if not self._waiting:
            return False
        longest = next(iter(self._waiting))
        self.refuse("strangers")
        longest.abort()
        longest.end()
        return True

    def _uncount(self, connection: "Connection") -> None:
        if connection.holder is None:
            self._count_stranger(connection.group, -1)
        else:
            _add(self._by_holder, connection.holder, -1)

    def _count_stranger(self, group: str | None, change: int) -> None:
        self._strangers += change
        if group is not None:
            _add(self._by_address, group, change)


class Connection:
    """One connection, from its acceptance to its end.

    One timer ends it. It runs from the acceptance until a whole request or a node's session is there, also
    through the upgrade, and again while another request is on its way.

    Attributes:
        group: the addresses that it counts towards while it is a stranger's.
        holder: the node or agent that it counts towards; None for a stranger's.
    """

    __slots__ = ("_abort", "_connections", "_is_upgraded", "_timer", "group", "holder")

    def __init__(self, connections: Connections, group: str | None) -> None:
        self.group = group
        self.holder: Hashable | None = None
        self._connections = connections
        self._is_upgraded = False
        self._timer: asyncio.TimerHandle | None = None
        self._abort: Callable[[], object] | None = None

    def begin(self, abort: Callable[[], object]) -> None:
        """Note how it is ended: at first its handshake, then its transport."""
        self._abort = abort

    def upgrade(self) -> None:
        """Note that no more requests will come, and wait for the node's session."""
        self._is_upgraded = True
        self.expect()

    def expect(self) -> None:
        """Let the time run; if it runs, it goes on."""
        if self._timer is None:
            loop, timeout_s = asyncio.get_running_loop(), self._connections.request_timeout_s
            self._timer = loop.call_later(timeout_s, self.abort)
            self._connections.wait(self)

    def rest(self) -> None:
        """Let no time run: there is nothing to wait for."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._connections.wait_no_more(self)

    def admit(self, holder: Hashable) -> bool:
        """Count towards ``holder`` from now on; return False, with no change, if that one has too many."""
        if holder == self.holder:
            return True
        if not self._connections.take(self, holder):
            return False
        self.holder = holder
        self._connections.wait_no_more(self)
        if self._is_upgraded:
            self.rest()  # of a request, the body is still to come
        return True

    def abort(self) -> None:
        """End at once, whatever is left to send."""
        if self._abort is not None:
            self._abort()

    def end(self) -> None:
        """Count no more: it is closed."""
        self.rest()
        self._connections.end(self)


def connection_in(state: Mapping[str, Any]) -> Connection:
    """Return the connection over which that is served whose ``state`` it is."""
    connection: Connection = state[CONNECTION_IN_STATE]
    return connection


def admit(scope: Scope, holder: Hashable) -> bool:
    """Count the connection of ``scope`` towards ``holder``; return False if that one has too many already."""
    connection: Connection | None = scope.get("state", {}).get(CONNECTION_IN_STATE)
    return connection is None or connection.admit(holder)


def _add(counts: defaultdict[Hashable, int], key: Hashable, change: int) -> None:
    counts[key] += change
    if not counts[key]:
        del counts[key]
