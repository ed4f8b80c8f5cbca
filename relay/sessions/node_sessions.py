"""The sessions of the nodes that are connected to this process: one for each node, the newest.

Moves frames between sockets and the protocol machine, and pairs commands with answers. A session outlives its
connection for the same process of the node, so that a command can be answered after a reconnect.
Must not decide who may call, nor look into arguments and results.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter
from relay.fleet.fleet import Fleet
from relay.fleet.node_index import DueTimes
from relay.fleet.node_record import Where
from relay.http.websocket_protocol import BoundedWebSocket, SocketClosedError
from relay.limits.rate_limits import KeyedLimiters
from relay.observability.metrics import Metrics
from relay.routing.port import Command, CommandAnswer, LocalRouter
from relay.sessions.connects import ConnectQueue
from relay.sessions.frame_handlers import FrameHandlers, heartbeat_interval_ms
from relay.sessions.handshake import Handshake, HandshakeError, HandshakeRejection, PeerFaults
from relay.sessions.one_way_frames import OneWayFrames
from relay.sessions.session import NodeConnection, NodeSession, SessionClock
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL_1_2, Frame, FrameReader, Role, agreed
from schemas.identity import Identity
from schemas.payloads import Cmd, CmdCancel, Welcome
from schemas.session import CancelReason, CloseCode, PeerProtocolError, ProtocolError, SessionMachine
from schemas.times import ValidityClock
from schemas.ulids import UlidSource

AUTH_TIMEOUT_S = 5
_UNNAMED_CALLER = ""
"""The agents of a relay that does not name them, as one."""


@define(eq=False, repr=False, kw_only=True)
class NodeSessions(LocalRouter):
    """Serves ``/devices/connect``, and is the ``LocalRouter`` of the nodes that connect there."""

    _handshake: Handshake
    _fleet: Fleet
    _frames: FrameHandlers
    _one_way: OneWayFrames
    _connects: ConnectQueue
    _reader: FrameReader
    _ulids: UlidSource
    _metrics: Metrics
    _refusals: RefusalCounter
    _now_ms: ValidityClock
    _ticks_ms: Callable[[], int]
    _monotonic: Callable[[], float]
    _log: FilteringBoundLogger
    _auth_timeout_s: float = AUTH_TIMEOUT_S
    _faults: PeerFaults = field(init=False)
    _sessions: dict[str, NodeSession] = field(init=False, factory=dict)
    _leaf_ends: DueTimes = field(init=False, factory=DueTimes)
    _leaves_checked_ms: int = field(init=False, default=0)
    _tasks: set[asyncio.Task[None]] = field(init=False, factory=set)

    def __attrs_post_init__(self) -> None:
        self._faults = PeerFaults(self._metrics, self._refusals, self._log)

    async def serve(self, socket: BoundedWebSocket) -> None:
        """Serve one node's connection from the upgrade to its end."""
        if (subprotocol := agreed(socket.subprotocols)) is None:
            socket.reject()
            return
        socket.accept(subprotocol)
        connection = NodeConnection(
            socket, SessionMachine(Role.RELAY, self._reader, self._monotonic), self._ulids
        )
        if (wait_s := await self._connects.enter(connection.peer)) > 0:
            self._metrics.sessions.labels("sent_away").inc()
            await connection.close(CloseCode.OVER_CAPACITY, retry_after_ms=int(wait_s * 1000) + 1)
            return
        clock = SessionClock(self._now_ms(), self._ticks_ms)
        try:
            async with asyncio.timeout(self._auth_timeout_s):
                identity, auth = await self._admit(connection, clock, socket)
        except (HandshakeError, ProtocolError, TimeoutError, SocketClosedError) as error:
            await connection.close(self._faults.refused(connection.peer, error))
            return
        session, before = self._register(identity, auth, connection, clock)
        try:
            if before is not None:
                # Not awaited: a half-open connection takes as long to close as to detect.
                self._start(before.close(CloseCode.SUPERSEDED))
            connection.meter.admit()
            connection.know_announces(self._fleet.trust.rules.is_readable)
            await self._welcome(session, connection, auth)
            del auth  # it holds a certificate and a token, which must not live as long as the connection
            await self._serve_frames(session, connection)
        except ProtocolError as error:
            if connection.is_closed:
                return  # by the relay: frames on the way are no fault of the node
            if not isinstance(error, PeerProtocolError):
                raise
            self._faults.broken(identity.node_id, error.reason)
            await connection.close(error.code)
        except SocketClosedError as error:
            self._faults.closed_by_server(identity.node_id, error.code)
        finally:
            if self._is_current(session, connection):
                self._connection_changed(session, None)

    def start(self, command: Command) -> CommandAnswer:
        session = self._sessions.get(command.node_id)
        connection = session.connection if session else None
        if session is None or connection is None or not connection.is_open:
            raise ToolError(Failure.NODE_OFFLINE)
        command = self._for_version(connection, command)
        msg_id, now = self._ulids.new(), session.now_ms()
        payload = cmd_payload(command, now)
        text = command_text(connection, msg_id, payload)
        loop = asyncio.get_running_loop()
        answer = CommandAnswer(loop)
        # A timer that ends the one wait: ``asyncio.timeout`` costs twice as much.
        expiry = loop.call_later(command.deadline_ms / 1000, self._expire, session, msg_id, answer)
        session.pending.add(msg_id, payload, now + command.deadline_ms, answer)
        answer.at_end(partial(self._ended, session, msg_id, expiry))
        if not connection.send_now(text, is_whole=True):
            sending = self._start(send_text(connection, text, command.deadline_ms))
            answer.at_end(lambda _: sending.cancel())
        return answer

    def end_sessions(self, matches: Callable[[Identity], bool], code: CloseCode) -> list[str]:
        """End the sessions of leaves that match, and the calls in flight in them; return the nodes."""
        ended = [key for key, session in self._sessions.items() if matches(session.identity)]
        self._end(ended, code)
        return ended

    def end_superseded(self, node_id: str, relay: str) -> None:
        """Close the connection of a node with a newer session at ``relay``; its calls end in their time."""
        session = self._sessions.get(node_id)
        if session is not None and session.connection is not None:
            self._faults.newer_elsewhere(node_id, relay)
            self._start(session.connection.close(CloseCode.SUPERSEDED))
            self._connection_changed(session, None)

    def end_expired(self) -> None:
        """End the sessions whose leaf is not valid now, and the calls in flight in them."""
        now_ms = self._now_ms()
        # After the clock was set back, leaves may not be valid yet: none of them is due for that.
        is_set_back, self._leaves_checked_ms = now_ms < self._leaves_checked_ms, now_ms
        due = [node_id for node_id in self._leaf_ends.take(now_ms) if node_id in self._sessions]
        expired = []
        for node_id in list(self._sessions) if is_set_back else due:
            identity = self._sessions[node_id].identity
            if identity.valid_at(now_ms):
                self._leaf_ends.no_later_than(node_id, identity.not_after_ms)
            else:
                expired.append(node_id)
        self._end(expired, CloseCode.AUTH_FAILED)

    def _end(self, node_ids: Sequence[str], code: CloseCode) -> None:
        for node_id in node_ids:
            session = self._sessions.pop(node_id)
            session.fail_all(ToolError(Failure.ATTESTATION_FAILED))
            self._log.warning("session ended by the relay", node_id=node_id, code=int(code))
            self._metrics.sessions.labels("shut_out").inc()
            if session.connection is not None:
                if not session.is_retiring:
                    # Not awaited: a node that does not read must not delay the end of the others.
                    self._start(session.connection.close(code))
                self._connection_changed(session, None)

    def _for_version(self, connection: NodeConnection, command: Command) -> Command:
        """Return ``command`` as the node takes it: before 1.2 its deadline is that of the handler too."""
        if connection.speaks(SUBPROTOCOL_1_2) or (tool := self._fleet.tool_of(command.tool)) is None:
            return command
        return command._replace(deadline_ms=min(command.deadline_ms, tool.handler_ms))

    def _expire(self, session: NodeSession, msg_id: str, answer: CommandAnswer) -> None:
        self._cancel(session, msg_id, CancelReason.DEADLINE)
        answer.expire()

    def _ended(
        self, session: NodeSession, msg_id: str, expiry: asyncio.TimerHandle, answer: CommandAnswer
    ) -> None:
        expiry.cancel()
        session.pending.pop(msg_id)
        if answer.cancelled():
            self._cancel(session, msg_id, CancelReason.CALLER_GONE)

    def _cancel(self, session: NodeSession, msg_id: str, reason: CancelReason) -> None:
        connection = session.connection
        if connection is None or not connection.is_open:
            return
        connection.forget(msg_id)
        self._start(self._send_cancel(connection, msg_id, reason))

    def _start(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run ``work``, which raises nothing, without awaiting it."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send_cancel(self, connection: NodeConnection, msg_id: str, reason: CancelReason) -> None:
        # If the connection ends first, the node stops the command at its deadline.
        with suppress(SocketClosedError, ProtocolError):
            cancel: CmdCancel = {"reason": reason}
            await connection.send("cmd_cancel", cancel, msg_id)

    async def _admit(
        self, connection: NodeConnection, clock: SessionClock, socket: BoundedWebSocket
    ) -> tuple[Identity, Frame]:
        challenge = self._handshake.challenge(clock())
        await connection.send("challenge", challenge)
        auth = await connection.receive()
        if auth is None or auth.type != "auth":
            raise HandshakeError(HandshakeRejection.NO_AUTH)
        await self._connects.go_on()
        identity = self._handshake.judge(auth, challenge["nonce"], clock())
        if not socket.admit(identity.node_id):
            raise HandshakeError(HandshakeRejection.CONNECTIONS, CloseCode.OVER_CAPACITY)
        return identity, auth

    def _register(
        self, identity: Identity, auth: Frame, connection: NodeConnection, clock: SessionClock
    ) -> tuple[NodeSession, NodeConnection | None]:
        """Make ``connection`` the node's; return its session, and the connection that it replaces."""
        node_id, boot_id = identity.node_id, auth.payload["boot_id"]
        known = self._sessions.get(node_id)
        before = known.connection if known is not None else None
        if before is None:
            self._metrics.nodes_connected.inc()
        elif before.is_open and known is not None and known.boot_id != boot_id:
            self._faults.identity_twice(node_id)
        if known is not None and known.is_resumed_by(boot_id, auth.payload.get("resume")):
            known.connection, known.identity = connection, identity
            return known, before
        session = NodeSession(self._ulids.new(), boot_id, identity, connection, clock)
        self._sessions[node_id] = session
        # A leaf that replaces it is found when this one would have expired.
        self._leaf_ends.no_later_than(node_id, identity.not_after_ms)
        return session, before

    async def _welcome(self, session: NodeSession, connection: NodeConnection, auth: Frame) -> None:
        # A new session has a new id, which no node can have asked to resume.
        resumed = session.session_id == auth.payload.get("resume")
        session.heartbeat_interval_ms = heartbeat_interval_ms(self._fleet.inventory.known())
        welcome: Welcome = {
            "session_id": session.session_id,
            "heartbeat_interval_ms": session.heartbeat_interval_ms,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "server_time_ms": session.now_ms(),
            "resumed": resumed,
        }
        if connection.speaks(SUBPROTOCOL_1_2):
            welcome["kinds"] = self._fleet.kinds
        await connection.welcome(welcome, auth.msg_id)
        if not self._is_current(session, connection):
            return  # ended or superseded while it was being sent
        self._connection_changed(session, connection, "resumed" if resumed else "opened")
        # What is sent from now on is not sent again; nor what ends meanwhile, after its cancel.
        for msg_id in tuple(session.pending):
            if (payload := session.pending.renewed(msg_id, session.now_ms())) and connection.is_open:
                text = command_text(connection, msg_id, payload)
                await send_text(connection, text, payload["deadline_ms"])

    async def _serve_frames(self, session: NodeSession, connection: NodeConnection) -> None:
        node_id = session.identity.node_id
        connection.handle_frames(partial(self._frames.handle_now, session))
        while connection.is_open:
            frame = await connection.receive()
            self._faults.dropped(node_id, connection)
            if frame is not None and frame.type == "bye":
                self._metrics.sessions.labels("bye").inc()
                await connection.close(CloseCode.NORMAL)
            elif frame is not None:
                await self._frames.handle(session, connection, frame)
            del frame  # the last one would be kept until the next arrives

    def _is_current(self, session: NodeSession, connection: NodeConnection) -> bool:
        """Return whether the node is connected by ``connection``: neither ended nor superseded."""
        is_known = self._sessions.get(session.identity.node_id) is session
        return is_known and session.connection is connection

    def _connection_changed(
        self, session: NodeSession, connection: NodeConnection | None, event: str = "closed"
    ) -> None:
        """Tell all that depend on it that the node is connected here, or with None that it is nowhere."""
        node_id, session.connection = session.identity.node_id, connection
        # Before the followers: one of them may know that it is connected elsewhere.
        self._fleet.connection_changed(node_id, Where.NOWHERE if connection is None else Where.HERE)
        if connection is None:
            self._one_way.lost(session)
            self._metrics.nodes_connected.dec()
        else:
            self._one_way.connected(session, connection)
        self._metrics.sessions.labels(event).inc()


def cmd_payload(command: Command, sent_at_ms: int) -> Cmd:
    """Return the payload of the ``cmd`` for ``command``; ``sent_at_ms`` is the session's time."""
    payload: Cmd = {
        "tool": command.tool,
        "arguments": command.arguments,
        "deadline_ms": command.deadline_ms,
        "sent_at_ms": sent_at_ms,
        "correlation_id": command.correlation_id,
    }
    if command.traceparent is not None:
        payload["traceparent"] = command.traceparent
    return payload


def command_text(connection: NodeConnection, msg_id: str, payload: Cmd) -> str:
    """Return the frame of a command that is about to be sent.

    Raises:
        ToolError: INTERNAL, it does not fit one.
    """
    connection.meter.expect_answer()
    try:
        return connection.encoded("cmd", payload, msg_id)
    except ProtocolError as error:
        # Arguments within their schema fit a frame; in any case, nothing was sent.
        raise ToolError(Failure.INTERNAL, "The command does not fit a frame.") from error


async def send_text(connection: NodeConnection, text: str, deadline_ms: int) -> None:
    """Send a command, and wait for the node to read what was sent before until its deadline."""
    # Part of it may have been sent. The same process may still resume before the deadline.
    with suppress(TimeoutError, SocketClosedError):
        async with asyncio.timeout(deadline_ms / 1000):
            await connection.send_text(text)


class CapabilityLimits(LocalRouter):
    """Applies the limits that capabilities announce, in front of ``sessions``. ``monotonic`` is in seconds.

    In the relay that holds the node's session: so a capability has one limiter, whichever relay a call
    arrived at, and its rate is divided fairly among the agents that call it.
    """

    def __init__(self, fleet: Fleet, sessions: LocalRouter, monotonic: Callable[[], float]) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._limiters: KeyedLimiters[tuple[str, str]] = KeyedLimiters(monotonic)

    def start(self, command: Command) -> CommandAnswer:
        """Send ``command``, as ``LocalRouter`` describes.

        Raises:
            ToolError: also RATE_LIMITED, with ``retry_after_ms``; then it was never sent.
        """
        tool = self._fleet.tool_of(command.tool)
        if tool is None:
            # It was announced when the call was decided, and is not any more.
            raise ToolError(Failure.NODE_OFFLINE)
        holder = (command.caller or _UNNAMED_CALLER) if command.cost else None
        limiter = self._limiters.acquire(tool.capability, tool.allowance, command.cost, holder)
        try:
            answer = self._sessions.start(command)
        except BaseException:
            limiter.release()
            raise
        answer.at_end(lambda _: limiter.release())
        return answer
