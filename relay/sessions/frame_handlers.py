"""Handles the frames of a connected node, and answers them.

Requests to the certificate authority run in tasks of their own: they can take seconds, and the same node's
answers to commands must not wait. Must not decide who is connected: ``node_sessions`` does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from attrs import define, field

from relay.fleet.fleet import Fleet
from relay.http.websocket_protocol import SocketClosedError
from relay.pki.renewals import Renewals
from relay.sessions.one_way_frames import OneWayFrames
from relay.sessions.session import NodeConnection, NodeSession
from schemas.errors import Failure, ToolError
from schemas.frames import ONE_WAY, SUBPROTOCOL_1_1, Frame
from schemas.manifest import etag_of
from schemas.payloads import (
    AnnounceAck,
    AnnounceRefused,
    Heartbeat,
    HeartbeatAck,
    Refused,
    Renew,
    RenewAck,
    RetireAck,
)
from schemas.session import CloseCode, ProtocolError
from schemas.trust import Outcome, Verdict

SHORTEST_MS = 60_000
"""The shortest heartbeat interval, and ``LONGEST_MS`` the longest."""
LONGEST_MS = 300_000
_FEW, _MANY = 10_000, 100_000
_STEP_MS = 1000

_MAX_REJECTED_IN_A_ROW = 3
_RETRY_AFTER_MS = 60_000

_Act = Callable[[NodeSession, NodeConnection, Frame], Awaitable[None]]


@define(eq=False, repr=False)
class FrameHandlers:
    """Handles the frames of an open session, except ``bye``.

    ``signed_at`` is called with the time of every manifest that is accepted.
    """

    _fleet: Fleet
    _renewals: Renewals
    _signed_at: Callable[[int], None]
    _one_way: OneWayFrames
    _tasks: set[asyncio.Task[None]] = field(init=False, factory=set)

    def handle_now(self, session: NodeSession, connection: NodeConnection, frame: Frame) -> bool:
        """Handle ``frame`` if that takes no waiting: no answer is expected, or it can be sent at once.

        Most frames of a large fleet are heartbeats and what was signed for them.
        """
        if frame.type == "cmd_ack":
            session.settle(frame.in_reply_to or "", frame.payload)
        elif frame.type in ONE_WAY:
            self._one_way.received(session, frame)
        elif frame.type in {"announce", "heartbeat"} and connection.can_send_now:
            answer_type, answer = self._answer(session, connection, frame)
            connection.send_now(connection.encoded(answer_type, answer, in_reply_to=frame.msg_id))
            if self._answered(session, answer_type, answer):
                self._run_later(connection.close(CloseCode.MANIFEST_REJECTED))
        else:
            return False
        return True

    async def handle(self, session: NodeSession, connection: NodeConnection, frame: Frame) -> None:
        match frame.type:
            case "announce" | "heartbeat":
                answer_type, answer = self._answer(session, connection, frame)
                await connection.send(answer_type, answer, frame.msg_id)
                if self._answered(session, answer_type, answer):
                    await connection.close(CloseCode.MANIFEST_REJECTED)
            case "renew":
                await self._start(session, connection, frame, self._renew)
            case "retire":
                await self._start(session, connection, frame, self._retire)
            case _:
                self.handle_now(session, connection, frame)

    def _answer(
        self, session: NodeSession, connection: NodeConnection, frame: Frame
    ) -> tuple[str, Mapping[str, Any]]:
        """Act on an announce or a heartbeat; return the type and the payload of the answer."""
        if frame.type == "announce":
            return "announce_ack", self._announced(session, frame)
        beat: Heartbeat = frame.payload
        node_id, inventory = session.identity.node_id, self._fleet.inventory
        inventory.heartbeat(node_id, beat["manifest_etag"])
        acknowledged: HeartbeatAck = {"server_time_ms": session.now_ms()}
        if connection.speaks(SUBPROTOCOL_1_1):
            if (etag := inventory.etag_by_broker(node_id)) is not None:
                acknowledged["broker_etag"] = etag
            # A shorter one is told by the next welcome: here all nodes would follow it at once.
            if (interval_ms := heartbeat_interval_ms(inventory.known())) > session.heartbeat_interval_ms:
                session.heartbeat_interval_ms = acknowledged["heartbeat_interval_ms"] = interval_ms
        return "heartbeat_ack", acknowledged

    def _answered(self, session: NodeSession, answer_type: str, answer: Mapping[str, Any]) -> bool:
        """Follow an answer that was sent; return whether the node has had too many manifests rejected."""
        if answer_type == "announce_ack" and answer["ok"]:
            self._one_way.announced(session)
        return session.rejected_in_a_row >= _MAX_REJECTED_IN_A_ROW

    def _announced(self, session: NodeSession, frame: Frame) -> AnnounceAck:
        node_id = session.identity.node_id
        verdict = self._fleet.offer_manifest(node_id, frame.wire, "session", frame.payload)
        if verdict.manifest is not None:
            self._signed_at(verdict.manifest.issued_at_ms)
        elif verdict.outcome is Outcome.UNCHANGED and verdict.mark is not None:
            # The broker may be faster with each manifest: then the session brings nothing new.
            self._signed_at(verdict.mark.issued_at_ms)
        if verdict.outcome in {Outcome.ACCEPTED, Outcome.UNCHANGED}:
            session.rejected_in_a_row = 0
            self._follow_renewal(session)
            etag = verdict.manifest.etag if verdict.manifest is not None else etag_of(frame.wire)
            return {"ok": True, "manifest_etag": etag}
        session.rejected_in_a_row += 1
        return _rejection(verdict)

    def _follow_renewal(self, session: NodeSession) -> None:
        """Make the leaf that signed the manifest the session's: the old one may be revoked from now on.

        Only a leaf of the same key. Manifests are public: the holder of a key that is about to be revoked
        could otherwise send one that was signed with the new leaf.
        """
        signer = self._fleet.signer_of(session.identity.node_id)
        if signer is not None and signer.public_key == session.identity.public_key:
            session.identity = signer

    async def _start(self, session: NodeSession, connection: NodeConnection, frame: Frame, act: _Act) -> None:
        """Have ``act`` answer ``frame`` in a task, unless one of its type is pending in this session."""
        if frame.type in session.ca_requests:
            early = ToolError(
                Failure.RATE_LIMITED, "Such a request is already pending.", retry_after_ms=_RETRY_AFTER_MS
            )
            await connection.send(f"{frame.type}_ack", _refusal(early), frame.msg_id)
            return
        session.ca_requests.add(frame.type)
        self._run_later(self._run(session, connection, frame, act))

    def _run_later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, session: NodeSession, connection: NodeConnection, frame: Frame, act: _Act) -> None:
        try:
            await act(session, connection, frame)
        except (SocketClosedError, ProtocolError):
            pass  # the connection ended first: what was decided holds, and the node retries
        finally:
            session.ca_requests.discard(frame.type)

    async def _renew(self, session: NodeSession, connection: NodeConnection, frame: Frame) -> None:
        asked: Renew = frame.payload
        answer: RenewAck
        try:
            issued = await self._renewals.renew(
                session.identity, asked["csr"], server_roots=asked.get("server_roots", False)
            )
            # The node will announce itself with it over this session, without waiting for the broker.
            self._fleet.offer_identity(session.identity.node_id, issued["certificate"])
            answer = {"ok": True, **issued}
        except ToolError as error:
            answer = _refusal(error)
        await connection.send("renew_ack", answer, frame.msg_id)

    async def _retire(self, session: NodeSession, connection: NodeConnection, frame: Frame) -> None:
        # The revocation may take effect before it is acknowledged here.
        session.is_retiring = True
        answer: RetireAck = {"ok": True}
        try:
            await self._renewals.retire(session.identity)
        except ToolError as error:
            session.is_retiring = False
            answer = _refusal(error)
        await connection.send("retire_ack", answer, frame.msg_id)
        if answer["ok"]:
            await connection.close(CloseCode.REVOKED)


def _refusal(error: ToolError) -> Refused:
    return {"ok": False, "error": error.envelope()}


def _rejection(verdict: Verdict) -> AnnounceRefused:
    # Pending for a leaf: the node itself is connected, so no other leaf of it will follow.
    otherwise = Failure.ATTESTATION_FAILED if verdict.outcome is Outcome.PENDING else Failure.MANIFEST_INVALID
    failure = verdict.reason.failure if verdict.reason else otherwise
    why = verdict.reason.value if verdict.reason else verdict.outcome.value
    detail = f"The manifest was not accepted: {why}."
    rejection: AnnounceRefused = {"ok": False, "error": ToolError(failure, detail).envelope()}
    if verdict.mark is not None:
        rejection["mark_issued_at_ms"] = verdict.mark.issued_at_ms
    return rejection


def heartbeat_interval_ms(nodes: int) -> int:
    """Return the interval for a fleet of so many ``nodes``, in ms: 60 s up to 10 000, 300 s from 100 000 on.

    In between it grows evenly, in whole seconds. Each heartbeat brings a signed manifest, which every relay
    of the fleet verifies, so its cost grows with the fleet and not with the nodes of one relay.
    """
    share = min(max((nodes - _FEW) / (_MANY - _FEW), 0.0), 1.0)
    grown = SHORTEST_MS + share * (LONGEST_MS - SHORTEST_MS)
    return int(grown // _STEP_MS) * _STEP_MS
