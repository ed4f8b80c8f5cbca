"""The sessions of the nodes that are connected to this process: one a node, the newest.

Moves frames between sockets and the session machine, and pairs commands with answers. A session outlives
its connection for the same process of the node, so that what was sent may be answered after a reconnect.
Must not decide who may call, nor look into arguments and results.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.clock import SessionClock
from relay.config import HEARTBEAT_INTERVAL_MS
from relay.fleet.fleet import Fleet
from relay.http.connections import admit
from relay.http.websocket_protocol import FLOODED
from relay.observability.metrics import Metrics
from relay.routing.port import Command
from relay.sessions.connect_limiter import ConnectLimiter
from relay.sessions.connection import NodeConnection
from relay.sessions.frame_handlers import FrameHandlers
from relay.sessions.handshake import Handshake, HandshakeError
from relay.sessions.session import AckPayload, NodeSession
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, Frame, FrameReader
from schemas.identity import Identity
from schemas.session import CloseCode, ProtocolError, Role, SessionMachine
from schemas.text import printable
from schemas.ulids import UlidSource

AUTH_TIMEOUT_S = 5

_TOO_LARGE = 1009  # the server's own: a frame over the cap never comes up to here


class NodeSessions:
    """Serves ``/devices/connect``, and reaches the nodes behind it (``relay.routing.port.NodeRouter``)."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        handshake: Handshake,
        fleet: Fleet,
        frames: FrameHandlers,
        connect_limiter: ConnectLimiter,
        reader: FrameReader,
        ulids: UlidSource,
        metrics: Metrics,
        refusals: RefusalCounter,
        now_ms: Callable[[], int],
        ticks_ms: Callable[[], int],
        monotonic: Callable[[], float],
        log: FilteringBoundLogger,
        auth_timeout_s: float = AUTH_TIMEOUT_S,
    ) -> None:
        self._handshake = handshake
        self._fleet = fleet
        self._frames = frames
        self._connect_limiter = connect_limiter
        self._reader = reader
        self._ulids = ulids
        self._metrics = metrics
        self._refusals = refusals
        self._now_ms = now_ms
        self._ticks_ms = ticks_ms
        self._monotonic = monotonic
        self._log = log
        self._auth_timeout_s = auth_timeout_s
        self._live: dict[str, NodeSession] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one WebSocket: what an ASGI application is."""
        await self.serve(WebSocket(scope, receive, send))

    async def serve(self, socket: WebSocket) -> None:
        """Hold one node's connection from the upgrade to its end."""
        if SUBPROTOCOL not in socket.scope.get("subprotocols", ()):
            await socket.close()  # before accept: the upgrade is refused with 403
            return
        await socket.accept(SUBPROTOCOL)
        link = NodeConnection(socket, SessionMachine(Role.RELAY, self._reader), self._ulids)
        if (wait_s := self._connect_limiter.enter(self._monotonic(), link.peer)) > 0:
            self._metrics.sessions.labels("sent_away").inc()
            await link.close(CloseCode.OVER_CAPACITY, retry_after_ms=int(wait_s * 1000) + 1)
            return
        clock = SessionClock(self._now_ms(), self._ticks_ms)
        try:
            async with asyncio.timeout(self._auth_timeout_s):
                identity, auth = await self._admit(link, clock, socket.scope)
        except (HandshakeError, ProtocolError, TimeoutError, WebSocketDisconnect) as error:
            await self._refuse(link, error)
            return
        live, before = self._take_place(identity, auth, link, clock)
        try:
            if before is not None:
                # Not waited for: a connection that is half gone takes as long to close as to notice.
                self._aside(before.close(CloseCode.SUPERSEDED))
            link.meter.admit()
            await self._welcome(identity.node_id, live, link, auth)
            del auth  # a certificate and a token, which would otherwise stay as long as the connection
            await self._serve_frames(live, link)
        except ProtocolError as error:
            if not link.is_closed:  # else it was closed by us, and what is on the way is nobody's fault
                self._broken(identity.node_id, error)
                await link.close(error.code)
        except WebSocketDisconnect as error:
            self._cut_off(identity.node_id, error.code)
        finally:
            self._leave(identity.node_id, live, link)

    async def run(self, command: Command) -> AckPayload:
        """Send ``command`` and return the node's answer, as ``relay.routing.port.NodeRouter`` describes."""
        live = self._live.get(command.node_id)
        link = live.link if live else None
        if live is None or link is None or not link.is_open:
            raise ToolError(Failure.NODE_OFFLINE)
        msg_id = self._ulids.new()
        now = live.now_ms()
        payload: dict[str, Any] = {
            "tool": command.tool,
            "arguments": command.arguments,
            "deadline_ms": command.deadline_ms,
            "sent_at_ms": now,
            "correlation_id": command.correlation_id,
        }
        if command.traceparent is not None:
            payload["traceparent"] = command.traceparent
        answer: asyncio.Future[AckPayload] = asyncio.get_running_loop().create_future()
        live.pending.add(msg_id, payload, now + command.deadline_ms, answer)
        try:
            async with asyncio.timeout(command.deadline_ms / 1000):
                await self._send_command(link, msg_id, payload)
                return await answer
        except TimeoutError:
            self._cancel(live, msg_id, "deadline")
            raise ToolError(Failure.DEADLINE_EXCEEDED) from None
        except asyncio.CancelledError:
            self._cancel(live, msg_id, "caller_gone")
            raise
        finally:
            live.pending.pop(msg_id)

    def shut_out(self, is_shut_out: Callable[[Identity], bool], code: CloseCode) -> list[str]:
        """End the sessions that stand on such a leaf, and the calls under way in them; return the nodes."""
        ended = [node_id for node_id, live in self._live.items() if is_shut_out(live.identity)]
        for node_id in ended:
            live = self._live[node_id]
            live.fail_all(ToolError(Failure.ATTESTATION_FAILED))
            self._log.warning("session ended by the relay", node_id=node_id, code=int(code))
            self._metrics.sessions.labels("shut_out").inc()
            if live.link is not None:
                if not live.leaving:
                    # Not waited for: a node that does not read must not keep the others in.
                    self._aside(live.link.close(code))
                self._leave(node_id, live, live.link)
            del self._live[node_id]
        return ended

    async def _send_command(self, link: NodeConnection, msg_id: str, payload: Mapping[str, Any]) -> None:
        link.meter.expect_answer()
        try:
            await link.send_as(msg_id, "cmd", payload)
        except ProtocolError as error:
            # Arguments within their schema fit a frame; whatever else it is, nothing has left.
            raise ToolError(Failure.INTERNAL, "The command does not fit a frame.") from error
        except WebSocketDisconnect:
            # Part of it may have left. The same process may still come back for it before the deadline.
            return

    def _cancel(self, live: NodeSession, msg_id: str, reason: str) -> None:
        link = live.link
        if link is None or not link.is_open:
            return
        link.forget(msg_id)
        self._aside(self._tell(link, msg_id, reason))

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, which raises nothing, while whoever asked goes on."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, link: NodeConnection, msg_id: str, reason: str) -> None:
        try:
            await link.send("cmd_cancel", {"reason": reason}, msg_id)
        except (WebSocketDisconnect, ProtocolError):
            return  # the connection ended first: the node stops the command at its deadline

    async def _admit(self, link: NodeConnection, clock: SessionClock, scope: Scope) -> tuple[Identity, Frame]:
        challenge = self._handshake.challenge(clock())
        await link.send("challenge", challenge)
        auth = await link.receive()
        if auth is None or auth.type != "auth":
            raise HandshakeError("no_auth")
        identity = self._handshake.judge(auth, challenge["nonce"], clock())
        if not admit(scope, identity.node_id):
            raise HandshakeError("connections", CloseCode.OVER_CAPACITY)
        return identity, auth

    def _broken(self, node_id: str, error: ProtocolError) -> None:
        self._metrics.sessions.labels("protocol_violation").inc()
        if self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, "protocol"):
            self._log.warning("node broke the protocol", node_id=node_id, reason=printable(error.reason))

    def _cut_off(self, node_id: str, code: int) -> None:
        """Tell of what the server ended by itself, before a frame came up to here."""
        if code == _TOO_LARGE:
            self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, "frame_too_large")
        elif code == FLOODED:
            self._metrics.sessions.labels("flooded").inc()
            if self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, "flooded"):
                self._log.warning("node sent more frames than its rate", node_id=node_id)

    async def _refuse(self, link: NodeConnection, error: Exception) -> None:
        reason, code = "late", CloseCode.AUTH_FAILED
        if isinstance(error, HandshakeError):
            reason, code = error.reason, error.code
        elif isinstance(error, ProtocolError):
            reason, code = "protocol", error.code
        elif isinstance(error, WebSocketDisconnect):
            reason = "flooded" if error.code == FLOODED else "gone"
        self._metrics.sessions.labels(f"refused_{reason}").inc()
        if self._refusals.count(RefusalEvent.NODE_REFUSED, link.peer, reason):
            self._log.warning("node refused", address=link.peer, reason=reason)
        await link.close(code)

    def _take_place(
        self, identity: Identity, auth: Frame, link: NodeConnection, clock: SessionClock
    ) -> tuple[NodeSession, NodeConnection | None]:
        """Give the node's place to ``link``; return the session that it serves and the link before it."""
        node_id, boot_id = identity.node_id, auth.payload["boot_id"]
        known = self._live.get(node_id)
        before = known.link if known is not None else None
        same_process = known is not None and known.boot_id == boot_id
        if before is None:
            self._metrics.nodes_connected.inc()
        elif before.is_open and not same_process:
            self._metrics.sessions.labels("duplicate_identity").inc()
            if self._refusals.count(RefusalEvent.IDENTITY_TWICE, node_id, "superseded"):
                self._log.warning("two machines use one identity; the newer stays", node_id=node_id)
        if known is not None and same_process and known.session_id == auth.payload.get("resume"):
            known.link, known.identity = link, identity
            return known, before
        live = self._live[node_id] = NodeSession(self._ulids.new(), boot_id, identity, link, clock)
        return live, before

    async def _welcome(self, node_id: str, live: NodeSession, link: NodeConnection, auth: Frame) -> None:
        # A new session has a new id, which nobody can have asked for.
        resumed = live.session_id == auth.payload.get("resume")
        welcome = {
            "session_id": live.session_id,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "server_time_ms": live.now_ms(),
            "resumed": resumed,
        }
        await link.send("welcome", welcome, auth.msg_id)
        if self._live.get(node_id) is not live or live.link is not link:
            return  # shut out or superseded while it was being sent
        self._fleet.set_connected(node_id, connected=True)
        self._metrics.sessions.labels("resumed" if resumed else "opened").inc()
        for msg_id, payload in live.pending.resendable(live.now_ms()):
            # Sending can take a while: what nobody waits for any more must not follow its own cancel.
            if msg_id in live.pending and link.is_open:
                await self._send_command(link, msg_id, payload)

    async def _serve_frames(self, live: NodeSession, link: NodeConnection) -> None:
        node_id = live.identity.node_id
        while link.is_open:
            frame = await link.receive()
            for reason, count in link.take_dropped().items():
                self._metrics.frames_dropped.labels(reason).inc(count)
                if self._refusals.count(RefusalEvent.FRAME_DROPPED, node_id, reason, count):
                    self._log.warning("answer dropped", node_id=node_id, reason=reason)
            if frame is not None and frame.type == "bye":
                self._metrics.sessions.labels("bye").inc()
                await link.close(CloseCode.NORMAL)
            elif frame is not None:
                await self._frames.handle(live, link, frame)

    def _leave(self, node_id: str, live: NodeSession, link: NodeConnection) -> None:
        if self._live.get(node_id) is not live or live.link is not link:
            return  # superseded: the node goes on over another connection
        live.link = None
        self._fleet.set_connected(node_id, connected=False)
        self._metrics.sessions.labels("closed").inc()
        self._metrics.nodes_connected.dec()
