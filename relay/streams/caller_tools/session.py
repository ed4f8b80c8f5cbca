"""One session of a caller with a node: what it lends, its events and requests, how its caller is reached.

Pure but for the event that wakes up what waits. Times are seconds of a monotonic clock. Must not send frames,
nor decide when a session ends.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from relay.auth.agent_tokens import AgentName, Principal
from relay.streams.caller_tools.events import CallerEvent, EventBuffer, EventType
from relay.streams.caller_tools.limits import GRACE_S, MAX_RESULT_BYTES, MAX_TOKENS
from relay.streams.caller_tools.requests import PendingRequest, SessionRequests
from relay.streams.caller_tools.shared_budget import Holder
from schemas.payloads import CallerTool, SessionOpen


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session is bound to.

    Attributes:
        node_key: the public key of the node; one of the same id with another key is another node.
        principal: the name of the principal that opened it: issuer, tenant and subject.
        owner: the opaque hash of it that the node is given.
        timeout_ms: how long a request waits for the caller's answer.
    """

    session_id: str
    tenant: str
    node_id: str
    node_key: bytes
    principal: AgentName
    owner: str
    caller_id: str
    timeout_ms: int

    @property
    def holder(self) -> Holder:
        """Whose memory it takes."""
        return Holder(self.principal, self.node_id)


@dataclass(frozen=True, slots=True)
class Lent:
    """The tools that the caller lends, by name, and their size in bytes."""

    tools: Mapping[str, CallerTool] = field(default_factory=dict)
    size: int = 0


class CallerSession:
    """A live session.

    Attributes:
        lent: what the caller lends now.
        tokens: the tokens that were used with it, by ``jti``.
        last_used: when either end used it.
        has_ended: whether it has ended; what waits for its events returns then.
        polls: how many long polls are open.
    """

    def __init__(self, facts: SessionFacts, lent: Lent, events: EventBuffer, now: float) -> None:
        self.facts = facts
        self.lent = lent
        self.events = events
        self.requests = SessionRequests()
        self.tokens: dict[str, Principal] = {}
        self.last_used = now
        self.has_ended = False
        self.polls = 0
        self._streams: set[object] = set()
        self._connections: set[object] = set()
        self._reachable_until = now
        self._left: float | None = None
        self._left_plainly = False
        self._changed = asyncio.Event()

    @property
    def session_id(self) -> str:
        """The id."""
        return self.facts.session_id

    def use(self, principal: Principal, now: float) -> None:
        """Note that its caller uses it, with this token."""
        self._is_there()
        self.last_used = now
        self.tokens[principal.jti] = principal
        if len(self.tokens) > MAX_TOKENS:
            first = min(self.tokens.values(), key=_expiry)
            del self.tokens[first.jti]

    def frame(self) -> SessionOpen:
        """Return the payload of its ``session_open``."""
        facts = self.facts
        return {
            "session_id": facts.session_id,
            "caller_id": facts.caller_id,
            "owner": facts.owner,
            "tools": list(self.lent.tools.values()),
            "timeout_ms": facts.timeout_ms,
        }

    def push(self, type_: EventType, members: Mapping[str, Any], request_id: str | None = None) -> None:
        """Add an event, and wake up what waits for one.

        Raises:
            EventsFullError: there is no memory for the request.
        """
        self.events.append(type_, members, request_id)
        self._wake()

    def end(self) -> None:
        """Note that it has ended."""
        self.has_ended = True
        self._wake()

    def changed(self) -> asyncio.Event:
        """Return what is set at the next change. Take it before reading the events."""
        return self._changed

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
        """Note a stream on which events are sent."""
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
        """Count a long poll while it is open."""
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


def _expiry(principal: Principal) -> int:
    return principal.expires_s
