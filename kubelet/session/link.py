"""The node's one outbound connection to the relay: connects, authenticates, and dispatches frames.

Must not decide which frame may be sent when, which the session machine does, nor what a command does, which
the dispatcher does.
"""

import asyncio
from typing import NoReturn

from websockets.exceptions import ConnectionClosed

from kubelet.announce.signer import SignedManifest
from kubelet.backoff import LONGEST_REQUESTED_S
from kubelet.session.call_flow import CallFlow
from kubelet.session.channel import CLOSE_TIMEOUT_S, NOT_REACHED, Channel, opened, retry_after_s
from kubelet.session.handshake import AudienceError, answer_to
from kubelet.session.link_parts import LinkParts
from kubelet.session.link_state import LinkState
from kubelet.session.relay_addresses import RelayAddress
from schemas.backoff import Backoff
from schemas.delivery import TransitGauge
from schemas.faults import connection_reason
from schemas.frames import SUBPROTOCOL_1_1, Frame
from schemas.health import Loop
from schemas.payloads import AnnounceAck, Bye, Cmd, CmdAck, Heartbeat, HeartbeatAck, RenewAck, Welcome
from schemas.session import ByeReason, CloseCode, PeerProtocolError, ProtocolError
from schemas.text import printable

_SUPERSEDED_WAIT_S = 300.0
_STEP_S = 120.0
"""How long connecting or one frame may take: an answer waits until the connection takes it, or is lost."""


class RelayLink:
    """The connection of one node, kept up until cancelled.

    Attributes:
        state: for readiness.
        flow: whether calls flow, for the same.
        loop: the progress of ``run``.
        connected_to: the relay with which there is a session.
    """

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._boot_id = parts.ulids.new()
        self._session: tuple[RelayAddress, str] | None = None
        self._resumed = False
        self._channel: Channel | None = None
        self._gauge = TransitGauge()
        self._requested_wait_s = 0.0
        self.connected_to: RelayAddress | None = None
        self._rival = Backoff(_SUPERSEDED_WAIT_S, LONGEST_REQUESTED_S)
        self._opened_ms: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.state = LinkState.CONNECTING
        self.flow = CallFlow(lambda: parts.announcer.interval_s, parts.monotonic)
        self.loop = Loop(parts.monotonic)

    async def run(self) -> None:
        """Hold a session, and reconnect when it is lost; ends only when the node was revoked."""
        while self.state is not LinkState.REVOKED:
            self.loop.busy(_STEP_S)
            address, wait_s = await self._parts.relays.next()
            if wait_s > 0:
                self.loop.busy(wait_s + _STEP_S)
                await self._parts.sleep(wait_s)
                self.loop.busy(_STEP_S)
            await self._hold(address)
        self.loop.waits()

    async def _hold(self, address: RelayAddress) -> None:
        """Connect to the relay at ``address``, and hold the session until it ends."""
        log = self._parts.log
        self._requested_wait_s = 0.0
        self._opened_ms = None
        try:
            await self._connect(address)
        except ConnectionClosed as error:
            self._closed(error)
        except AudienceError:
            self.state = LinkState.WRONG_AUDIENCE
            log.warning("relay names another audience", relay=str(address), pinned=self._parts.public_url)
        except PeerProtocolError as error:
            self.state = LinkState.CONNECTING
            log.warning("relay broke the protocol", reason=printable(error.reason))
        except ProtocolError:
            self.state = LinkState.CONNECTING
            log.exception("a frame of this node does not fit the protocol")
        except NOT_REACHED as error:
            self.state = LinkState.CONNECTING
            self._requested_wait_s = retry_after_s(error)
            log.info("relay not reached", relay=str(address), reason=connection_reason(error))
        finally:
            self._channel = None
            self.connected_to = None
            self.flow.lost()
            self._parts.frames.detach()
        was_open = self._opened_ms is not None
        wait_s = self._parts.relays.failed(address, self._requested_wait_s, was_open=was_open)
        if self.state is LinkState.SUPERSEDED:
            # By way of another relay it would displace the other machine just as well.
            self._parts.relays.postpone_all(wait_s)

    async def send_manifest(self, manifest: SignedManifest) -> bool:
        """Send ``manifest`` and its heartbeat, if a session is open."""
        channel = self._channel
        if channel is None or not channel.is_open:
            return False
        beat: Heartbeat = {
            "manifest_etag": manifest.etag,
            "expires_at_ms": manifest.expires_at_ms,
            "inflight": self._parts.dispatcher.inflight,
        }
        return await channel.send_together([("announce", manifest.wire), ("heartbeat", beat)])

    async def _connect(self, address: RelayAddress) -> None:
        parts = self._parts
        timeout_s = parts.handshake_timeout_s
        async with opened(
            parts.public_url,
            address,
            parts.tls(),
            parts.reader,
            parts.ulids,
            timeout_s,
            commands_per_s=parts.dispatcher.commands_per_s,
        ) as channel:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._authenticate(channel, address)
                self._channel = channel
                parts.frames.attach(channel, resumed=self._resumed)
                await self._serve(channel)
            except ProtocolError as error:
                await channel.close(error.code)
                raise
            except AudienceError:
                await channel.close(CloseCode.NORMAL)
                raise

    async def _authenticate(self, channel: Channel, address: RelayAddress) -> None:
        challenge = await self._receive(channel)
        parts = self._parts
        auth = answer_to(
            challenge.payload, parts.identity, parts.public_url, parts.ulids.new(), self._boot_id
        )
        # Another relay does not have the session.
        if self._session is not None and self._session[0] == address:
            auth["resume"] = self._session[1]
        await channel.send("auth", auth, challenge.msg_id)
        payload: Welcome = (await self._receive(channel)).payload
        self._session = (address, payload["session_id"])
        self.connected_to = address
        self._resumed = payload["resumed"]
        if not self._resumed:
            self._gauge = TransitGauge()
        self._gauge.delay_ms(payload["server_time_ms"], self._parts.ticks_ms())
        self._parts.announcer.follow_interval(payload["heartbeat_interval_ms"] / 1000)
        self._opened_ms = self._parts.ticks_ms()
        self.state = LinkState.OPEN
        self.flow.connected(gets_echo=channel.speaks(SUBPROTOCOL_1_1))
        self._parts.log.info("relay connected", relay=str(address), resumed=self._resumed)

    async def _serve(self, channel: Channel) -> None:
        try:
            await self._parts.announcer.send_current(self.send_manifest)
            while True:
                self.loop.waits()
                frame = await channel.receive()
                self.loop.busy(_STEP_S)
                if frame is not None:
                    await self._handle(channel, frame)
                else:
                    self._parts.frames.count_dropped(channel.take_dropped())
        except asyncio.CancelledError:
            if channel.is_open:
                await channel.send("bye", {"reason": ByeReason.SHUTTING_DOWN})
                await channel.close(CloseCode.NORMAL)
            raise

    async def _receive(self, channel: Channel) -> Frame:
        frame = await channel.receive()
        if frame is None:
            raise PeerProtocolError("an unexpected frame in the handshake")
        if frame.type == "bye":
            await self._until_closed(channel, frame)
        return frame

    async def _until_closed(self, channel: Channel, bye: Frame) -> NoReturn:
        """Wait for the close that follows ``bye``: its code decides what to do next."""
        payload: Bye = bye.payload
        self._requested_wait_s = payload.get("retry_after_ms", 0) / 1000
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await channel.receive()
        raise PeerProtocolError("a frame after bye")

    async def _handle(self, channel: Channel, frame: Frame) -> None:
        payload = frame.payload
        match frame.type:
            case "cmd":
                command: Cmd = payload
                delay = self._gauge.delay_ms(command["sent_at_ms"], self._parts.ticks_ms())
                await self._parts.dispatcher.submit(frame, command["deadline_ms"] - delay, self._answer)
            case "cmd_cancel":
                self._parts.dispatcher.cancel(frame.in_reply_to or "")
            case "heartbeat_ack":
                beat: HeartbeatAck = payload
                self._gauge.renew(beat["server_time_ms"])
                self._gauge.delay_ms(beat["server_time_ms"], self._parts.ticks_ms())
                self.flow.acknowledged(beat.get("broker_etag"))
                if (interval_ms := beat.get("heartbeat_interval_ms")) is not None:
                    self._parts.announcer.follow_interval(interval_ms / 1000)
                await self._renew(channel)
            case "announce_ack":
                self._announced(frame)
                await self._renew(channel)
            case "renew_ack":
                self._renewed(payload)
            case "bye":
                await self._until_closed(channel, frame)
            case _:
                self._parts.frames.received(frame)

    def _announced(self, frame: Frame) -> None:
        payload: AnnounceAck = frame.payload
        if payload["ok"]:
            # Not before: at a relay that accepts the session and then closes it, the waits must grow.
            if self.connected_to is not None:
                self._parts.relays.succeeded(self.connected_to)
            self.state = LinkState.ANNOUNCED
            return
        self.state = LinkState.OPEN
        self._parts.log.error("relay rejects the manifest", code=payload["error"]["code"])
        self._parts.announcer.advance_past(payload.get("mark_issued_at_ms", 0))

    async def _renew(self, channel: Channel) -> None:
        if self._parts.renewal is None:
            return
        request = self._parts.renewal.request(server_roots=channel.speaks(SUBPROTOCOL_1_1))
        if request is not None:
            await channel.send("renew", request)

    def _renewed(self, payload: RenewAck) -> None:
        if self._parts.renewal is None:
            return
        # In a task: installing takes a while, and commands must run meanwhile.
        task = asyncio.create_task(self._parts.renewal.answered(payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, msg_id: str, payload: CmdAck) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        if await channel.send("cmd_ack", payload, msg_id) and payload["ok"]:
            self.flow.answered()

    def _closed(self, error: ConnectionClosed) -> None:
        code = error.rcvd.code if error.rcvd is not None else None
        self.state = LinkState.CONNECTING
        match code:
            case CloseCode.AUTH_FAILED:
                self.state = LinkState.REFUSED
            case CloseCode.REVOKED:
                self.state = LinkState.REVOKED
            case CloseCode.SUPERSEDED:
                self.state = LinkState.SUPERSEDED
                # Two machines with one identity displace each other, and each connects whenever it tries:
                # only a session that held for longer than the other one waits is a reason to start over.
                if self._held_s() > LONGEST_REQUESTED_S:
                    self._rival.reset()
                self._requested_wait_s = max(self._requested_wait_s, self._rival.next_s())
            case _:
                self._parts.log.info("relay lost", code=code)
                return
        self._parts.log.error("relay closed the session", code=code, what=self.state.value)

    def _held_s(self) -> float:
        return 0.0 if self._opened_ms is None else (self._parts.ticks_ms() - self._opened_ms) / 1000
