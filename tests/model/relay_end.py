"""The relay of the model: the relay's own sessions and pending commands, moved by hand and not by asyncio.

Follows ``relay/sessions/node_sessions.py`` step by step: where that awaits, a step of the model ends. Must
not check anything: the history does.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from relay.routing.port import Command, CommandAnswer
from relay.sessions.node_sessions import cmd_payload
from relay.sessions.session import NodeSession, SessionClock
from schemas.delivery import PendingCommands
from schemas.errors import Failure, ToolError
from schemas.frames import FrameReader, Role
from schemas.payloads import Cmd
from tests.fakes.frames import COMMAND, PAYLOADS
from tests.fakes.signer import NODE_ID
from tests.model.history import Call, History, Outcome, Recipient
from tests.model.wire import End, Wire

CommandsFactory = Callable[[], PendingCommands[CommandAnswer]]


@dataclass(slots=True, eq=False)
class RelayConnection:
    """One connection. ``again`` is what is still to be sent again before frames are read."""

    end: End
    session: NodeSession | None = None
    again: deque[str] = field(default_factory=deque)

    @property
    def is_open(self) -> bool:
        """As of a ``NodeConnection``."""
        return self.end.is_open


@dataclass(slots=True)
class Waiting:
    """A call that waits for its answer."""

    call: Call
    session: NodeSession
    answer: CommandAnswer


class RelayEnd:
    """One process of the relay, with the sessions of one node. ``now_ms`` is the time of the model."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        reader: FrameReader,
        now_ms: Callable[[], int],
        new_id: Callable[[], str],
        history: History,
        sessions: Callable[..., NodeSession],
        pending: CommandsFactory,
    ) -> None:
        self._loop = loop
        self._reader = reader
        self._now_ms = now_ms
        self._new_id = new_id
        self._history = history
        self._sessions = sessions
        self._pending = pending
        self.session: NodeSession | None = None
        self.waiting: dict[str, Waiting] = {}
        self.connections: list[RelayConnection] = []

    def accept(self, wire: Wire) -> None:
        """Challenge each process that connects."""
        connection = RelayConnection(End(Role.RELAY, wire, self._reader))
        self.connections.append(connection)
        challenge = {**PAYLOADS["challenge"], "server_time_ms": self._now_ms()}
        connection.end.send("challenge", self._new_id(), challenge)

    def call(self, call: Call) -> None:
        """Send a command, unless the node is offline."""
        session = self.session
        connection = connection_of(session)
        if session is None or connection is None or not connection.is_open:
            self.report_offline(call)
            return
        now, msg_id = session.now_ms(), self._new_id()
        deadline_ms = call.expires_at_ms - self._now_ms()
        command = Command(NODE_ID, COMMAND["tool"], {}, deadline_ms, call.correlation_id)
        answer = CommandAnswer(self._loop)
        payload = cmd_payload(command, now)
        session.pending.add(msg_id, payload, now + deadline_ms, answer)
        self.waiting[msg_id] = Waiting(call, session, answer)
        self._send_command(connection, session, msg_id, payload)

    def report_offline(self, call: Call) -> None:
        """Give the caller E_NODE_OFFLINE."""
        self._history.ended(call, Outcome.OFFLINE, self._now_ms(), None)

    def give_up(self, msg_id: str) -> None:
        """Cancel a call: its caller has gone."""
        self.waiting[msg_id].answer.cancel()
        self._conclude()

    def expire(self, msg_id: str) -> None:
        """Let the deadline of a call pass."""
        self.waiting[msg_id].answer.expire()
        self._conclude()

    def send_again(self, connection: RelayConnection) -> None:
        """Send the next of what is sent again after a resume."""
        session = connection.session
        msg_id = connection.again.popleft()
        payload = session.pending.renewed(msg_id, session.now_ms()) if session is not None else None
        if session is not None and payload is not None and connection.is_open:
            self._send_command(connection, session, msg_id, payload)

    def receive(self, connection: RelayConnection, text: str | None) -> None:
        """Take in what arrives on a connection; None for its end."""
        frame = connection.end.receive(text) if text is not None else None
        if text is None:
            self.lose(connection)
        elif frame is None:
            return
        elif frame.type == "auth":
            self._welcome(connection, frame.msg_id, frame.payload)
        elif frame.type == "cmd_ack" and connection.session is not None:
            connection.session.settle(frame.in_reply_to or "", frame.payload)
            self._conclude()
        elif frame.type == "heartbeat" and connection.session is not None:
            acknowledged = {"server_time_ms": connection.session.now_ms()}
            connection.end.send("heartbeat_ack", self._new_id(), acknowledged, frame.msg_id)
        elif frame.type == "bye":
            self.lose(connection)

    def lose(self, connection: RelayConnection) -> None:
        """Take in that a connection is lost."""
        connection.end.close()
        self.connections.remove(connection)
        if self.session is not None and connection_of(self.session) is connection:
            self.session.connection = None

    def shut_out(self) -> None:
        """End the session, as when the leaf is revoked."""
        session, self.session = self.session, None
        if session is None:
            return
        connection = connection_of(session)
        session.fail_all(ToolError(Failure.ATTESTATION_FAILED))
        self._conclude()
        if connection is not None:
            session.connection = None
            self._close(connection, "revoked")

    def crash(self) -> None:
        """Lose everything: the callers see their connections break."""
        for connection in self.connections:
            connection.end.wire.cut()
        for waiting in self.waiting.values():
            self._history.ended(waiting.call, Outcome.BROKEN, self._now_ms(), None)

    def _welcome(self, connection: RelayConnection, auth_id: str, auth: Any) -> None:
        boot_id, resume = auth["boot_id"], auth.get("resume")
        known = self.session
        before = connection_of(known)
        if known is not None and known.is_resumed_by(boot_id, resume):
            session = known
            session.connection = cast("Any", connection)
        else:
            clock = SessionClock(self._now_ms(), self._now_ms)
            identity = cast("Any", None)
            session = self._sessions(self._new_id(), boot_id, identity, cast("Any", connection), clock)
            session.pending = self._pending()
            self.session = session
        connection.session = session
        if before is not None:
            self._history.counts["superseded"] += 1
            self._close(before, "superseded")
        resumed = session.session_id == resume
        self._history.counts["resumed" if resumed else "opened"] += 1
        welcome = {
            **PAYLOADS["welcome"],
            "session_id": session.session_id,
            "server_time_ms": session.now_ms(),
            "resumed": resumed,
        }
        # What is sent from now on goes over this connection by itself.
        connection.again.extend(session.pending)
        connection.end.send("welcome", self._new_id(), welcome, auth_id)

    def _send_command(
        self, connection: RelayConnection, session: NodeSession, msg_id: str, payload: Cmd
    ) -> None:
        wire = connection.end.wire
        to = Recipient(session.session_id, wire.boot_id)
        self._history.sent(msg_id, payload, to, wire.resumes, wire, self._now_ms())
        connection.end.send("cmd", msg_id, payload)

    def _close(self, connection: RelayConnection, reason: str) -> None:
        connection.again.clear()
        connection.end.close(says=reason, msg_id=self._new_id())

    def _conclude(self) -> None:
        """Give each caller whose answer is there what it is."""
        for msg_id, waiting in tuple(self.waiting.items()):
            if waiting.answer.done():
                del self.waiting[msg_id]
                waiting.session.pending.pop(msg_id)
                self._conclude_one(msg_id, waiting)

    def _conclude_one(self, msg_id: str, waiting: Waiting) -> None:
        answer, outcome, reason = None, Outcome.CANCELLED, "caller_gone"
        if waiting.answer.cancelled():
            pass
        elif (error := waiting.answer.exception()) is None:
            answer = waiting.answer.result()
            outcome = Outcome.ANSWERED if answer["ok"] else Outcome.REFUSED
        elif isinstance(error, ToolError) and error.failure is Failure.DEADLINE_EXCEEDED:
            outcome, reason = Outcome.DEADLINE, "deadline"
        else:
            outcome = Outcome.SHUT_OUT
        self._history.ended(waiting.call, outcome, self._now_ms(), answer)
        connection = connection_of(waiting.session)
        if outcome in {Outcome.CANCELLED, Outcome.DEADLINE} and connection is not None and connection.is_open:
            connection.end.machine.forget(msg_id)
            connection.end.send("cmd_cancel", self._new_id(), {"reason": reason}, msg_id)


def connection_of(session: NodeSession | None) -> RelayConnection | None:
    return cast("RelayConnection | None", session.connection) if session is not None else None
