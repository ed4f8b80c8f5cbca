"""One connection to the relay: its socket, and the state machine of its session.

Must not know what a frame means.
"""

import asyncio
import os
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from websockets.asyncio.client import ClientConnection, connect
from websockets.client import ClientProtocol
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.frames import DATA_OPCODES, Opcode
from websockets.frames import Frame as WebSocketFrame
from websockets.protocol import Event, State
from websockets.uri import parse_uri

from kubelet.session.relay_addresses import RelayAddress, names_proxies
from schemas.addresses import connect_url, host_of, is_loopback, port_of
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOLS, Frame, FrameReader, OneWayType, Role, includes
from schemas.pacing import TokenBucket
from schemas.session import (
    CloseCode,
    DropReason,
    PeerProtocolError,
    ProtocolError,
    SessionMachine,
    SessionState,
)
from schemas.strict_json import StrictJsonError, loads
from schemas.ulids import UlidSource
from schemas.websocket_frames import FrameBudget, FrameHead, FrameSlicer

_BYTES_LIKE_A_FRAME = 65_536
_UNASKED = {
    type_: 1 + type_.max_bytes / _BYTES_LIKE_A_FRAME
    for type_ in OneWayType
    if type_.sender is Role.RELAY and type_ is not OneWayType.CALLER_TOOL_RESULT
}
"""What the relay sends of itself, by the rate of its type, and what one of the largest size costs."""
_FRAMES_PER_S = 20.0 + sum(type_.per_s * cost for type_, cost in _UNASKED.items())
_FRAMES_AT_ONCE = 120.0 + sum(type_.burst * cost for type_, cost in _UNASKED.items())
"""So behind a stall, too, a frame over the rate of its type is dropped, and does not end the connection."""
_FRAMES_OF_A_COMMAND = 6.0
"""A command of the largest size, and its cancellation."""
_FRAMES_OF_AN_ANSWER = 5.0
"""An answer of the largest size to a request of a local agent."""
_MOST_CREDIT = 1024 * _FRAMES_OF_AN_ANSWER

SILENCE_S = 30.0
"""How long a relay may send nothing, two of its pings, and how long it may not read what waits for it."""
_MOST_UNREAD_BYTES = 16 * 1024 * 1024

_COMMAND = b'{"type":"cmd",'
"""As a relay of ours begins one; what is spelled otherwise is received."""
_END_OF_HEAD = b"\r\n\r\n"
NOT_REACHED = (OSError, WebSocketException)
"""What ``open_channel`` raises when there is no connection, or it does not hold."""
CLOSE_TIMEOUT_S = 2
_SECONDS = re.compile("[0-9]{1,9}")


class MeteredConnection(ClientConnection):
    """A connection of a node that accepts ``commands_per_s``, and as many at once.

    It counts frames before they are parsed: no relay may exhaust a node. A relay that keeps to the limits
    that its node has announced stays below the rate here; what exceeds it ends the connection. So does
    silence: the relay pings, and a node that is not pinged has lost it. The node sends no pings of its own,
    which thousands of nodes would make the relay answer. And so does a relay that does not read.

    Attributes:
        is_flooded: whether it was closed because it exceeded the rate.
        heard_at: when the relay last sent anything, by the event loop's clock.
        take_now: handles a text as it comes and returns True, or returns False, and it waits to be received.
    """

    def __init__(
        self, protocol: ClientProtocol, *, commands_per_s: float, silence_s: float = SILENCE_S, **options: Any
    ) -> None:
        super().__init__(protocol, **options)
        commands = _FRAMES_OF_A_COMMAND * commands_per_s
        bucket = TokenBucket(_FRAMES_PER_S + commands, _FRAMES_AT_ONCE + commands, self.loop.time())
        self._budget = FrameBudget(bucket, bytes_like_a_frame=_BYTES_LIKE_A_FRAME, most_credit=_MOST_CREDIT)
        self._slicer = FrameSlicer(is_masked=False)
        self._is_within_message = False
        self._end_of_head = b""
        self._silence_s = silence_s
        self.heard_at = self.loop.time()
        self._silence_check: asyncio.TimerHandle | None = None
        self._unread_check: asyncio.TimerHandle | None = None
        self.is_flooded = False
        self.take_now: Callable[[bytes], bool] = lambda _: False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._check_silence()

    def connection_lost(self, exc: Exception | None) -> None:
        for check in (self._silence_check, self._unread_check):
            if check is not None:
                check.cancel()
        super().connection_lost(exc)
        if (error := self.protocol.parser_exc) is not None:
            error.__traceback__ = None  # its frames refer to this connection

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_check = self.loop.call_later(self._silence_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread_check is not None:
            self._unread_check.cancel()

    def is_unread(self) -> bool:
        """Return whether more waits to be read than a relay that reads lets wait; the connection is over."""
        is_unread = self.transport.get_write_buffer_size() > _MOST_UNREAD_BYTES
        if is_unread:
            self.transport.abort()
        return is_unread

    def _check_silence(self) -> None:
        """Abort if nothing came for too long; else check again when that could be."""
        # One timer, which a message does not move: it finds out when it fires.
        left_s = self.heard_at + self._silence_s - self.loop.time()
        if left_s > 0:
            self._silence_check = self.loop.call_later(left_s, self._check_silence)
        else:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Parse what came frame by frame, as far as the rate goes."""
        self.heard_at = self.loop.time()
        if self.protocol.state is State.CONNECTING:
            data = self._after_response(data)
        self._slicer.feed(data)
        while not self.is_flooded:
            head = None if self._slicer.is_within else self._slicer.head()
            if head is not None and not self._enter(head):
                return
            if not (piece := self._slicer.take()):
                return
            if head is not None and self._is_whole_text(piece, head):
                self._take_text(piece[head.head_bytes :])
            else:
                super().data_received(piece)

    def _after_response(self, data: bytes) -> bytes:
        """Parse the response to the upgrade, and return what comes after it."""
        seen = self._end_of_head + data
        end = seen.find(_END_OF_HEAD)
        rest = seen[end + len(_END_OF_HEAD) :] if end >= 0 else b""
        self._end_of_head = seen[-len(_END_OF_HEAD) + 1 :]
        super().data_received(data[: len(data) - len(rest)])
        if rest and self.protocol.state is State.CONNECTING:
            super().data_received(rest)  # the body of a refusal
            return b""
        return rest

    def _take_text(self, text: bytes) -> None:
        """Have ``take_now`` handle ``text`` if it is waited for, or let it wait to be received."""
        messages = self.recv_messages
        is_awaited = messages.get_in_progress and not messages.frames
        if not (is_awaited and self.take_now(text)):
            messages.put(WebSocketFrame(Opcode.TEXT, text))

    def process_event(self, event: Event) -> None:
        """Take what the library has parsed."""
        if isinstance(event, WebSocketFrame) and event.opcode in DATA_OPCODES:
            self._is_within_message = not event.fin
        super().process_event(event)

    def _enter(self, head: FrameHead) -> bool:
        """Let the next frame be taken; abort and return False if it exceeds the rate."""
        if self._budget.take(head, self.loop.time()) > 0:
            self.is_flooded = True
            self.transport.abort()
            return False
        self._slicer.enter(head)
        return True

    def _is_whole_text(self, piece: bytes, head: FrameHead) -> bool:
        """Return whether ``piece`` is one, which the library, whose parser is slow, need not see."""
        return (
            head.is_text
            and len(piece) == head.head_bytes + head.payload_bytes
            and head.payload_bytes <= MAX_FRAME_BYTES
            and not self._is_within_message
            and self.protocol.state is State.OPEN
        )

    def expect_answer(self) -> None:
        """Accept one frame more, beyond the rate: this node has requested it."""
        self._budget.expect(_FRAMES_OF_AN_ANSWER)

    def expect_answers_again(self) -> None:
        """Accept also, beyond the rate, what this node has requested on the connection before."""
        self._budget.expect(_MOST_CREDIT)


def retry_after_s(error: Exception) -> float:
    """Return how long the relay that refused the connection asks to be left alone; 0 if it does not.

    A date, which needs equal clocks, is ignored, and so are several answers to it.
    """
    if not isinstance(error, InvalidStatus):
        return 0.0
    asked = error.response.headers.get_all("Retry-After")
    return float(asked[0]) if len(asked) == 1 and _SECONDS.fullmatch(asked[0]) else 0.0


def close_code(error: Exception) -> int | None:
    """Return the code that the relay has closed with; None if that is not what ``error`` is of."""
    return error.rcvd.code if isinstance(error, ConnectionClosed) and error.rcvd is not None else None


class _Connect(connect):
    """Connects, and follows no redirect: it would lead the node to where its operator has not sent it."""

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc


@asynccontextmanager
async def open_channel(  # noqa: PLR0913, PLR0917 - what comes in from outside
    public_url: str,
    address: RelayAddress,
    tls: ssl.SSLContext | None,
    reader: FrameReader,
    ulids: UlidSource,
    open_timeout_s: float,
    *,
    commands_per_s: float = 0.0,
) -> AsyncIterator["Channel"]:
    """Connect to the relay at ``address``, for the length of the block; it may send ``commands_per_s``.

    Wherever it listens, it is a relay of the fleet ``public_url``: this is the name in the request, and the
    one that its certificate must be for.

    Raises:
        NOT_REACHED: it is not reached, or does not speak the protocol.
    """

    def metered(protocol: ClientProtocol, **options: Any) -> MeteredConnection:
        protocol.uri = parse_uri(connect_url(public_url))
        return MeteredConnection(protocol, commands_per_s=commands_per_s, **options)

    target: dict[str, Any] = {}
    if address.host is not None:
        target |= {"host": address.host, "port": port_of(address.url)}
    if tls is not None:
        target["server_hostname"] = host_of(public_url)
    is_direct = address.host is not None or is_loopback(host_of(address.url)) or not names_proxies(os.environ)
    connecting = _Connect(
        connect_url(address.url),
        subprotocols=SUBPROTOCOLS,  # type: ignore[arg-type]  # a NewType over str
        ssl=tls,
        compression=None,
        max_size=MAX_FRAME_BYTES,
        close_timeout=CLOSE_TIMEOUT_S,
        open_timeout=open_timeout_s,
        ping_interval=None,
        user_agent_header=None,
        # The library reads the environment; no proxy reaches this machine's own loopback.
        proxy=None if is_direct else True,
        create_connection=metered,  # type: ignore[arg-type]  # a type is declared, and it is only called
        **target,
    )
    async with AsyncExitStack() as opened:
        try:
            socket = cast("MeteredConnection", await opened.enter_async_context(connecting))
        except (ImportError, ValueError):
            if is_direct:
                raise
            # What the library raises of a proxy that it cannot use; it may have a password.
            text = "https_proxy or all_proxy names no HTTP proxy that can be used: http://HOST:PORT"
            raise OSError(text) from None
        yield Channel(socket, SessionMachine(Role.NODE, reader, time.monotonic), ulids)


class Channel:
    """Frames in and out of ``socket``."""

    def __init__(self, socket: MeteredConnection, session: SessionMachine, ulids: UlidSource) -> None:
        self._socket = socket
        self._session = session
        self._ulids = ulids

    @property
    def is_open(self) -> bool:
        """Whether the handshake is done and neither end has closed."""
        return self._session.state is SessionState.OPEN

    def speaks(self, version: str) -> bool:
        """Return whether the relay speaks the subprotocol ``version``, or a newer one that both know."""
        return includes(self._socket.subprotocol, version)

    async def send(
        self, type_: str, payload: Mapping[str, Any] | bytes, in_reply_to: str | None = None
    ) -> bool:
        """Send a frame, with a ``payload`` of bytes as it is; return whether the connection could take it.

        Raises:
            ProtocolError: this end may not send it now, it is larger than a frame may be, or no JSON that
                the relay accepts.
        """
        if self._session.state is SessionState.CLOSED:
            return False
        return await self.send_text(self._text(type_, payload, in_reply_to))

    def encoded(self, type_: str, payload: Mapping[str, Any]) -> str:
        """Return the text of a frame for ``send_text``, with a fresh ``msg_id``.

        Raises:
            ProtocolError, OverRateError: as ``SessionMachine.send``.
        """
        text = self._text(type_, payload)
        if type_ == OneWayType.CALLER_TOOL:
            self._socket.expect_answer()
        return text

    def _text(self, type_: str, payload: Mapping[str, Any] | bytes, in_reply_to: str | None = None) -> str:
        text = self._session.send(type_, self._ulids.new(), payload, in_reply_to)
        if isinstance(payload, bytes):
            return text
        try:
            # A handler can return what is JSON and is not accepted: the relay would end the session for it.
            loads(text, max_bytes=MAX_FRAME_BYTES)
        except StrictJsonError as error:
            raise ProtocolError(error.reason) from None
        return text

    async def send_text(self, text: str) -> bool:
        """Send a frame that is encoded; return whether the connection could take it."""
        return not self._socket.is_unread() and await self._write([text])

    async def send_together(self, frames: Sequence[tuple[str, Mapping[str, Any] | bytes]]) -> bool:
        """Send frames, each a type and a payload as ``send`` has them, in one write; return as ``send`` does.

        Each write wakes the relay, which costs it as much as a small frame.

        Raises:
            ProtocolError: as ``send``. Nothing was sent then.
        """
        if self._session.state is SessionState.CLOSED:
            return False
        return await self._write([self._text(type_, payload) for type_, payload in frames])

    async def _write(self, texts: Sequence[str]) -> bool:
        # The library's ``send`` prepares for more than this, at half of what a small frame costs.
        socket = self._socket
        if socket.protocol.state is not State.OPEN:
            return False
        for text in texts:
            socket.protocol.send_text(text.encode())
        socket.transport.write(b"".join(socket.protocol.data_to_send()))
        try:
            await socket.drain()
        except OSError:
            return False
        return True

    def take_commands(self, begin: Callable[[Frame], bool]) -> None:
        """Offer each command to ``begin`` while ``receive`` waits, which returns what that does not begin.

        To wake what receives takes longer than to parse a command.
        """
        session = self._session  # not the channel: the socket would be in a cycle, and wait for a collection

        def take_now(text: bytes) -> bool:
            if not text.startswith(_COMMAND):
                return False
            try:
                frame = session.receive(text)
            except PeerProtocolError:
                return False  # ``receive`` raises it
            return frame is not None and begin(frame)

        self._socket.take_now = take_now

    async def receive(self) -> Frame | None:
        """Return the next frame; None for one that was dropped.

        Raises:
            PeerProtocolError: the relay broke the protocol.
            ConnectionClosed: the connection is over.
        """
        try:
            text = await self._socket.recv(decode=False)
        except ConnectionClosed:
            if self._socket.is_flooded:
                raise PeerProtocolError("more frames than this node accepts") from None
            raise
        return self._session.receive(text)

    def expect_answers_again(self) -> None:
        """Accept what the relay has answered lately once more: it resumes the session."""
        self._socket.expect_answers_again()

    def take_dropped(self) -> dict[DropReason, int]:
        """Return how many frames were dropped since the last call, by reason."""
        dropped = dict(self._session.dropped)
        self._session.dropped.clear()
        return dropped

    async def close(self, code: CloseCode) -> None:
        await self._socket.close(code)

    def abort(self) -> None:
        """End the connection without a word: the relay does not read."""
        self._socket.transport.abort()
