"""The sessions of the nodes that are connected to this process: one a node, the newest.

Moves frames between sockets and the session machine, and pairs commands with answers. A session outlives
its connection for the same process of the node, so that what was sent may be answered after a reconnect.
Must not decide who may call, nor look into arguments and results.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from structlog.typing import FilteringBoundLogger

from relay.admission import Admission, AdmissionError
from relay.config import HEARTBEAT_INTERVAL_MS
from relay.fleet import Fleet
from relay.meters import Meters
from relay.node_link import NodeLink
from relay.reach import Command
from relay.tally import Tally
from relay.transport import ADMITTED_IN_SCOPE
from schemas.canonical import jcs
from schemas.delivery import Ledger
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, Frame, FrameReader
from schemas.identity import Identity
from schemas.manifest import etag_of
from schemas.session import CloseCode, ProtocolError, Role, Session
from schemas.text import printable
from schemas.trust import Outcome
from schemas.ulids import UlidSource

AUTH_TIMEOUT_S = 5
_MAX_REJECTED_IN_A_ROW = 3

_Answer = Mapping[str, Any]


@dataclass(slots=True)
class _Live:
    """The session of one process of one node. ``link`` is None while its connection is lost."""

    session_id: str
    boot_id: str
    link: NodeLink | None
    ledger: Ledger[asyncio.Future[_Answer]] = field(default_factory=Ledger)
    rejected_in_a_row: int = 0


class NodeSessions:
    """Serves ``/devices/connect``, and reaches the nodes behind it (``relay.reach.Reach``)."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        admission: Admission,
        fleet: Fleet,
        reader: FrameReader,
        ulids: UlidSource,
        meters: Meters,
        tally: Tally,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
        auth_timeout_s: float = AUTH_TIMEOUT_S,
    ) -> None:
        self._admission = admission
        self._fleet = fleet
        self._reader = reader
        self._ulids = ulids
        self._meters = meters
        self._tally = tally
        self._now_ms = now_ms
        self._log = log
        self._auth_timeout_s = auth_timeout_s
        self._live: dict[str, _Live] = {}
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
        link = NodeLink(socket, Session(Role.RELAY, self._reader), self._ulids)
        try:
            async with asyncio.timeout(self._auth_timeout_s):
                identity, auth = await self._admit(link)
        except (AdmissionError, ProtocolError, TimeoutError, WebSocketDisconnect) as error:
            await self._refuse(link, error)
            return
        live, before = self._take_place(identity.node_id, auth, link)
        try:
            if before is not None:
                # Not waited for: a connection that is half gone takes as long to close as to notice.
                self._aside(before.close(CloseCode.SUPERSEDED))
            socket.scope[ADMITTED_IN_SCOPE] = True
            await self._welcome(identity.node_id, live, link, auth)
            del auth  # a certificate and a token, which would otherwise stay as long as the connection
            await self._serve_frames(identity.node_id, live, link)
        except ProtocolError as error:
            self._meters.sessions.labels("protocol_violation").inc()
            self._log.warning(
                "node broke the protocol", node_id=identity.node_id, reason=printable(error.reason)
            )
            await link.close(error.code)
        except (WebSocketDisconnect, RuntimeError, ToolError):
            pass  # lost, or closed by us: what follows is the same
        finally:
            self._leave(identity.node_id, live, link)

    async def run(self, command: Command) -> _Answer:
        """Send ``command`` and return the node's answer, as ``relay.reach.Reach`` describes."""
        live = self._live.get(command.node_id)
        link = live.link if live else None
        if live is None or link is None or not link.is_open:
            raise ToolError(Failure.NODE_OFFLINE)
        msg_id = self._ulids.new()
        now = self._now_ms()
        payload = {
            "tool": command.tool,
            "arguments": command.arguments,
            "deadline_ms": command.deadline_ms,
            "sent_at_ms": now,
            "correlation_id": command.correlation_id,
        }
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
        live.ledger.enter(msg_id, payload, now + command.deadline_ms, answer)
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
            live.ledger.settle(msg_id)

    async def _send_command(self, link: NodeLink, msg_id: str, payload: Mapping[str, Any]) -> None:
        try:
            await link.send_as(msg_id, "cmd", payload)
        except ProtocolError as error:
            # Arguments within their schema fit a frame; whatever else it is, nothing has left.
            raise ToolError(Failure.INTERNAL, "The command does not fit a frame.") from error
        except (RuntimeError, WebSocketDisconnect):
            # Part of it may have left. The same process may still come back for it before the deadline.
            return

    def _cancel(self, live: _Live, msg_id: str, reason: str) -> None:
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

    async def _tell(self, link: NodeLink, msg_id: str, reason: str) -> None:
        try:
            await link.send("cmd_cancel", {"reason": reason}, msg_id)
        except (RuntimeError, WebSocketDisconnect, ProtocolError):
            return  # the connection ended first: the node stops the command at its deadline

    async def _admit(self, link: NodeLink) -> tuple[Identity, Frame]:
        challenge = self._admission.challenge()
        await link.send("challenge", challenge)
        auth = await link.receive()
        if auth is None or auth.type != "auth":
            raise AdmissionError("no_auth")
        return self._admission.judge(auth, challenge["nonce"]), auth

    async def _refuse(self, link: NodeLink, error: Exception) -> None:
        reason, code = "late", CloseCode.AUTH_FAILED
        if isinstance(error, AdmissionError):
            reason, code = error.reason, error.code
        elif isinstance(error, ProtocolError):
            reason, code = "protocol", error.code
        elif isinstance(error, WebSocketDisconnect):
            reason = "gone"
        self._meters.sessions.labels(f"refused_{reason}").inc()
        self._log.warning("node refused", reason=reason)
        self._tally.count("node_refused", link.peer, reason)
        await link.close(code)

    def _take_place(self, node_id: str, auth: Frame, link: NodeLink) -> tuple[_Live, NodeLink | None]:
        """Give the node's place to ``link``; return the session that it serves and the link before it."""
        boot_id = auth.payload["boot_id"]
        known = self._live.get(node_id)
        before = known.link if known is not None else None
        same_process = known is not None and known.boot_id == boot_id
        if before is None:
            self._meters.nodes_connected.inc()
        elif before.is_open and not same_process:
            self._meters.sessions.labels("duplicate_identity").inc()
            self._log.warning("two machines use one identity; the newer stays", node_id=node_id)
        if known is not None and same_process and known.session_id == auth.payload.get("resume"):
            known.link = link
            return known, before
        live = self._live[node_id] = _Live(self._ulids.new(), boot_id, link)
        return live, before

    async def _welcome(self, node_id: str, live: _Live, link: NodeLink, auth: Frame) -> None:
        # A new session has a new id, which nobody can have asked for.
        resumed = live.session_id == auth.payload.get("resume")
        welcome = {
            "session_id": live.session_id,
            "heartbeat_interval_ms": HEARTBEAT_INTERVAL_MS,
            "max_frame_bytes": MAX_FRAME_BYTES,
            "server_time_ms": self._now_ms(),
            "resumed": resumed,
        }
        await link.send("welcome", welcome, auth.msg_id)
        self._fleet.set_connected(node_id, connected=True)
        self._meters.sessions.labels("resumed" if resumed else "opened").inc()
        for msg_id, payload in live.ledger.resendable(self._now_ms()):
            # Sending can take a while: what nobody waits for any more must not follow its own cancel.
            if msg_id in live.ledger:
                await self._send_command(link, msg_id, payload)

    async def _serve_frames(self, node_id: str, live: _Live, link: NodeLink) -> None:
        while link.is_open:
            frame = await link.receive()
            for reason, count in link.take_dropped().items():
                self._meters.frames_dropped.labels(reason).inc(count)
                self._log.warning("answer dropped", node_id=node_id, reason=reason)
                self._tally.count("frame_dropped", node_id, reason, count)
            if frame is not None:
                await self._handle(node_id, live, link, frame)

    async def _handle(self, node_id: str, live: _Live, link: NodeLink, frame: Frame) -> None:
        match frame.type:
            case "cmd_ack":
                waiter = live.ledger.settle(frame.in_reply_to or "")
                if waiter is not None and not waiter.done():
                    waiter.set_result(frame.payload)
            case "announce":
                await self._announced(node_id, live, link, frame)
            case "heartbeat":
                self._fleet.heartbeat(node_id, frame.payload["manifest_etag"])
                await link.send("heartbeat_ack", {"server_time_ms": self._now_ms()}, frame.msg_id)
            case _:  # bye
                self._meters.sessions.labels("bye").inc()
                await link.close(CloseCode.NORMAL)

    async def _announced(self, node_id: str, live: _Live, link: NodeLink, frame: Frame) -> None:
        wire = jcs(frame.payload)
        verdict = self._fleet.offer_manifest(node_id, wire, "session")
        if verdict.outcome in {Outcome.ACCEPTED, Outcome.UNCHANGED}:
            live.rejected_in_a_row = 0
            await link.send("announce_ack", {"ok": True, "manifest_etag": etag_of(wire)}, frame.msg_id)
            return
        live.rejected_in_a_row += 1
        # Parked: the node itself is here, so no other leaf of its own will follow to vouch for it.
        unvouched = (
            Failure.ATTESTATION_FAILED if verdict.outcome is Outcome.PARKED else Failure.MANIFEST_INVALID
        )
        failure = verdict.reason.failure if verdict.reason else unvouched
        why = verdict.reason.value if verdict.reason else verdict.outcome.value
        detail = f"The manifest was not accepted: {why}."
        refusal: dict[str, Any] = {"ok": False, "error": ToolError(failure, detail).envelope()}
        if verdict.mark is not None:
            refusal["mark_issued_at_ms"] = verdict.mark.issued_at_ms
        await link.send("announce_ack", refusal, frame.msg_id)
        if live.rejected_in_a_row >= _MAX_REJECTED_IN_A_ROW:
            await link.close(CloseCode.MANIFEST_REJECTED)

    def _leave(self, node_id: str, live: _Live, link: NodeLink) -> None:
        if self._live.get(node_id) is not live or live.link is not link:
            return  # superseded: the node goes on over another connection
        live.link = None
        self._fleet.set_connected(node_id, connected=False)
        self._meters.sessions.labels("closed").inc()
        self._meters.nodes_connected.dec()
