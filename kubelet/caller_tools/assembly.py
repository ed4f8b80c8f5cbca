"""Caller tools of one node, put together: the frames of the relay on one side, the socket on the other.

Must not know the WebSocket: frames come in by ``handlers`` and ``link``, and go out by ``send``.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.caller_tools.requests import CallerRequests, Send
from kubelet.caller_tools.server import ClientParts, LocalMethods, SocketServer
from kubelet.caller_tools.sessions import CallerNames, Session, SessionRefusedError, Sessions
from kubelet.caller_tools.socket_file import bind_socket
from schemas.faults import OncePerPlace
from schemas.frames import OneWayType
from schemas.payloads import CallerToolResult, SessionEnd, SessionOpen, SessionText

_LOG_INTERVAL_S = 1.0


class CallerTools:
    """The sessions of one node, and its socket. ``send`` is as ``requests.Send``.

    ``unreachable_s`` is how long a request waits to be sent, and a session to be named again after a
    reconnect; ``outlive_s`` how long sessions outlive the connection to the relay.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        node_id: str,
        send: Send,
        names: CallerNames,
        random_bytes: Callable[[int], bytes],
        log: FilteringBoundLogger,
        *,
        unreachable_s: float = 10.0,
        outlive_s: float = 60.0,
    ) -> None:
        self._log = log
        self._send = send
        self._logged = OncePerPlace(_LOG_INTERVAL_S)
        self._unreachable_s = unreachable_s
        self._outlive_s = outlive_s
        self._timers: list[asyncio.TimerHandle] = []
        self._sessions = Sessions(names, log)
        self._requests = CallerRequests(send, random_bytes)
        self.counts: Counter[str] = Counter()
        """What was refused or dropped, by what it was."""
        methods = self._methods = LocalMethods(node_id, self._sessions, self._requests, send)
        self._sessions.on_change(self._session_ended)
        self._server = SocketServer(ClientParts(self._sessions, methods, log, self.counts))
        self.handlers: Mapping[OneWayType, Callable[[Any], None]] = {
            OneWayType.SESSION_OPEN: self._open,
            OneWayType.SESSION_MESSAGE: self._message,
            OneWayType.SESSION_END: self._end,
            OneWayType.CALLER_TOOL_RESULT: self._answer,
        }
        """What is to be called with the payload of each type of frame."""

    @asynccontextmanager
    async def serving(self, path: Path, group: int | None) -> AsyncIterator[None]:
        """Serve the socket at ``path``, which ``group`` may use, for the length of the block.

        Raises:
            SocketFileError, OSError: as ``socket_file.bind_socket``.
        """
        with bind_socket(path, group) as socket:
            async with self._server.serving(socket):
                self._log.info("socket of local agents open", path=str(path), group=socket.group)
                try:
                    yield
                finally:
                    self._cancel_timers()

    def summary(self) -> str:
        facts = {"sessions": len(self._sessions), "local clients": len(self._server), **self.counts}
        return ", ".join(f"{count} {what.replace('_', ' ')}" for what, count in facts.items())

    def connected(self, *, resumed: bool) -> None:
        self._cancel_timers()
        self._methods.is_connected = True
        self._requests.reachable()
        if resumed:
            # The relay names its live sessions again. What it does not name has ended meanwhile.
            for session in self._sessions:
                session.confirmed = False
            self._after(self._unreachable_s, self._end_unconfirmed)
        else:
            # The relay has lost this node's session, and with it all that callers had open.
            self._end_all()

    def lost(self) -> None:
        self._cancel_timers()
        self._methods.is_connected = False
        self._after(self._unreachable_s, self._requests.unreachable)
        self._after(self._outlive_s, self._end_all)

    def _open(self, opened: SessionOpen) -> None:
        self._requests.expect_requests()
        known = self._sessions.get(opened["session_id"])
        is_again = known is not None and not known.confirmed
        try:
            session = self._sessions.open(opened)
        except SessionRefusedError as error:
            self._refuse(opened["session_id"], str(error))
            return
        if is_again:
            self._requests.resend(session.session_id)

    def _refuse(self, session_id: str, reason: str) -> None:
        self.counts["sessions_refused"] += 1
        self._log.warning("session of a caller refused", session_id=session_id, reason=reason)
        # For the caller, who would wait for requests that never come.
        message = f"This node refuses the session: {reason}."
        self._send(OneWayType.SESSION_EVENT, {"session_id": session_id, "message": message})

    def _message(self, message: SessionText) -> None:
        self._methods.expect_reply()
        session = self._sessions.get(message["session_id"])
        if session is None:
            self.counts["messages_dropped"] += 1
            return
        self._server.deliver(session, message["message"])

    def _end(self, end: SessionEnd) -> None:
        self._sessions.end(end["session_id"])

    def _answer(self, answer: CallerToolResult) -> None:
        if not self._requests.answer(answer):
            # Late, doubled, or of nothing that was requested: single-use ids make it harmless.
            self.counts["answers_ignored"] += 1
            before = self._logged.suppressed_before("answer", asyncio.get_running_loop().time())
            if before is not None:
                text = "answer of a caller ignored: no such request is pending"
                self._log.warning(text, kept_back=before)

    def _session_ended(self, ended: Session | None) -> None:
        if ended is not None:
            self._requests.end_session(ended.session_id)

    def _end_unconfirmed(self) -> None:
        for session in self._sessions:
            if not session.confirmed:
                self._sessions.end(session.session_id)

    def _end_all(self) -> None:
        for session in self._sessions:
            self._sessions.end(session.session_id)

    def _after(self, seconds: float, work: Callable[[], None]) -> None:
        self._timers.append(asyncio.get_running_loop().call_later(seconds, work))

    def _cancel_timers(self) -> None:
        while self._timers:
            self._timers.pop().cancel()
