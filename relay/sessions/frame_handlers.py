"""What a connected node says, and what it is answered.

What is asked of the certificate authority is done aside: it can take a while, and the answers of the same
node to its calls must not wait for it. Must not decide who is connected: that is ``sessions``.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.websockets import WebSocketDisconnect

from relay.fleet.fleet import Fleet
from relay.pki.renewals import Renewals
from relay.sessions.connection import NodeConnection
from relay.sessions.session import NodeSession
from schemas.errors import Failure, ToolError
from schemas.frames import Frame
from schemas.manifest import etag_of
from schemas.session import CloseCode, ProtocolError
from schemas.trust import Outcome, Verdict

_MAX_REJECTED_IN_A_ROW = 3
_AGAIN_AFTER_MS = 60_000

_Act = Callable[[NodeSession, NodeConnection, Frame], Awaitable[None]]


class FrameHandlers:
    """Acts on the frames of an open session, but for ``bye``.

    ``signed_at`` is called with the time of every manifest that is accepted from one.
    """

    def __init__(self, fleet: Fleet, renewals: Renewals, signed_at: Callable[[int], None]) -> None:
        self._fleet = fleet
        self._renewals = renewals
        self._signed_at = signed_at
        self._tasks: set[asyncio.Task[None]] = set()

    async def handle(self, live: NodeSession, link: NodeConnection, frame: Frame) -> None:
        """Act on ``frame``, which came over ``link``, and answer it."""
        match frame.type:
            case "cmd_ack":
                live.settle(frame.in_reply_to or "", frame.payload)
            case "announce":
                await self._announced(live, link, frame)
            case "heartbeat":
                self._fleet.heartbeat(live.identity.node_id, frame.payload["manifest_etag"])
                await link.send("heartbeat_ack", {"server_time_ms": live.now_ms()}, frame.msg_id)
            case "renew":
                await self._aside(live, link, frame, self._renew)
            case _:  # retire
                await self._aside(live, link, frame, self._retire)

    async def _announced(self, live: NodeSession, link: NodeConnection, frame: Frame) -> None:
        node_id = live.identity.node_id
        verdict = self._fleet.offer_manifest(node_id, frame.wire, "session", frame.payload)
        if verdict.manifest is not None:
            self._signed_at(verdict.manifest.issued_at_ms)
        if verdict.outcome in {Outcome.ACCEPTED, Outcome.UNCHANGED}:
            live.rejected_in_a_row = 0
            self._follow_renewal(live)
            etag = etag_of(frame.wire)
            await link.send("announce_ack", {"ok": True, "manifest_etag": etag}, frame.msg_id)
            return
        live.rejected_in_a_row += 1
        await link.send("announce_ack", _refusal(verdict), frame.msg_id)
        if live.rejected_in_a_row >= _MAX_REJECTED_IN_A_ROW:
            await link.close(CloseCode.MANIFEST_REJECTED)

    def _follow_renewal(self, live: NodeSession) -> None:
        """Let the session stand on the leaf that its node announces with: the old one may be revoked now.

        Only on one for the same key. Manifests are public: whoever holds a key that is about to be revoked
        could otherwise show one of the leaf that took its place.
        """
        signer = self._fleet.signer_of(live.identity.node_id)
        if signer is not None and signer.public_key == live.identity.public_key:
            live.identity = signer

    async def _aside(self, live: NodeSession, link: NodeConnection, frame: Frame, act: _Act) -> None:
        """Let ``act`` answer ``frame`` while others are read, unless it does so already in this session."""
        if frame.type in live.asking:
            early = ToolError(Failure.RATE_LIMITED, "That is under way.", retry_after_ms=_AGAIN_AFTER_MS)
            await link.send(f"{frame.type}_ack", {"ok": False, "error": early.envelope()}, frame.msg_id)
            return
        live.asking.add(frame.type)
        task = asyncio.create_task(self._acted(live, link, frame, act))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _acted(self, live: NodeSession, link: NodeConnection, frame: Frame, act: _Act) -> None:
        try:
            await act(live, link, frame)
        except (WebSocketDisconnect, ProtocolError):
            pass  # the connection ended first: what was decided stands, and the node asks again
        finally:
            live.asking.discard(frame.type)

    async def _renew(self, live: NodeSession, link: NodeConnection, frame: Frame) -> None:
        answer: dict[str, Any]
        try:
            issued = await self._renewals.renew(live.identity, frame.payload["csr"])
            # The node will announce itself with it over this session, and nothing must wait for the broker.
            self._fleet.offer_identity(live.identity.node_id, issued["certificate"])
            answer = {"ok": True, **issued}
        except ToolError as error:
            answer = {"ok": False, "error": error.envelope()}
        await link.send("renew_ack", answer, frame.msg_id)

    async def _retire(self, live: NodeSession, link: NodeConnection, frame: Frame) -> None:
        # The revocation may be put into effect before it is acknowledged here.
        live.leaving = True
        try:
            await self._renewals.retire(live.identity)
        except ToolError as error:
            live.leaving = False
            await link.send("retire_ack", {"ok": False, "error": error.envelope()}, frame.msg_id)
            return
        await link.send("retire_ack", {"ok": True}, frame.msg_id)
        await link.close(CloseCode.REVOKED)


def _refusal(verdict: Verdict) -> dict[str, Any]:
    # Parked: the node itself is here, so no other leaf of its own will follow to vouch for it.
    unvouched = Failure.ATTESTATION_FAILED if verdict.outcome is Outcome.PARKED else Failure.MANIFEST_INVALID
    failure = verdict.reason.failure if verdict.reason else unvouched
    why = verdict.reason.value if verdict.reason else verdict.outcome.value
    detail = f"The manifest was not accepted: {why}."
    refusal: dict[str, Any] = {"ok": False, "error": ToolError(failure, detail).envelope()}
    if verdict.mark is not None:
        refusal["mark_issued_at_ms"] = verdict.mark.issued_at_ms
    return refusal
