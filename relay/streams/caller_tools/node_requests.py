"""Handles what nodes send: requests for callers' tools, and messages of local agents.

A node is trusted with its own sessions only, and with nothing in a frame beyond its form. Must not answer
callers: ``caller_sessions`` does.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from attrs import define, field

from relay.audit.log import AuditUnavailableError
from relay.audit.refusal_counts import RefusalReason
from relay.routing.port import NodeFrames, NodeRef
from relay.streams.caller_tools.endings import CallerRecords, Endings, Outbox, SessionEnding, error_payload
from relay.streams.caller_tools.registry import SessionRegistry
from relay.streams.caller_tools.session import CallerSession, EventsFullError, EventType, PendingRequest
from schemas.caller_tools import MAX_PENDING, MAX_VALUE_BYTES, CallerToolError, size_of
from schemas.errors import ToolError
from schemas.frames import OneWayType
from schemas.payloads import CallerToolCancel, CallerToolRequest, SessionEnd, SessionText
from schemas.ulids import UlidSource


@define(eq=False, repr=False)
class NodeRequests:
    """The frames of all nodes that concern sessions. ``monotonic`` is in seconds."""

    _registry: SessionRegistry
    _endings: Endings
    _outbox: Outbox
    _records: CallerRecords
    _ulids: UlidSource
    _monotonic: Callable[[], float]
    _node_sessions: dict[str, str] = field(init=False, factory=dict)
    """The session of each node that is connected."""

    def follow(self, frames: NodeFrames) -> None:
        frames.on_frame(OneWayType.CALLER_TOOL, self.requested)
        frames.on_frame(OneWayType.CALLER_TOOL_CANCEL, self.cancelled)
        frames.on_frame(OneWayType.SESSION_EVENT, self.message)
        frames.on_connection(self.connection_changed)

    def requested(self, node: NodeRef, payload: CallerToolRequest) -> None:
        """Pass a request to the caller, or refuse it; one that is repeated after a resume is known."""
        session = self._session_of(node, payload)
        if session is None:
            return
        request_id: str = payload["request_id"]
        if session.requests.is_known(request_id):
            self._repeated(session, request_id)
            return
        refusal = self._refusal_of(session, payload)
        if refusal is not None:
            self._refuse(session, request_id, refusal)
            return
        session.last_used = self._monotonic()
        request = PendingRequest(request_id, payload["tool"], self._ulids.new(), session.last_used)
        members = {name: payload[name] for name in ("request_id", "tool", "arguments")}
        try:
            self._records.allowed(session, request)
        except AuditUnavailableError:
            self._refuse(session, request_id, CallerToolError.INTERNAL)
            return
        session.requests.add(request)
        try:
            session.push(EventType.REQUEST, members, request_id)
        except EventsFullError:
            self._endings.fail(session, request, CallerToolError.OVER_CAPACITY)

    def cancelled(self, node: NodeRef, payload: CallerToolCancel) -> None:
        """End a request: the local agent does not need its result any more."""
        session = self._session_of(node, payload)
        if session is not None:
            self._endings.withdraw(session, payload["request_id"], cancelled=True)

    def message(self, node: NodeRef, payload: SessionText) -> None:
        session = self._session_of(node, payload)
        if session is None:
            return
        message: str = payload["message"]
        if size_of(message) > MAX_VALUE_BYTES:
            self._records.refused(node.node_id, RefusalReason.MESSAGE_TOO_LARGE)
            return
        session.last_used = self._monotonic()
        session.push(EventType.MESSAGE, {"message": message})

    def connection_changed(self, node: NodeRef, connected: bool) -> None:  # noqa: FBT001 - a ConnectionHandler
        """Send a node what it needs of its sessions when it connects."""
        self._outbox.drop(node.node_id)
        sessions = self._registry.of_node(node.node_id)
        if not connected:
            self._node_sessions.pop(node.node_id, None)
            for session in sessions:  # which may end before the node is back
                session.lost_with = node.session_id
            return
        known = {self._node_sessions.get(node.node_id), *(session.lost_with for session in sessions)}
        is_resumed = node.session_id in known
        self._node_sessions[node.node_id] = node.session_id
        # First: with one session more than there are, an unattached local agent has none.
        for end in self._endings.ends_of(node):
            self._outbox.post(node.node_id, OneWayType.SESSION_END, end)
        for session in sessions:
            if not is_resumed:
                # Another process of the node: the local agent that asked has lost its connection.
                for request in session.requests:
                    self._endings.withdraw(session, request.request_id, cancelled=False)
            self._outbox.post(node.node_id, OneWayType.SESSION_OPEN, session.frame())
        # Last: they may be more than can wait, and a session that is not named ends at the node.
        for session in sessions if is_resumed else ():
            for answer in session.requests.kept_answers():
                self._outbox.post(node.node_id, OneWayType.CALLER_TOOL_RESULT, answer)

    def _session_of(self, node: NodeRef, payload: Mapping[str, Any]) -> CallerSession | None:
        session_id: str = payload["session_id"]
        session = self._registry.with_node(node.tenant, node.node_id, session_id)
        if session is None:
            self._records.refused(node.node_id, RefusalReason.SESSION_UNKNOWN)
            end: SessionEnd = {"session_id": session_id, "reason": SessionEnding.UNKNOWN}
            with suppress(ToolError):  # it is told again, as often as it asks
                self._outbox.send(node.node_id, OneWayType.SESSION_END, end)
        return session

    def _repeated(self, session: CallerSession, request_id: str) -> None:
        if session.requests.find(request_id) is not None:
            return  # its answer will be sent
        answer = session.requests.answer_to(request_id)
        if answer is None:
            answer = error_payload(session.session_id, request_id, CallerToolError.DISCONNECTED)
        self._outbox.post(session.node_id, OneWayType.CALLER_TOOL_RESULT, answer)

    def _refusal_of(self, session: CallerSession, payload: Mapping[str, Any]) -> CallerToolError | None:
        if payload["tool"] not in session.lent.tools:
            return CallerToolError.TOOL_UNKNOWN
        if session.is_without_caller:
            return CallerToolError.DISCONNECTED
        if size_of(payload["arguments"]) > MAX_VALUE_BYTES:
            return CallerToolError.INVALID
        if len(session.requests) >= MAX_PENDING:
            return CallerToolError.OVER_CAPACITY
        return None

    def _refuse(self, session: CallerSession, request_id: str, error: CallerToolError) -> None:
        self._records.refused(session.node_id, error)
        payload = error_payload(session.session_id, request_id, error)
        self._outbox.post(session.node_id, OneWayType.CALLER_TOOL_RESULT, payload)
