"""The node's one outbound connection to the relay: connects, proves who it is, and moves frames.

What may be said when is the session machine's; what a command does is the dispatcher's. Must never answer
a challenge that names another audience than the one this node has pinned: a rogue relay could forward it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from structlog.typing import FilteringBoundLogger
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from kubelet.announcer import Announcer
from kubelet.backoff import Backoff
from kubelet.channel import Channel
from kubelet.dispatch import Dispatcher
from kubelet.signer import SignedManifest
from schemas.addresses import connect_url
from schemas.delivery import TransitGauge
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, Frame, FrameReader
from schemas.identity_files import NodeIdentity
from schemas.session import CloseCode, ProtocolError, Role, Session
from schemas.strict_json import loads
from schemas.text import printable
from schemas.tokens import sign_token
from schemas.ulids import UlidSource

_HANDSHAKE_TIMEOUT_S = 10.0
_CLOSE_TIMEOUT_S = 2
_PING_INTERVAL_S = 15
_PING_TIMEOUT_S = 10
_TOKEN_LIFE_S = 60
_SUPERSEDED_WAIT_S = 300.0


class LinkState(Enum):
    """What an operator sees of the connection."""

    CONNECTING = "connecting"
    OPEN = "open"
    ANNOUNCED = "announced"
    WRONG_AUDIENCE = "the relay has another name than the one pinned: check --relay"
    REFUSED = "the relay does not accept this node's identity: install a certificate"
    REVOKED = "revoked: an operator must enrol this node again"
    SUPERSEDED = "another machine uses this identity"


def _ticks_ms() -> int:
    return time.monotonic_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class LinkParts:
    """What a link works with.

    Attributes:
        ticks_ms: milliseconds that only ever go forward. They tell how long a command was on its way: the
            clock of a board without a battery leaps when it is set, and every command would look late.
    """

    identity: NodeIdentity
    relay_url: str
    reader: FrameReader
    announcer: Announcer
    dispatcher: Dispatcher
    ulids: UlidSource
    backoff: Backoff
    log: FilteringBoundLogger
    ticks_ms: Callable[[], int] = _ticks_ms
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    handshake_timeout_s: float = _HANDSHAKE_TIMEOUT_S


class _AudienceError(Exception):
    """The relay named an audience that this node has not pinned."""


class RelayLink:
    """The connection of one node, kept up until cancelled.

    Attributes:
        state: for readiness.
    """

    def __init__(self, parts: LinkParts) -> None:
        self._parts = parts
        self._boot_id = parts.ulids.new()
        self._session_id: str | None = None
        self._channel: Channel | None = None
        self._gauge = TransitGauge()
        self._asked_wait_s = 0.0
        self.state = LinkState.CONNECTING

    async def run(self) -> None:
        """Hold a session, and come back whenever it is lost; ends only when the node was revoked."""
        log = self._parts.log
        while self.state is not LinkState.REVOKED:
            self._asked_wait_s = 0.0
            try:
                await self._connect()
            except ConnectionClosed as error:
                self._closed(error)
            except _AudienceError:
                self.state = LinkState.WRONG_AUDIENCE
                log.warning("relay names another audience", pinned=self._parts.relay_url)
            except ProtocolError as error:
                self.state = LinkState.CONNECTING
                log.warning("relay broke the protocol", reason=printable(error.reason))
            except (OSError, WebSocketException) as error:
                self.state = LinkState.CONNECTING
                log.info("relay not reached", relay=self._parts.relay_url, reason=printable(str(error)))
            finally:
                self._channel = None
            if self.state is not LinkState.REVOKED:
                await self._parts.sleep(self._parts.backoff.next_s(self._asked_wait_s))

    async def carry(self, manifest: SignedManifest) -> bool:
        """Send ``manifest``, and the heartbeat that goes with it, if a session is open."""
        channel = self._channel
        if channel is None or not channel.is_open:
            return False
        beat = {
            "manifest_etag": manifest.etag,
            "expires_at_ms": manifest.expires_at_ms,
            "inflight": self._parts.dispatcher.inflight,
        }
        document = loads(manifest.wire, max_bytes=len(manifest.wire))
        return await channel.send("announce", document) and await channel.send("heartbeat", beat)

    async def _connect(self) -> None:
        async with connect(
            connect_url(self._parts.relay_url),
            subprotocols=[SUBPROTOCOL],  # type: ignore[list-item]  # a NewType over str
            compression=None,
            max_size=MAX_FRAME_BYTES,
            close_timeout=_CLOSE_TIMEOUT_S,
            open_timeout=self._parts.handshake_timeout_s,
            ping_interval=_PING_INTERVAL_S,
            ping_timeout=_PING_TIMEOUT_S,
            user_agent_header=None,
        ) as socket:
            channel = Channel(socket, Session(Role.NODE, self._parts.reader), self._parts.ulids)
            try:
                async with asyncio.timeout(self._parts.handshake_timeout_s):
                    await self._authenticate(channel)
                self._channel = channel
                await self._serve(channel)
            except ProtocolError as error:
                await channel.close(error.code)
                raise
            except _AudienceError:
                await channel.close(CloseCode.NORMAL)
                raise

    async def _authenticate(self, channel: Channel) -> None:
        challenge = await self._receive(channel)
        await channel.send("auth", self._auth(challenge), challenge.msg_id)
        payload = (await self._receive(channel)).payload
        self._session_id = payload["session_id"]
        if not payload["resumed"]:
            self._gauge = TransitGauge()
        self._gauge.delay_ms(payload["server_time_ms"], self._parts.ticks_ms())
        self._parts.announcer.shorten_interval(payload["heartbeat_interval_ms"] / 1000)
        self.state = LinkState.OPEN
        self._parts.log.info("relay connected", relay=self._parts.relay_url, resumed=payload["resumed"])

    def _auth(self, challenge: Frame) -> dict[str, Any]:
        parts = self._parts
        if challenge.payload["audience"] != parts.relay_url:
            raise _AudienceError
        # Counted from the relay's clock: a node's own may be off by more than a token lives.
        issued_s = challenge.payload["server_time_ms"] // 1000
        node_id = parts.identity.node_id
        claims = {
            "iss": node_id,
            "sub": node_id,
            "aud": parts.relay_url,
            "nonce": challenge.payload["nonce"],
            "iat": issued_s,
            "exp": issued_s + _TOKEN_LIFE_S,
            "jti": parts.ulids.new(),
            "scope": "device:connect",
            "token_class": "device_runtime",
        }
        payload: dict[str, Any] = {
            "node_id": node_id,
            "certificate": parts.identity.chain_pem,
            "token": sign_token(parts.identity.key, parts.identity.kid, claims),
            "boot_id": self._boot_id,
        }
        if self._session_id is not None:
            payload["resume"] = self._session_id
        return payload

    async def _serve(self, channel: Channel) -> None:
        try:
            await self._parts.announcer.carry(self.carry)
            while True:
                frame = await channel.receive()
                if frame is not None:
                    await self._handle(channel, frame)
        except asyncio.CancelledError:
            if channel.is_open:
                await channel.send("bye", {"reason": "shutting_down"})
                await channel.close(CloseCode.NORMAL)
            raise

    async def _receive(self, channel: Channel) -> Frame:
        frame = await channel.receive()
        if frame is None:
            raise ProtocolError("an unexpected frame in the handshake")
        if frame.type == "bye":
            await self._until_closed(channel, frame)
        return frame

    async def _until_closed(self, channel: Channel, bye: Frame) -> NoReturn:
        """Wait for the close that follows ``bye``: only its code says what to do next."""
        self._asked_wait_s = bye.payload.get("retry_after_ms", 0) / 1000
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await channel.receive()
        raise ProtocolError("a frame after bye")

    async def _handle(self, channel: Channel, frame: Frame) -> None:
        payload = frame.payload
        match frame.type:
            case "cmd":
                delay = self._gauge.delay_ms(payload["sent_at_ms"], self._parts.ticks_ms())
                await self._parts.dispatcher.submit(frame, payload["deadline_ms"] - delay, self._answer)
            case "cmd_cancel":
                self._parts.dispatcher.cancel(frame.in_reply_to or "")
            case "heartbeat_ack":
                self._gauge.renew()
                self._gauge.delay_ms(payload["server_time_ms"], self._parts.ticks_ms())
            case "announce_ack":
                self._announced(frame)
            case _:  # bye
                await self._until_closed(channel, frame)

    def _announced(self, frame: Frame) -> None:
        payload = frame.payload
        if payload["ok"]:
            # Not before: a relay that takes the node in and throws it out again must not be hammered.
            self._parts.backoff.reset()
            self.state = LinkState.ANNOUNCED
            return
        self.state = LinkState.OPEN
        self._parts.log.error("relay rejects the manifest", code=payload["error"]["code"])
        self._parts.announcer.overtake(payload.get("mark_issued_at_ms", 0))

    async def _answer(self, msg_id: str, payload: Mapping[str, Any]) -> None:
        if self._channel is not None and self._channel.is_open:
            await self._channel.send("cmd_ack", payload, msg_id)

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
                self._asked_wait_s = max(self._asked_wait_s, _SUPERSEDED_WAIT_S)
            case _:
                self._parts.log.info("relay lost", code=code)
                return
        self._parts.log.error("relay closed the session", code=code, what=self.state.value)
