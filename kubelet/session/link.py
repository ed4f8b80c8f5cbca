"""The node's one outbound connection to the relay: connects, authenticates, and dispatches frames.

Must not decide which frame may be sent when, which the session machine does, nor what a command does, which
the dispatcher does.
"""

import asyncio
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from structlog.typing import FilteringBoundLogger
from websockets.exceptions import ConnectionClosed

from kubelet.announce.announcer import Announcer
from kubelet.announce.signer import SignedManifest
from kubelet.dispatch import Dispatcher
from kubelet.process import ticks_ms
from kubelet.session.channel import (
    CLOSE_TIMEOUT_S,
    NOT_REACHED,
    Channel,
    close_code,
    open_channel,
    retry_after_s,
)
from kubelet.session.relay_addresses import LONGEST_REQUESTED_S, RelayAddress, RelayAddresses
from kubelet.session.relay_frames import RelayFrames
from kubelet.session.renewal import Renewal
from schemas.delivery import CommandStatus, TransitGauge
from schemas.error_roots import PeerError
from schemas.errors import Failure
from schemas.faults import connection_reason
from schemas.frames import SUBPROTOCOL_1_1, SUBPROTOCOL_1_2, Frame, FrameReader
from schemas.health import Loop
from schemas.identity_files import NodeIdentity
from schemas.pacing import Backoff
from schemas.payloads import AnnounceAck, Auth, Bye, Cmd, CmdAck, Heartbeat, HeartbeatAck, RenewAck, Welcome
from schemas.session import ByeReason, CloseCode, PeerProtocolError, ProtocolError
from schemas.text import printable
from schemas.tokens import sign_token
from schemas.ulids import UlidSource

_TOKEN_LIFE_S = 60
_FRESH_HEARTBEATS = 2.5
"""An acknowledgement is fresh for so many intervals: one may be lost, each with its jitter of a tenth."""
_HANDSHAKE_TIMEOUT_S = 10.0
_SUPERSEDED_WAIT_S = 300.0
_STEP_S = 120.0
"""How long connecting or one frame may take: an answer waits until the connection takes it, or is lost."""


class LinkState(Enum):
    """What an operator sees of the connection."""

    CONNECTING = "connecting"
    OPEN = "open"
    ANNOUNCED = "announced"
    WRONG_AUDIENCE = "the relay has another name than the one pinned: check the first --relay"
    REFUSED = "the relay does not accept this node's identity: install a certificate"
    REVOKED = "revoked: an operator must enrol this node again"
    SUPERSEDED = "another machine uses this identity"


class AudienceError(PeerError):
    """The relay named an audience that this node has not pinned: the text."""


def answer_to(
    challenge: Mapping[str, Any], identity: NodeIdentity, pinned: str, jti: str, boot_id: str
) -> Auth:
    """Return the payload of ``auth``, but for ``resume``, to the payload of a ``challenge``.

    Raises:
        AudienceError: the challenge is not of the relay whose URL is ``pinned``.
    """
    # Never for another audience: a rogue relay could forward the real one's challenge.
    if challenge["audience"] != pinned:
        raise AudienceError(printable(challenge["audience"]))
    # Counted from the relay's clock: a node's own may be off by more than a token lives.
    issued_s = challenge["server_time_ms"] // 1000
    claims = {
        "iss": identity.node_id,
        "sub": identity.node_id,
        "aud": pinned,
        "nonce": challenge["nonce"],
        "iat": issued_s,
        "exp": issued_s + _TOKEN_LIFE_S,
        "jti": jti,
        "scope": "device:connect",
        "token_class": "device_runtime",
    }
    return {
        "node_id": identity.node_id,
        "certificate": identity.chain_pem,
        "token": sign_token(identity.key, identity.kid, claims),
        "boot_id": boot_id,
    }


class CallFlow:
    """Whether calls flow: a command was answered, and heartbeats are acknowledged.

    A relay of protocol 1.1 sends an echo after each welcome, so that a node need not wait for an agent to
    find out. An open connection alone proves nothing: a relay that has stalled behind it still answers pings.
    ``interval_s`` is that of the heartbeats; ``monotonic`` is in seconds.

    Attributes:
        relay_saw: the ETag that the relay received last by the broker, as its last acknowledgement names it;
            None if it named none.
        sessions: how many welcomes there were.
        acknowledgements: how many heartbeats of this session were acknowledged.
        gets_echo: whether the relay sends an echo after its welcome, and names what it saw.
    """

    def __init__(self, interval_s: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._monotonic = monotonic
        self._connected = False
        self._is_answered = False
        self._acknowledged_s = 0.0
        self.sessions = 0
        self.acknowledgements = 0
        self.relay_saw: str | None = None
        self.gets_echo = False

    @property
    def acknowledged_s_ago(self) -> float | None:
        """Seconds since the last acknowledgement, or the welcome; None without a session."""
        return self._monotonic() - self._acknowledged_s if self._connected else None

    def connected(self, *, gets_echo: bool) -> None:
        """Begin with a welcome; ``gets_echo``: the relay sends an echo after it."""
        self._connected = True
        self.sessions += 1
        self.acknowledgements = 0
        self.gets_echo = gets_echo
        # Of a relay that sends no echo, the acknowledgements alone have to do.
        self._is_answered = not gets_echo
        self._acknowledged_s = self._monotonic()
        self.relay_saw = None

    def lost(self) -> None:
        self._connected = False

    def answered(self) -> None:
        self._is_answered = True

    def acknowledged(self, broker_etag: str | None) -> None:
        self._acknowledged_s = self._monotonic()
        self.acknowledgements += 1
        self.relay_saw = broker_etag

    @property
    def is_answered(self) -> bool:
        """Whether a command of this connection was answered, or none need be."""
        return self._connected and self._is_answered

    @property
    def is_fresh(self) -> bool:
        """Whether heartbeats of this connection are acknowledged."""
        age_s = self._monotonic() - self._acknowledged_s
        return self._connected and age_s <= _FRESH_HEARTBEATS * self._interval_s()

    @property
    def state(self) -> str:
        if not self._connected:
            return "no session"
        if not self.is_fresh:
            return "the relay acknowledges no heartbeats"
        return "calls flow" if self._is_answered else "no command answered yet"


@dataclass(eq=False, repr=False)
class RelayLink:
    """The connection of one node, kept up until cancelled.

    Attributes:
        public_url: of the fleet. It is the audience that this node has pinned, whichever relay it reaches.
        relays: the addresses of the fleet's relays.
        frames: the one-way frames, which survive a connection.
        ticks_ms: milliseconds that only ever go forward. They measure how long a command was on its way: the
            clock of a board without a battery leaps when it is set, and every command would look late.
        tls: how the relay is verified; None where the connection is not over TLS.
        renewal: renews the leaf; None for a node that has no files.
        told_kinds: takes the kinds that a welcome names, None of an older relay. It returns whether this node
            announces others from now on, by a manifest that follows at once.
        kinds_refused: is called when the relay does not know a kind of the manifest; returns the same.
        state: for readiness.
        flow: whether calls flow, for the same.
        loop: the progress of ``run``.
        connected_to: the relay with which there is a session.
    """

    identity: NodeIdentity
    public_url: str
    relays: RelayAddresses
    reader: FrameReader
    announcer: Announcer
    dispatcher: Dispatcher
    frames: RelayFrames
    ulids: UlidSource
    log: FilteringBoundLogger
    ticks_ms: Callable[[], int] = ticks_ms
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    tls: Callable[[], ssl.SSLContext | None] = lambda: None
    renewal: Renewal | None = None
    told_kinds: Callable[[Sequence[str] | None], bool] = lambda _kinds: False
    kinds_refused: Callable[[], bool] = lambda: False
    handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S
    monotonic: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._boot_id = self.ulids.new()
        self._session: tuple[RelayAddress, str] | None = None
        self._resumed = False
        self._is_outdated = False
        self._channel: Channel | None = None
        self._gauge = TransitGauge()
        self._requested_wait_s = 0.0
        self.connected_to: RelayAddress | None = None
        self._rival = Backoff(_SUPERSEDED_WAIT_S, LONGEST_REQUESTED_S)
        self._opened_ms: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.state = LinkState.CONNECTING
        self.flow = CallFlow(lambda: self.announcer.interval_s, self.monotonic)
        self.loop = Loop(self.monotonic)

    async def run(self) -> None:
        """Hold a session, and reconnect when it is lost; ends only when the node was revoked."""
        while self.state is not LinkState.REVOKED:
            self.loop.busy(_STEP_S)
            address, wait_s = await self.relays.next()
            if wait_s > 0:
                self.loop.busy(wait_s + _STEP_S)
                await self.sleep(wait_s)
                self.loop.busy(_STEP_S)
            await self._hold(address)
        self.loop.waits()

    async def _hold(self, address: RelayAddress) -> None:
        """Connect to the relay at ``address``, and hold the session until it ends."""
        self._requested_wait_s = 0.0
        self._opened_ms = None
        try:
            await self._connect(address)
        except ConnectionClosed as error:
            self._closed(error)
        except AudienceError as error:
            self.state = LinkState.WRONG_AUDIENCE
            names = {"named": str(error), "pinned": self.public_url}
            self.log.warning("relay names another audience", relay=str(address), **names)
        except PeerProtocolError as error:
            self.state = LinkState.CONNECTING
            self.log.warning("relay broke the protocol", reason=printable(error.reason))
        except ProtocolError:
            self.state = LinkState.CONNECTING
            self.log.exception("a frame of this node does not fit the protocol")
        except NOT_REACHED as error:
            self.state = LinkState.CONNECTING
            self._requested_wait_s = self._requested_wait_s or retry_after_s(error)
            self.log.info("relay not reached", relay=str(address), reason=connection_reason(error))
        finally:
            self._channel = None
            self.connected_to = None
            self.flow.lost()
            self.frames.detach()
        was_open = self._opened_ms is not None
        wait_s = self.relays.failed(address, self._requested_wait_s, was_open=was_open)
        if self.state is LinkState.SUPERSEDED:
            # By way of another relay it would displace the other machine just as well.
            self.relays.postpone_all(wait_s)

    async def send_manifest(self, manifest: SignedManifest) -> bool:
        """Send ``manifest`` and its heartbeat, if a session is open."""
        channel = self._channel
        if channel is None or not channel.is_open:
            return False
        beat: Heartbeat = {
            "manifest_etag": manifest.etag,
            "expires_at_ms": manifest.expires_at_ms,
            "inflight": self.dispatcher.inflight,
        }
        return await channel.send_together([("announce", manifest.wire), ("heartbeat", beat)])

    async def _connect(self, address: RelayAddress) -> None:
        timeout_s = self.handshake_timeout_s
        async with open_channel(
            self.public_url,
            address,
            self.tls(),
            self.reader,
            self.ulids,
            timeout_s,
            commands_per_s=self.dispatcher.commands_per_s,
        ) as channel:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._authenticate(channel, address)
                self._channel = channel
                self.frames.attach(channel, resumed=self._resumed)
                await self._serve(channel)
            except ProtocolError as error:
                await channel.close(error.code)
                raise
            except AudienceError:
                await channel.close(CloseCode.NORMAL)
                raise

    async def _authenticate(self, channel: Channel, address: RelayAddress) -> None:
        challenge = await self._receive(channel)
        auth = answer_to(challenge.payload, self.identity, self.public_url, self.ulids.new(), self._boot_id)
        # Another relay does not have the session.
        if self._session is not None and self._session[0] == address:
            auth["resume"] = self._session[1]
        await channel.send("auth", auth, challenge.msg_id)
        payload: Welcome = (await self._receive(channel)).payload
        self._session = (address, payload["session_id"])
        self.connected_to = address
        self._resumed = payload["resumed"]
        if self._resumed:
            channel.expect_answers_again()
        else:
            self._gauge = TransitGauge()
        self._gauge.delay_ms(payload["server_time_ms"], self.ticks_ms())
        self.announcer.follow_interval(payload["heartbeat_interval_ms"] / 1000)
        self._opened_ms = self.ticks_ms()
        self.state = LinkState.OPEN
        self.flow.connected(gets_echo=channel.speaks(SUBPROTOCOL_1_1))
        self._is_outdated = self.told_kinds(payload.get("kinds"))
        self.log.info("relay connected", relay=str(address), resumed=self._resumed)

    async def _serve(self, channel: Channel) -> None:
        try:
            if not self._is_outdated:
                await self.announcer.send_current(self.send_manifest)
            channel.take_commands(self._begin)
            while True:
                self.loop.waits()
                frame = await channel.receive()
                self.loop.busy(_STEP_S)
                if frame is not None:
                    await self._handle(channel, frame)
                else:
                    self.frames.count_dropped(channel.take_dropped())
        except asyncio.CancelledError:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    if channel.is_open:
                        await channel.send("bye", {"reason": ByeReason.SHUTTING_DOWN})
                        await channel.close(CloseCode.NORMAL)
            except TimeoutError:
                channel.abort()
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
                await self.dispatcher.submit(frame, self._budget_ms(payload), self._answer)
            case "cmd_cancel":
                self.dispatcher.cancel(frame.in_reply_to or "")
            case "heartbeat_ack":
                beat: HeartbeatAck = payload
                self._gauge.renew(beat["server_time_ms"])
                self._gauge.delay_ms(beat["server_time_ms"], self.ticks_ms())
                self.flow.acknowledged(beat.get("broker_etag"))
                if (interval_ms := beat.get("heartbeat_interval_ms")) is not None:
                    self.announcer.follow_interval(interval_ms / 1000)
                await self._renew(channel)
            case "announce_ack":
                self._announced(frame)
                await self._renew(channel)
            case "renew_ack":
                self._renewed(payload)
            case "bye":
                await self._until_closed(channel, frame)
            case _:
                self.frames.received(frame)

    def _begin(self, frame: Frame) -> bool:
        """Begin the command in ``frame``; return False if it was seen before, or cannot be begun."""
        status = self.dispatcher.begin(frame, self._budget_ms(frame.payload), self._answer)
        return status is CommandStatus.NEW

    def _budget_ms(self, command: Cmd) -> int:
        """Return what is left of the time of ``command``."""
        return command["deadline_ms"] - self._gauge.delay_ms(command["sent_at_ms"], self.ticks_ms())

    def _announced(self, frame: Frame) -> None:
        payload: AnnounceAck = frame.payload
        if payload["ok"]:
            # Not before: at a relay that accepts the session and then closes it, the waits must grow.
            if self.connected_to is not None:
                self.relays.succeeded(self.connected_to)
            self.state = LinkState.ANNOUNCED
            return
        self.state = LinkState.OPEN
        code = payload["error"]["code"]
        self.log.error("relay rejects the manifest", code=code)
        if code == Failure.KIND_UNSUPPORTED.value.code and self.kinds_refused():
            return
        self.announcer.advance_past(payload.get("mark_issued_at_ms", 0))

    async def _renew(self, channel: Channel) -> None:
        if self.renewal is None:
            return
        request = self.renewal.request(server_roots=channel.speaks(SUBPROTOCOL_1_1))
        if request is not None:
            await channel.send("renew", request)

    def _renewed(self, payload: RenewAck) -> None:
        if self.renewal is None:
            return
        # In a task: installing takes a while, and commands must run meanwhile.
        task = asyncio.create_task(self.renewal.answered(payload))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, msg_id: str, payload: CmdAck) -> None:
        channel = self._channel
        if channel is None or not channel.is_open:
            return
        if await channel.send("cmd_ack", _for(channel, payload), msg_id) and payload["ok"]:
            self.flow.answered()

    def _closed(self, error: ConnectionClosed) -> None:
        code = close_code(error)
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
                held_ms = 0 if self._opened_ms is None else self.ticks_ms() - self._opened_ms
                if held_ms > LONGEST_REQUESTED_S * 1000:
                    self._rival.reset()
                self._requested_wait_s = max(self._requested_wait_s, self._rival.next_s())
            case _:
                self.log.info("relay lost", code=code)
                return
        self.log.error("relay closed the session", code=code, what=self.state.value)


def _for(channel: Channel, answer: CmdAck) -> CmdAck:
    """Return ``answer`` as the relay of ``channel`` knows it: one of before 1.2 refuses the mark."""
    if answer["ok"] or channel.speaks(SUBPROTOCOL_1_2):
        return answer
    return {"ok": False, "error": answer["error"]}
