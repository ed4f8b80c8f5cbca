"""One session of a caller with a node: what it lends, its events and requests, how its caller is reached.

Events are numbered, in order, and bounded; each is kept as JSON text until its place is needed. That of a
request stays while the request is pending, so that a caller that only polls gets every request. A request
ends once. Its answer is kept for a while, since a frame is lost with its connection and the node asks again
when it resumes. Pure but for the ``asyncio.Event`` that wakes up what waits. Times are seconds of a monotonic
clock. The limits that the relay alone keeps are here too; those of both ends are in the contract. Must not
send frames, nor decide when a session ends.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from attrs import define, field, frozen

from relay.auth.agent_tokens import AgentName, Principal
from relay.observability.ascii_json import encoded
from schemas.caller_tools import NODE_MARGIN_S
from schemas.error_roots import EdgeError
from schemas.payloads import CallerTool, CallerToolResult, SessionOpen
from schemas.tally import Tally

MAX_WAIT_MS = 60_000
"""The longest long poll: longer waits are cut off by clients and proxies."""
MAX_RESULT_BYTES = 256 * 1024
"""The events of one answer; one event always fits."""
MAX_EVENTS = 512
"""The events that one session keeps, besides the requests that are pending."""
MAX_TOKENS = 32
"""The tokens that are noted for one session, those that expire last."""
MAX_SESSIONS = 4096
"""The live sessions of all nodes."""
GRACE_S = 2.0
"""How soon a caller that has closed a request before its response has to make another one."""
MAX_POLLS = 64
"""The long polls that one agent has open."""
NODE_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20


@dataclass(slots=True)
class Timeouts:
    """How long things last, in seconds. They may be changed.

    Attributes:
        request: how long a request waits for the caller's answer.
        unreachable: how long one that is not delivered waits for a caller that cannot be reached.
        idle: how long a session lasts without use by either end.
    """

    request: float = 60.0
    unreachable: float = 10.0
    idle: float = 1800.0

    @property
    def kept(self) -> float:
        """How long a request that has ended is known, with its answer.

        A node that resumes its session asks again for as long as it waits, and such a request must not reach
        the caller a second time.
        """
        return self.request + 2 * NODE_MARGIN_S


class Holder(NamedTuple):
    """Whose it is: the session's principal, which names its tenant, and its node."""

    principal: AgentName
    node_id: str

    @property
    def tenant(self) -> str:
        _, tenant, _ = self.principal
        return tenant


class Full(StrEnum):
    """Which bound leaves no room: that of whose sessions."""

    NODE = "The sessions of this node"
    PRINCIPAL = "Your sessions"
    TENANT = "The sessions of your tenant"


@define(eq=False, repr=False)
class SharedBudget:
    """What is in use, ``total``: ``per_node`` at most for one node, and ``in_all``.

    That is memory, as bytes of JSON text, or the number of sessions. A tenant has at most as much as is left
    free of all, and a principal at most as much as is left of that to its tenant, so that another one always
    finds room. A tenant that is alone has half of all, and a principal that is alone half of that.
    """

    _per_node: int
    _in_all: int
    _nodes: Tally[str] = field(init=False, factory=Tally)
    _tenants: Tally[str] = field(init=False, factory=Tally)
    _principals: Tally[AgentName] = field(init=False, factory=Tally)
    total: int = field(init=False, default=0)

    def take(self, holder: Holder, size: int) -> Full | None:
        """Count ``size`` for ``holder``, or count nothing and return what leaves no room for it."""
        if (full := self.full(holder, size)) is None:
            self._count(holder, size)
        return full

    def full(self, holder: Holder, size: int) -> Full | None:
        """Return what leaves no room for ``size`` more of ``holder``, if anything does."""
        if self._nodes[holder.node_id] + size > self._per_node:
            return Full.NODE
        # What it takes is also taken from what is free, so that it may take half of the difference.
        of_tenant = (self._in_all - self.total - self._tenants[holder.tenant]) // 2
        if size > of_tenant:
            return Full.TENANT
        if size > (of_tenant - self._principals[holder.principal]) // 2:
            return Full.PRINCIPAL
        return None

    def give_back(self, holder: Holder, size: int) -> None:
        self._count(holder, -size)

    def _count(self, holder: Holder, size: int) -> None:
        self.total += size
        self._nodes[holder.node_id] += size
        self._tenants[holder.tenant] += size
        self._principals[holder.principal] += size


class EventType(StrEnum):
    """What an event is."""

    REQUEST = "caller_tool_request"
    REQUEST_CANCELLED = "caller_tool_cancelled"
    REQUEST_ENDED = "caller_tool_ended"
    MESSAGE = "session_event"
    ENDED = "session_ended"


class EventsFullError(EdgeError):
    """There is no memory for another request."""


@dataclass(frozen=True, slots=True)
class CallerEvent:
    """One event. ``text`` is its JSON, in ASCII; ``request_id`` is that of a request."""

    cursor: int
    text: str
    request_id: str | None = None


@define(eq=False, repr=False)
class EventBuffer:
    """The events of the session ``session_id``, which takes its memory from ``budget`` for ``holder``.

    Attributes:
        newest: the cursor of the newest event; 0 before the first.
        size: the bytes that the events take of the budget.
    """

    _session_id: str
    _holder: Holder
    _budget: SharedBudget
    _max_events: int = MAX_EVENTS
    _events: OrderedDict[int, CallerEvent] = field(init=False, factory=OrderedDict)
    _requests: dict[str, int] = field(init=False, factory=dict)
    _evicted: int = field(init=False, default=0)
    newest: int = field(init=False, default=0)
    size: int = field(init=False, default=0)

    def append(
        self, type_: EventType, members: Mapping[str, Any], request_id: str | None = None
    ) -> CallerEvent | None:
        """Add an event; ``request_id`` keeps it until it is discarded. None: there was no memory for it.

        Raises:
            EventsFullError: there is no memory for the request.
        """
        cursor = self.newest + 1
        head = {"type": type_.value, "session_id": self._session_id, "cursor": cursor}
        event = CallerEvent(cursor, encoded({**head, **members}), request_id)
        self._evict(self._max_events - 1)
        while self._budget.take(self._holder, len(event.text)) is not None:
            if not self._evict(len(self._events) - len(self._requests) - 1):
                if request_id is not None:
                    raise EventsFullError
                # The caller learns from the gap that it missed one.
                self.newest = self._evicted = cursor
                return None
        self.newest = cursor
        self.size += len(event.text)
        self._events[cursor] = event
        if request_id is not None:
            self._requests[request_id] = cursor
        return event

    def discard(self, request_id: str) -> None:
        cursor = self._requests.pop(request_id, None)
        if cursor is not None:
            self._remove(cursor)

    def after(self, cursor: int, max_bytes: int) -> list[CallerEvent]:
        """Return the events behind ``cursor``, as many as fit ``max_bytes``, and one at least."""
        found: list[CallerEvent] = []
        size = 0
        for event in (event for event in self._events.values() if event.cursor > cursor):
            size += len(event.text)
            if found and size > max_bytes:
                break
            found.append(event)
        return found

    def has_missed(self, cursor: int) -> bool:
        """Return whether an event behind ``cursor`` was evicted."""
        return self._evicted > cursor

    def _evict(self, at_most: int) -> bool:
        """Evict the oldest events that are no pending request until there are ``at_most`` of them."""
        spare = len(self._events) - len(self._requests) - max(at_most, 0)
        if spare <= 0:
            return False
        oldest = [event.cursor for event in self._events.values() if event.request_id is None][:spare]
        for cursor in oldest:
            self._remove(cursor)
        self._evicted = max(self._evicted, oldest[-1])
        return True

    def _remove(self, cursor: int) -> None:
        event = self._events.pop(cursor)
        self.size -= len(event.text)
        self._budget.give_back(self._holder, len(event.text))


_MAX_KEPT = 256
_MAX_KEPT_BYTES = 512 * 1024


@define(eq=False, repr=False)
class PendingRequest:
    """A request that waits for the caller's answer. Times are seconds of a monotonic clock.

    Attributes:
        delivered: whether a caller has read it in an answer.
        streams: the open streams on which it was sent, by their keys.
    """

    request_id: str
    tool: str
    correlation_id: str
    arrived: float
    delivered: bool = False
    streams: set[object] = field(factory=set)

    @property
    def has_reached_caller(self) -> bool:
        return self.delivered or bool(self.streams)


@dataclass(frozen=True, slots=True)
class _Kept:
    """How a request ended; ``payload`` is None when it is no longer kept."""

    payload: CallerToolResult | None
    size: int
    ended: float


@define(eq=False, repr=False)
class SessionRequests:
    """The requests of one session, by id."""

    _pending: dict[str, PendingRequest] = field(init=False, factory=dict)
    _ended: OrderedDict[str, _Kept] = field(init=False, factory=OrderedDict)
    _kept_bytes: int = field(init=False, default=0)

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[PendingRequest]:
        return iter(tuple(self._pending.values()))

    def add(self, request: PendingRequest) -> None:
        self._pending[request.request_id] = request

    def find(self, request_id: str) -> PendingRequest | None:
        return self._pending.get(request_id)

    def is_known(self, request_id: str) -> bool:
        """Return whether a request of that id is pending, or has ended lately."""
        return request_id in self._pending or request_id in self._ended

    def end(self, request_id: str, payload: CallerToolResult, size: int, now: float) -> None:
        """End a pending request, and keep ``payload``, of ``size`` bytes, for when the node asks again."""
        del self._pending[request_id]
        self._ended[request_id] = _Kept(payload, size, now)
        self._kept_bytes += size
        for oldest in list(self._ended):
            if self._kept_bytes <= _MAX_KEPT_BYTES:
                break
            self._drop_payload(oldest)
        self._forget_oldest()

    def withdraw(self, request_id: str) -> PendingRequest | None:
        """Remove a pending request whose answer is not needed; it cannot be asked again."""
        request = self._pending.pop(request_id, None)
        if request is not None:
            self._ended[request_id] = _Kept(None, 0, request.arrived)
            self._forget_oldest()
        return request

    def answer_to(self, request_id: str) -> CallerToolResult | None:
        kept = self._ended.get(request_id)
        return kept.payload if kept is not None else None

    def kept_answers(self) -> Collection[CallerToolResult]:
        """Return the answers that are kept, in the order in which they were given."""
        return [kept.payload for kept in self._ended.values() if kept.payload is not None]

    def forget_before(self, moment: float) -> None:
        """Forget the requests that ended before ``moment``."""
        for request_id in [key for key, kept in self._ended.items() if kept.ended < moment]:
            self._forget(request_id)

    def _forget_oldest(self) -> None:
        while len(self._ended) > _MAX_KEPT:
            self._forget(next(iter(self._ended)))

    def _drop_payload(self, request_id: str) -> None:
        kept = self._ended[request_id]
        self._ended[request_id] = _Kept(None, 0, kept.ended)
        self._kept_bytes -= kept.size

    def _forget(self, request_id: str) -> None:
        self._drop_payload(request_id)
        del self._ended[request_id]


@frozen(eq=False, repr=False)
class Lent:
    """The tools that the caller lends, by name, and their size in bytes."""

    tools: Mapping[str, CallerTool] = field(factory=dict)
    size: int = 0


@define(eq=False, repr=False, kw_only=True)
class CallerSession:
    """A live session, and what it is bound to.

    Attributes:
        node_key: the public key of the node; one of the same id with another key is another node.
        principal: the name of the principal that opened it: issuer, tenant and subject.
        owner: the opaque hash of it that the node is given.
        timeout_ms: how long a request waits for the caller's answer.
        lent: what the caller lends now.
        tokens: the tokens that were used with it, by ``jti``.
        last_used: when either end used it.
        has_ended: whether it has ended; what waits for its events returns then.
        polls: how many long polls are open.
        lost_with: the session of the node itself that was lost last, if one was.
    """

    session_id: str
    tenant: str
    node_id: str
    node_key: bytes
    principal: AgentName
    owner: str
    caller_id: str
    timeout_ms: int
    lent: Lent
    events: EventBuffer
    last_used: float
    requests: SessionRequests = field(init=False, factory=SessionRequests)
    tokens: dict[str, Principal] = field(init=False, factory=dict)
    has_ended: bool = field(init=False, default=False)
    polls: int = field(init=False, default=0)
    lost_with: str = field(init=False, default="")
    _streams: set[object] = field(init=False, factory=set)
    _connections: set[object] = field(init=False, factory=set)
    _reachable_until: float = field(init=False)
    _left: float | None = field(init=False, default=None)
    _left_plainly: bool = field(init=False, default=False)
    _changed: asyncio.Event = field(init=False, factory=asyncio.Event)

    def __attrs_post_init__(self) -> None:
        self._reachable_until = self.last_used

    @property
    def holder(self) -> Holder:
        """Whose memory it takes."""
        return Holder(self.principal, self.node_id)

    def use(self, principal: Principal, now: float) -> None:
        self._is_there()
        self.last_used = now
        self.tokens[principal.jti] = principal
        if len(self.tokens) > MAX_TOKENS:
            first = min(self.tokens.values(), key=lambda used: used.expires_s)
            del self.tokens[first.jti]

    def frame(self) -> SessionOpen:
        return {
            "session_id": self.session_id,
            "caller_id": self.caller_id,
            "owner": self.owner,
            "tools": list(self.lent.tools.values()),
            "timeout_ms": self.timeout_ms,
        }

    def push(self, type_: EventType, members: Mapping[str, Any], request_id: str | None = None) -> None:
        """Add an event, and wake up what waits for one.

        Raises:
            EventsFullError: there is no memory for the request.
        """
        self.events.append(type_, members, request_id)
        self._wake()

    def end(self) -> None:
        self.has_ended = True
        self._wake()

    async def wait_for_events(self, after: int) -> None:
        """Return when there is something behind ``after`` to be read, or the session has ended."""
        while not (self.has_events(after) or self.has_ended):
            await self._changed.wait()

    async def events_behind(self, cursor: int) -> AsyncIterator[CallerEvent]:
        """Yield the events behind ``cursor``, each as it happens, until the session has ended."""
        while True:
            changed = self._changed  # before the events are read
            events = self.events.after(cursor, MAX_RESULT_BYTES)
            for event in events:
                yield event
                cursor = event.cursor
            if not events:
                if self.has_ended:
                    return
                await changed.wait()

    def has_events(self, after: int) -> bool:
        """Return whether there is something behind ``after`` to be read, or was."""
        return self.events.has_missed(after) or bool(self.events.after(after, 1))

    def read(self, after: int) -> list[CallerEvent]:
        """Return the events behind ``after`` for an answer to the caller; requests in it are delivered."""
        found = self.events.after(after, MAX_RESULT_BYTES)
        for event in found:
            if event.request_id is not None and (request := self.requests.find(event.request_id)):
                request.delivered = True
        return found

    def sent(self, event: CallerEvent, stream: object) -> None:
        """Note that ``event`` was sent on ``stream``, if that is still open."""
        if event.request_id is not None and stream in self._streams:
            request = self.requests.find(event.request_id)
            if request is not None:
                request.streams.add(stream)

    def open_stream(self, stream: object) -> None:
        self._streams.add(stream)
        self._is_there()

    def close_stream(self, stream: object, now: float) -> list[PendingRequest]:
        """Note that a stream has ended; return the requests that reached the caller by it alone."""
        if stream not in self._streams:
            return []
        self._streams.discard(stream)
        self._reachable_until = now
        lost = []
        for request in self.requests:
            if stream in request.streams:
                request.streams.discard(stream)
                if not request.has_reached_caller:
                    lost.append(request)
        return lost

    @contextmanager
    def polled(self, now: Callable[[], float]) -> Iterator[None]:
        self.polls += 1
        try:
            yield
            self._is_there()  # it got the response
        finally:
            self.polls -= 1
            self._reachable_until = now()

    def connected(self, connection: object) -> None:
        """Note an MCP session by which it is used."""
        self._connections.add(connection)

    def disconnected(self, connection: object, now: float) -> None:
        """Note that an MCP session has ended, or closed its stream: with the last one the caller has left."""
        self._connections.discard(connection)
        if not self._connections:
            self.leave(now, plainly=True)

    def leave(self, now: float, *, plainly: bool) -> None:
        """Note that the caller has closed a way to it: a poll, or ``plainly`` what is to stay open."""
        self._left = now
        self._left_plainly |= plainly

    @property
    def is_without_caller(self) -> bool:
        """Whether the caller has plainly left, and has not come back."""
        return self._left_plainly and not self._is_reachable

    def is_abandoned(self, now: float) -> bool:
        """Return whether the caller has left, in any way, and has not come back in time."""
        return self._left is not None and not self._is_reachable and now - self._left >= GRACE_S

    def unreachable_s(self, now: float) -> float:
        """Return for how long the caller could not be reached; 0 while it can."""
        return 0.0 if self._is_reachable else now - self._reachable_until

    @property
    def _is_reachable(self) -> bool:
        return bool(self.polls or self._streams)

    def _is_there(self) -> None:
        self._left, self._left_plainly = None, False

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
