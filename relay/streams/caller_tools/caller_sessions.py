"""What callers do: open a session, send a message, read events, answer a request; for the sessions kept here.

Every look-up is by the caller's principal: what belongs to another is as what does not exist. Arguments have
passed their documents, and the call its checks; the rules that a document cannot express are here. Must not
change a schema that a caller lends, know MCP, nor handle what nodes send: ``node_requests`` does.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from attrs import define
from pydantic_core import from_json

from relay.auth.agent_tokens import Principal
from relay.fleet.selection import Selection
from relay.streams.caller_tools.endings import CallerRecords, Endings, Outbox, SessionEnding
from relay.streams.caller_tools.event_streams import Polls, Push
from relay.streams.caller_tools.registry import Nodes, SessionRegistry
from relay.streams.caller_tools.session import (
    CallerSession,
    EventBuffer,
    Holder,
    Lent,
    SharedBudget,
    Timeouts,
)
from schemas.caller_tools import MAX_SCHEMA_BYTES, MAX_TOOLS_BYTES, MAX_VALUE_BYTES, CallerToolError, size_of
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.payloads import CallerTool, SessionText


def lent(tools: Sequence[CallerTool]) -> Lent:
    """Return what ``tools`` lend.

    Raises:
        ToolError: ARGUMENTS_INVALID: a name twice, or too large.
    """
    by_name = {tool["name"]: tool for tool in tools}
    if len(by_name) < len(tools):
        raise ToolError(Failure.ARGUMENTS_INVALID, "Two of caller_tools have the same name.")
    if any(size_of(tool.get("inputSchema", {})) > MAX_SCHEMA_BYTES for tool in tools):
        text = f"An inputSchema of caller_tools is larger than {MAX_SCHEMA_BYTES} bytes."
        raise ToolError(Failure.ARGUMENTS_INVALID, text)
    size = size_of(tools)
    if size > MAX_TOOLS_BYTES:
        text = f"The caller_tools are together larger than {MAX_TOOLS_BYTES} bytes."
        raise ToolError(Failure.ARGUMENTS_INVALID, text)
    return Lent(by_name, size)


def checked_size(name: str, value: object) -> int:
    """Return the size of the argument ``name``.

    Raises:
        ToolError: ARGUMENTS_INVALID: it is too large for a frame.
    """
    size = size_of(value)
    if size > MAX_VALUE_BYTES:
        text = f"The argument {name} is larger than {MAX_VALUE_BYTES} bytes as JSON in ASCII."
        raise ToolError(Failure.ARGUMENTS_INVALID, text)
    return size


def caller_id_of(context: Mapping[str, Any], present: str | None) -> str:
    """Return the caller_id that ``context`` declares for a session that has ``present``, if it exists.

    Raises:
        ToolError: ARGUMENTS_INVALID: there is none, or another than before.
    """
    declared: str | None = context.get("caller_id", present)
    if declared is None:
        raise ToolError(Failure.ARGUMENTS_INVALID, "A new session needs context.caller_id.")
    if present is not None and declared != present:
        raise ToolError(Failure.ARGUMENTS_INVALID, "A session keeps its caller_id; open another session.")
    return declared


POLL_MS = 20_000
"""How long ``session_events`` waits for an event unless the caller says otherwise."""


class SessionTool(StrEnum):
    """The tools by which a caller uses sessions, by their canonical names."""

    MESSAGE = "session_message"
    EVENTS = "session_events"
    RESPONSE = "caller_tool_response"


def wait_ms_of(tool: SessionTool, arguments: Mapping[str, Any]) -> int:
    """Return how long a call waits for an event at most, in milliseconds."""
    if tool is SessionTool.RESPONSE:
        return 0
    wait_ms: int = arguments.get("wait_ms", POLL_MS if tool is SessionTool.EVENTS else 0)
    return wait_ms


@dataclass(frozen=True, slots=True)
class Use:
    """One call of a caller, whose arguments fit the document of its tool."""

    principal: Principal
    arguments: Mapping[str, Any]
    correlation_id: str
    selection: Selection


@define(eq=False, repr=False, kw_only=True)
class CallerSessions:
    """The callers' side of all sessions. ``monotonic`` is in seconds."""

    _registry: SessionRegistry
    _nodes: Nodes
    _endings: Endings
    _outbox: Outbox
    _records: CallerRecords
    _budget: SharedBudget
    _polls: Polls
    _timeouts: Timeouts
    _monotonic: Callable[[], float]

    async def run(
        self,
        tool: SessionTool,
        use: Use,
        push: Push | None,
        found: Callable[[CallerSession], None] = lambda _session: None,
    ) -> Mapping[str, Any]:
        """Return the result of a call of ``tool``.

        ``push`` sends each event as it happens; without it, the call returns at the first one. ``found`` is
        called with the session before the call waits.

        Raises:
            ToolError: nothing was done. SESSION_UNKNOWN; CALLER_REQUEST_UNKNOWN; ARGUMENTS_INVALID if an
                answer is malformed or too large, then the request is still pending; RATE_LIMITED if too many
                calls wait, or there is no space.
            AuditUnavailableError: a session was not opened, because it cannot be recorded.
        """
        if tool is SessionTool.RESPONSE:
            session = self._respond(use)
            found(session)
            request_id = use.arguments["request_id"]
            return {"session_id": session.session_id, "request_id": request_id, "accepted": True}
        after = use.arguments.get("after", 0)
        wait_s = wait_ms_of(tool, use.arguments) / 1000
        # First: a call that may not wait must not have sent its message.
        with self._polls.held(use.principal) if wait_s else nullcontext():
            session = await self._message(use) if tool is SessionTool.MESSAGE else self._session_of(use)
            found(session)
            if wait_s and not session.has_ended:
                if push is None:
                    await self._polls.wait(session, after, wait_s)
                else:
                    await self._polls.stream(session, after, wait_s, push)
                self._check(use, session)
        node = {"node_id": session.node_id} if tool is SessionTool.MESSAGE else {}
        return {"session_id": session.session_id, **node, **_read(session, after)}

    async def _message(self, use: Use) -> CallerSession:
        """Open a session or find it, declare tools anew, send a message, end it: what the arguments name."""
        session_id = use.arguments.get("session_id")
        checked_size("message", use.arguments.get("message", ""))  # before anything is changed
        if session_id is None:
            session = await self._opened(use)
        else:
            session = self._kept(use, session_id)
            self._redeclare(session, use)
            self._send(session, use)
        session.use(use.principal, self._monotonic())
        if use.arguments.get("end"):
            self._endings.end_session(session, SessionEnding.ENDED)
        return session

    def _kept(self, use: Use, session_id: str) -> CallerSession:
        """Return the caller's session of that id; one with a node that its token is not for is unknown."""
        session = self._registry.of_caller(use.principal.name, session_id)
        self._check(use, session)
        return session

    def _check(self, use: Use, session: CallerSession) -> None:
        if not self._nodes.reached(use.principal.rights, session.node_id):
            raise ToolError(Failure.SESSION_UNKNOWN)

    def _session_of(self, use: Use) -> CallerSession:
        session = self._kept(use, use.arguments["session_id"])
        session.use(use.principal, self._monotonic())
        return session

    def _respond(self, use: Use) -> CallerSession:
        """Give the caller's answer to the request that it answers, and return the session."""
        session = self._session_of(use)
        request_id: str = use.arguments["request_id"]
        request = session.requests.find(request_id)
        if request is None:
            self._records.unexpected_answer(use.principal, session, request_id)
            raise ToolError(Failure.CALLER_REQUEST_UNKNOWN)
        error: str | None = use.arguments.get("error")
        result = use.arguments.get("result")
        if (error is None and "result" not in use.arguments) or (error is not None and result is not None):
            raise ToolError(Failure.ARGUMENTS_INVALID, "An answer has either result or error.")
        size = checked_size("result", result)
        if error is not None:
            self._endings.fail(session, request, CallerToolError.TOOL_FAILED, error)
        else:
            self._endings.answer(session, request, result, size)
        return session

    async def _opened(self, use: Use) -> CallerSession:
        """Open a session; it ends at once if the node does not take it."""
        principal, arguments = use.principal, use.arguments
        reference: str | None = arguments.get("node_id")
        if reference is None:
            raise ToolError(Failure.ARGUMENTS_INVALID, "A new session needs node_id.")
        context: Mapping[str, Any] = arguments.get("context", {})
        caller_id = caller_id_of(context, None)
        tools = lent(context.get("caller_tools", []))
        node = self._nodes.find(principal.rights, reference, use.selection)
        holder = Holder(principal.name, node.node_id)
        self._registry.check_space(holder)
        session_id = self._registry.new_id()
        session = CallerSession(
            session_id=session_id,
            tenant=principal.tenant,
            node_id=node.node_id,
            node_key=node.key,
            principal=principal.name,
            owner=principal.digest,
            caller_id=caller_id,
            timeout_ms=int(self._timeouts.request * 1000),
            lent=tools,
            events=EventBuffer(session_id, holder, self._budget),
            last_used=self._monotonic(),
        )
        self._take(holder, tools.size)
        try:
            await self._records.opened(session, principal, use.correlation_id)
            self._registry.check_space(holder)  # others may have been opened meanwhile
        except BaseException:
            self._budget.give_back(holder, tools.size)
            raise
        self._registry.add(session)
        try:
            self._outbox.send(node.node_id, OneWayType.SESSION_OPEN, session.frame())
            self._send(session, use)
        except ToolError:
            self._endings.end_session(session, SessionEnding.ENDED)
            raise
        return session

    def _redeclare(self, session: CallerSession, use: Use) -> None:
        """Replace what the session lends, if the arguments declare it."""
        node_id = session.node_id
        reference = use.arguments.get("node_id")
        if reference is not None:
            named = self._nodes.find(use.principal.rights, reference, use.selection)
            if named.node_id != node_id:
                raise ToolError(Failure.SESSION_UNKNOWN)
        context: Mapping[str, Any] = use.arguments.get("context", {})
        caller_id_of(context, session.caller_id)
        if "caller_tools" not in context:
            return
        before, after = session.lent, lent(context["caller_tools"])
        self._take(session.holder, after.size)
        session.lent = after
        try:
            self._outbox.send(node_id, OneWayType.SESSION_OPEN, session.frame())
        except ToolError:
            session.lent = before
            self._budget.give_back(session.holder, after.size)
            raise
        self._budget.give_back(session.holder, before.size)

    def _take(self, holder: Holder, size: int) -> None:
        full = self._budget.take(holder, size)
        if full is not None:
            text = f"{full} take as much memory as they may: end one, or read its events."
            raise ToolError(Failure.RATE_LIMITED, text, retry_after_ms=1000)

    def _send(self, session: CallerSession, use: Use) -> None:
        message = use.arguments.get("message")
        if message is None:
            return
        payload: SessionText = {"session_id": session.session_id, "message": message}
        self._outbox.send(session.node_id, OneWayType.SESSION_MESSAGE, payload)


def _read(session: CallerSession, after: int) -> dict[str, Any]:
    events = session.read(after)
    following = events[-1].cursor if events else session.events.newest
    return {
        "events": [from_json(event.text) for event in events],
        "next": following,
        "more": session.has_events(following),
        "missed": session.events.has_missed(after),
        "ended": session.has_ended,
    }
