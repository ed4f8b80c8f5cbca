"""A node's WebSocket: uvicorn's, with limits on what a peer, authenticated or not, can make this process do.

uvicorn parses data when it arrives. Here bytes wait until the application receives a message, and are parsed
frame by frame, each after its ``FrameMeter`` has allowed it: nothing is parsed before the application has
accepted the connection. While it waits, its handler is offered each text as it arrives, or soon after if it
lets a text wait. Must not read payloads.
"""

import asyncio
import math
from collections.abc import Callable, MutableMapping
from typing import Any, Protocol

from uvicorn._types import ASGIReceiveEvent, ASGISendEvent
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import apply_mask  # type: ignore[attr-defined]  # imported there from one of two places
from websockets.protocol import State

from relay.http.connections import connection_in
from relay.http.turns import LARGE_BYTES, MOST_HELD, turns_in
from schemas.frames import MAX_FRAME_BYTES
from schemas.token_bucket import TokenBucket
from schemas.websocket_frames import FrameHead, FrameSlicer, text_frame_head

TEXTS_IN_SCOPE = "edge.texts"
"""The key of a connection's ``Texts`` in the scope of its WebSocket."""
HANDLED_IN_MESSAGE = "edge.handled"
"""The key of what a ``TextHandler`` returned, in the message that the application receives."""

TextHandler = Callable[[str], object]
"""Called with each text while the application waits for a message. Returns None if the application need not
receive it, and else what it is to receive with it."""
MayWait = Callable[[bytes], bool]
"""Called with the first ``BEGINNING_BYTES`` of a text. Returns whether it may be handled up to ``DEFERRED_S``
after it has arrived, together with those of other connections. What arrives behind it ends the wait."""
BEGINNING_BYTES = 24

METER_IN_SCOPE = "edge.frame_meter"
"""The key of a connection's meter in the scope of its WebSocket."""

FRAMES_BEFORE_ADMISSION = 8.0
FRAMES_PER_S = 20.0
FRAMES_AT_ONCE = 120.0
CREDIT_OF_A_COMMAND = 16.0
_BYTES_LIKE_A_FRAME = 4096
_MOST_CREDIT = 1024.0

MAX_BYTES_BEFORE_ADMISSION = 32 * 1024
MAX_FRAGMENTS = 64
MAX_BEHIND_S = 10.0
"""How long a node may exceed its rate. After that its pongs would be too late as well."""

FLOODED = 1008
"""The code of a disconnect by this module, for too many frames or bytes. It is never sent."""

_TEXTS_AT_ONCE = 64
"""How many texts are handled before the event loop serves other connections."""

_PING = b"\x89\x00"
_PONG_HEAD, _PONG_BYTES = b"\x8a\x80", 6
"""A masked pong without payload: what answers ``_PING``."""

_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
_INVALID_DATA = 1007  # RFC 6455 section 7.4.1
_MASK_BYTES = 4


def unmasked(frame: bytes, head: FrameHead) -> bytes:
    """Return what is there of the payload of ``frame``, which is masked (RFC 6455 section 5.3).

    By the WebSocket library's own code, which is in C where the library was built so: in Python it takes half
    as long as to parse the text under the mask.
    """
    start = head.head_bytes
    if len(frame) <= start:
        return b""  # nor need all of the mask be there
    return apply_mask(frame[start:], frame[start - _MASK_BYTES : start])


class MessageQueue:
    """The messages of one connection that wait for its application, oldest first.

    Has those of ``asyncio.Queue``'s methods that uvicorn uses. What several readers would need takes three
    kibibytes more of every connection, and as much time again for every message.
    """

    __slots__ = ("_messages", "_reader")

    def __init__(self) -> None:
        # Not a deque, which has space for 64 from the start: there is hardly ever more than one.
        self._messages: list[ASGIReceiveEvent] = []
        self._reader: asyncio.Future[None] | None = None

    def empty(self) -> bool:
        """Return whether nothing waits."""
        return not self._messages

    def put_nowait(self, item: ASGIReceiveEvent) -> None:
        """Add a message, and wake the reader."""
        self._messages.append(item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def get(self) -> ASGIReceiveEvent:
        """Return the oldest message, and wait for one if there is none."""
        while not self._messages:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        return self._messages.pop(0)


class WriteGate:
    """Whether a connection may write: open while its transport takes data.

    Has those of ``asyncio.Event``'s methods that uvicorn uses. An event holds a queue of waiters from the
    start, which takes most of a kibibyte of every connection, and hardly one ever waits.
    """

    __slots__ = ("_opened",)

    def __init__(self) -> None:
        self._opened: asyncio.Future[None] | None = None

    def is_set(self) -> bool:
        """Return whether it is open."""
        return self._opened is None

    def set(self) -> None:
        """Open it, and wake those that wait."""
        if self._opened is not None:
            self._opened.set_result(None)
            self._opened = None

    def clear(self) -> None:
        """Close it."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()

    async def wait(self) -> bool:
        """Wait until it is open."""
        while self._opened is not None:
            # Shield: a writer that is cancelled must not wake the others.
            await asyncio.shield(self._opened)
        return True


class Texts(Protocol):
    """The texts of one WebSocket past ASGI, which takes a waiting task and two dictionaries for each text."""

    @property
    def can_send_now(self) -> bool:
        """Whether ``send_now`` has an effect."""

    def send_now(self, text: str) -> bool:
        """Send ``text``; return False, without effect, if ASGI has to: it would wait, or it is closed."""

    def handle_texts(self, handler: TextHandler, may_wait: MayWait | None = None) -> None:
        """Offer each text to ``handler`` from now on, and some of them later."""


def take_texts(scope: MutableMapping[str, Any]) -> Texts | None:
    """Remove and return the texts of a connection: they refer to the scope, which must not refer to them."""
    texts: Texts | None = scope.pop(TEXTS_IN_SCOPE, None)
    return texts


class FrameMeter:
    """The budget of one connection: a few frames until its node is admitted, then a rate.

    For messages, fragments, pings and pongs alike. It is consulted before a frame is parsed, since parsing is
    most of the cost of a small frame. ``monotonic`` is in seconds.
    """

    __slots__ = ("_bucket", "_credit", "_early", "_monotonic")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._early = FRAMES_BEFORE_ADMISSION
        self._bucket: TokenBucket | None = None
        self._credit = 0.0

    @property
    def is_admitted(self) -> bool:
        """Whether the node is admitted."""
        return self._bucket is not None

    def admit(self) -> None:
        """Apply the rate of a node from now on."""
        self._bucket = TokenBucket(FRAMES_PER_S, FRAMES_AT_ONCE, self._monotonic())

    def expect_answer(self, credit: float = CREDIT_OF_A_COMMAND) -> None:
        """Add credit for what the node sends because of a frame of the relay; by default, for one command."""
        self._credit = min(_MOST_CREDIT, self._credit + credit)

    def take(self, head: FrameHead) -> float:
        """Count a frame and return 0, or count nothing and return in how many seconds it may be parsed.

        Infinity if the connection is to be aborted: more than a few frames came before authentication, or
        a node exceeds its rate with control frames, which carry no data worth a delay.
        """
        # The parser rejects a longer frame at its head.
        cost = 1.0 + min(head.payload_bytes, MAX_FRAME_BYTES) / _BYTES_LIKE_A_FRAME
        if self._bucket is None:
            if cost > self._early:
                return math.inf
            self._early -= cost
            return 0.0
        credit = 0.0 if head.is_control else min(cost, self._credit)
        if cost > credit and (wait_s := self._bucket.take(self._monotonic(), cost - credit)) > 0:
            return math.inf if head.is_control else wait_s
        self._credit -= credit
        return 0.0


class BoundedWebSocket(WebSocketsSansIOProtocol):
    """A WebSocket with limits before authentication, and with timeouts also for a peer that does not read."""

    _later: asyncio.TimerHandle | None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.queue = MessageQueue()  # type: ignore[assignment]  # all that is used of a queue
        self.writable = WriteGate()  # type: ignore[assignment]  # all that is used of an event
        self._connection = connection_in(self.app_state)
        self._turn_end, self._deferral, self._keepalive = turns_in(self.app_state)
        self._may_wait: MayWait | None = None
        self._meter = FrameMeter(self.loop.time)
        self._slicer = FrameSlicer()
        self._early_bytes = 0
        self._wanted = self._deferred = False
        self._later = None
        self._behind_since: float | None = None
        self._handler: TextHandler | None = None
        # The frames that are sent at the end of the turn; None if there are none.
        self._held: list[bytes] | None = None

    def handle_connect(self, event: Any) -> None:
        """Give the meter and the texts to the application, which knows when a node is admitted."""
        super().handle_connect(event)
        if self.response.status_code == 101:  # noqa: PLR2004 - Switching Protocols; else there is no scope
            self.scope[METER_IN_SCOPE] = self._meter  # type: ignore[literal-required]  # not one of ASGI
            self.scope[TEXTS_IN_SCOPE] = self  # type: ignore[literal-required]  # as above

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and stop parsing."""
        if self._later is not None:
            self._later.cancel()
        self._deferral.remove(self)
        self._handler = self._may_wait = None  # it refers to the application, which refers to this connection
        self._connection.end()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Close with 1012, unless this connection is closing: nothing may be sent then."""
        if not self.transport.is_closing():
            self.send_held()
            super().shutdown()

    def data_received(self, data: bytes) -> None:
        """Buffer ``data``, before authentication up to a limit, and parse what the application waits for."""
        if not self._meter.is_admitted:
            self._early_bytes += len(data)
            if self._early_bytes > MAX_BYTES_BEFORE_ADMISSION:
                self._abort()
                return
        if not self.handshake_initiated:
            self._upgrade(data)
            return
        is_first = self._slicer.is_empty and not self._slicer.is_within
        if is_first and self._answers_ping(data):
            return
        self._slicer.feed(data)
        if is_first and self._is_deferrable():
            self._deferred = True
            self._deferral.add(self)
        else:
            self._deferral.remove(self)
            self.resume()

    def _is_deferrable(self) -> bool:
        """Return whether a text begins that the application lets wait."""
        if self._may_wait is None or (head := self._slicer.head()) is None or not head.is_text:
            return False
        return self._may_wait(unmasked(self._slicer.beginning(head, BEGINNING_BYTES), head))

    def resume(self) -> None:
        """Parse what was deferred, and what has arrived since."""
        self._deferred = False
        self._parse()

    def _answers_ping(self, data: bytes) -> bool:
        """Take ``data``, where a frame begins, if it is the pong that is waited for, and no more.

        Thousands of idle nodes send little else. This end has requested it, so the meter need not count it.
        """
        return len(data) == _PONG_BYTES and data.startswith(_PONG_HEAD) and self._keepalive.answered(self)

    def _upgrade(self, request: bytes) -> None:
        super().data_received(request)
        if not self.handshake_initiated and self.conn.handshake_exc is not None:
            # httptools accepts it, websockets rejects it, and uvicorn does not check: it would never end.
            self.transport.write(_BAD_REQUEST)
            self.transport.close()

    async def receive(self) -> ASGIReceiveEvent:
        """Return the next message; parse until there is one."""
        self._wanted = True
        try:
            self._parse()
            return await self.queue.get()
        finally:
            self._wanted = False

    async def send(self, message: ASGISendEvent) -> None:
        """Send; after a close, parse the buffered data for the peer's close."""
        text = message.get("text") if message["type"] == "websocket.send" else None
        if text is not None and self.send_now(text):
            return
        self.send_held()
        await super().send(message)
        if self.close_sent:
            self._parse()

    def send_now(self, text: str) -> bool:
        """Send ``text`` in this turn, if it is open and the peer has taken what was sent before."""
        if not self.can_send_now:
            return False
        payload = text.encode()
        frame = text_frame_head(len(payload)) + payload
        if self._held is None:
            self._held = []
            self._turn_end.add(self)
        self._held.append(frame)
        if len(frame) > LARGE_BYTES or len(self._held) > MOST_HELD:
            self.send_held()
        return True

    def send_held(self) -> None:
        """Send what is held: before anything else is written, which it must not follow."""
        held, self._held = self._held, None
        if held is not None and not self.transport.is_closing():
            self.transport.write(b"".join(held))

    def handle_texts(self, handler: TextHandler, may_wait: MayWait | None = None) -> None:
        """Offer each text to ``handler`` from now on, and some of them later."""
        self._handler, self._may_wait = handler, may_wait

    @property
    def can_send_now(self) -> bool:
        """Return whether a text may be written at once: it is open, and what was sent before is taken."""
        return (
            self.handshake_complete
            and self.initial_response is None
            and self.conn.state is State.OPEN
            and self.writable.is_set()
            and not (self.close_sent or self.disconnected)
        )

    def start_keepalive(self) -> None:
        """Have this connection pinged in turn with the others: it was accepted."""
        self._keepalive.watch(self)
        # What the handshake needed takes a tenth of a connection's memory.
        del self.request, self.response
        self.scope["headers"] = []

    def stop_keepalive(self) -> None:
        """Have it pinged no more."""
        self._keepalive.forget(self)

    def ping(self) -> bool:
        """Send a ping, unless this connection is closing."""
        if self.close_sent or self.transport.is_closing():
            return False
        self.transport.write(_PING)
        return True

    def handle_pong(self, _event: Any) -> None:
        """Record the answer to a ping, which was sent behind or within other data."""
        self._keepalive.answered(self)

    def send_receive_event_to_app(self) -> None:
        """Pass a message on; close with 1007 for a text that is no UTF-8, of which uvicorn logs an error."""
        if self.curr_msg_data_type == "text" and not self.close_sent:
            try:
                b"".join(self.frames).decode()
            except UnicodeDecodeError:
                self.frames = []
                self.conn.send_close(_INVALID_DATA)
                self.handle_parser_exception()
                return
        super().send_receive_event_to_app()

    def keepalive_timeout(self) -> None:
        """Abort: closing would wait until the peer has read everything, and it does not read."""
        super().keepalive_timeout()
        self.transport.abort()

    def _parse(self) -> None:
        """Parse what may be parsed now, and resume reading unless data is buffered here."""
        if self._later is not None or self._deferred:
            return
        exhausted, texts = self._slicer.is_empty, 0
        while not self.transport.is_closing() and (self.close_sent or (self._wanted and self.queue.empty())):
            head = None if self._slicer.is_within else self._slicer.head()
            if head is not None and not self._allowed(head):
                break
            piece = self._slicer.take()
            exhausted = not piece or self._slicer.is_empty
            if not piece:
                self._behind_since = None
                break
            text = self._text_of(piece, head) if head is not None and head.is_text else None
            if text is None:
                self.send_held()  # the library may send a close, behind which there must be nothing
                super().data_received(piece)
                if len(self.frames) > MAX_FRAGMENTS:
                    self._abort()
                continue
            self._receive_text(text)
            texts += 1
            if texts == _TEXTS_AT_ONCE and not exhausted:
                self._later = self.loop.call_later(0, self._parse_later)
                break
        self._read(on=exhausted)

    def _text_of(self, frame: bytes, head: FrameHead) -> str | None:
        """Return the text of ``frame``; None if the WebSocket library has to parse it, or to reject it."""
        if (
            len(frame) != head.head_bytes + head.payload_bytes
            or head.payload_bytes > self.config.ws_max_size
            or self.frames  # of a message whose end is still to come
            or self.conn.state is not State.OPEN
        ):
            return None
        try:
            return unmasked(frame, head).decode()
        except UnicodeDecodeError:
            return None

    def _receive_text(self, text: str) -> None:
        """Have ``text`` handled, and pass it to the application if that has to receive it."""
        message: dict[str, Any] = {"type": "websocket.receive", "text": text}
        if self._handler is not None:
            handled = self._handler(text)
            if handled is None:
                return
            message[HANDLED_IN_MESSAGE] = handled
        self.queue.put_nowait(message)  # type: ignore[arg-type]  # has a member that ASGI does not know

    def _allowed(self, head: FrameHead) -> bool:
        """Enter the next frame if the meter allows it; else schedule it, or abort."""
        if (wait_s := self._meter.take(head)) == 0:
            self._slicer.enter(head)
            return True
        now = self.loop.time()
        if self._behind_since is None:
            self._behind_since = now
        # After our own close no frame is worth a delay.
        if self.close_sent or now + wait_s - self._behind_since > MAX_BEHIND_S:
            self._abort()
        else:
            self._later = self.loop.call_later(wait_s, self._parse_later)
        return False

    def _parse_later(self) -> None:
        self._later = None
        self._parse()

    def _read(self, *, on: bool) -> None:
        """Resume or pause reading: unread data fills the sender's buffers."""
        if on is not self.read_paused or self.transport.is_closing():
            return
        self.read_paused = not on
        change = self.transport.resume_reading if on else self.transport.pause_reading
        change()

    def _abort(self) -> None:
        """Abort, and signal the reason to the application."""
        self.queue.put_nowait({"type": "websocket.disconnect", "code": FLOODED})
        self.transport.abort()
