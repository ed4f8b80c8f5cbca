"""A node's WebSocket: the library's protocol without I/O, with limits on what a peer makes this process do.

Bytes wait until ``receive`` is called, and are parsed frame by frame, each after its ``FrameMeter`` has
allowed it: nothing is parsed before the connection is accepted. While ``receive`` waits, a handler is offered
each text as it arrives, or soon after if it lets a text wait. Must not read payloads.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Hashable, Sequence
from http import HTTPStatus
from urllib.parse import unquote

from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode, apply_mask  # type: ignore[attr-defined]  # from one of two places
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol

from relay.http.connections import AcceptedConnection
from relay.http.turns import LARGE_BYTES, MOST_HELD, Turns
from schemas.error_roots import PeerError
from schemas.frames import MAX_FRAME_BYTES
from schemas.pacing import TokenBucket
from schemas.websocket_frames import FrameBudget, FrameHead, FrameSlicer, cost_of, text_frame_head

TextHandler = Callable[[str], object]
"""Called with each text while ``receive`` waits. What it returns is received, unless that is None."""
MayWait = Callable[[bytes], bool]
"""Called with the first ``BEGINNING_BYTES`` of a text. Returns whether it may be handled up to ``DEFERRED_S``
after it has arrived, together with those of other connections. What arrives behind it ends the wait."""
BEGINNING_BYTES = 24

FRAMES_BEFORE_ADMISSION = 8.0
FRAMES_PER_S = 20.0
FRAMES_AT_ONCE = 120.0
_BYTES_LIKE_A_FRAME = 4096
CREDIT_OF_A_COMMAND = 16.0
_LARGEST_ANSWER = MAX_FRAME_BYTES / _BYTES_LIKE_A_FRAME
"""Paid for by each command: what is called again and again, and answers so, must not fall behind."""
_MOST_CREDIT = 1024.0

MAX_BYTES_BEFORE_ADMISSION = 32 * 1024
MAX_FRAGMENTS = 64
MAX_BEHIND_S = 10.0
"""How long a node may exceed its rate. After that its pongs would be too late as well."""

FLOODED = 1008
"""The code of a connection that this module ends, for too many frames or bytes. It is never sent."""
BROKEN_BY_PEER = (1002, 1007)
"""The codes by which this module closes what breaks RFC 6455, and a text that is no UTF-8."""
TOO_LARGE = 1009
"""The code by which it closes one with a message of more bytes than are taken."""
GONE = 1006
"""The code of one that its peer has closed or lost (RFC 6455 section 7.1.5). It is never sent either."""

_TEXTS_AT_ONCE = 64
"""How many texts are handled before the event loop serves other connections."""
_CLOSE_TIMEOUT_S = 10.0
"""How long the peer has to answer a close."""

_PING = b"\x89\x00"
_PONG_HEAD, _PONG_BYTES = b"\x8a\x80", 6
"""A masked pong without payload: what answers ``_PING``."""

_BAD_REQUEST = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
# RFC 6455 section 7.4.1
_INVALID_DATA, _INTERNAL, _RESTART = 1007, 1011, 1012
_MASK_BYTES = 4
_LOG = logging.getLogger("uvicorn.error")  # what the server logs, and counts as a fault


class SocketClosedError(PeerError):
    """The connection is closed. ``code`` is the one by which this end has, or ``GONE``."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def unmasked(frame: bytes, head: FrameHead) -> bytes:
    """Return what is there of the payload of ``frame``, which is masked (RFC 6455 section 5.3).

    By the WebSocket library's own code, which is in C where the library was built so: in Python it takes half
    as long as to parse the text under the mask.
    """
    start = head.head_bytes
    if len(frame) <= start:
        return b""  # nor need all of the mask be there
    return apply_mask(frame[start:], frame[start - _MASK_BYTES : start])


class FrameMeter:
    """The budget of one connection: a few frames until its node is admitted, then a rate.

    It is consulted before a frame is parsed, since parsing is most of the cost of a small frame.
    ``monotonic`` is in seconds.
    """

    __slots__ = ("_budget", "_early", "_monotonic")

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._early = FRAMES_BEFORE_ADMISSION
        self._budget: FrameBudget | None = None

    @property
    def is_admitted(self) -> bool:
        return self._budget is not None

    def admit(self) -> None:
        """Apply the rate of a node from now on."""
        bucket = TokenBucket(FRAMES_PER_S, FRAMES_AT_ONCE, self._monotonic())
        self._budget = FrameBudget(bucket, bytes_like_a_frame=_BYTES_LIKE_A_FRAME, most_credit=_MOST_CREDIT)

    def expect_answer(self) -> None:
        """Add credit for what the node sends because of a command."""
        if self._budget is not None:
            self._budget.expect(CREDIT_OF_A_COMMAND, _LARGEST_ANSWER)

    def expect(self, credit: float) -> None:
        """Add credit for what the node sends because of another frame of the relay."""
        if self._budget is not None:
            self._budget.expect(credit)

    def take(self, head: FrameHead) -> float:
        """Count a frame and return 0, or count nothing and return in how many seconds it may be parsed.

        Infinity if the connection is to be aborted: more than a few frames came before authentication, or
        a node exceeds its rate with control frames, which carry no data worth a delay.
        """
        if self._budget is not None:
            wait_s = self._budget.take(head, self._monotonic())
            return math.inf if wait_s > 0 and head.is_control else wait_s
        cost = cost_of(head, _BYTES_LIKE_A_FRAME)
        if cost > self._early:
            return math.inf
        self._early -= cost
        return 0.0


class BoundedWebSocket(asyncio.Protocol):
    """A WebSocket with limits before authentication, and with timeouts also for a peer that does not read.

    ``serve`` has it from the upgrade on, and accepts or rejects it. Sending and receiving raise
    ``SocketClosedError`` once either end has closed.

    Attributes:
        headers: those of the request, with lower-case names; none once it is accepted.
        subprotocols: what the peer offers.
        meter: how many frames the peer may send.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - what comes in from outside
        self,
        serve: "ServeSocket",
        transport: asyncio.Transport,
        address: str,
        connection: AcceptedConnection,
        turns: Turns,
        state: ServerState,
    ) -> None:
        self.transport = transport
        self.address = address
        self.path = ""
        self.headers: Sequence[tuple[bytes, bytes]] = ()
        self.subprotocols: Sequence[str] = ()
        self._serve = serve
        self._connection = connection
        self._state = state
        self._turn_end, self._deferral, self._keepalive = turns
        self._loop = asyncio.get_running_loop()
        self._protocol = ServerProtocol(max_size=MAX_FRAME_BYTES, logger=_LOG)
        self._response: Response | None = None  # to the upgrade, until it is accepted
        self._closed: int | None = None
        self._close_timer: asyncio.TimerHandle | None = None

        self.meter = FrameMeter(self._loop.time)
        self._early_bytes = 0
        self._behind_since: float | None = None
        self._slicer = FrameSlicer()
        self._fragments: list[bytes] = []
        self._is_text = self._wanted = self._deferred = self._read_paused = False
        self._later: asyncio.TimerHandle | None = None
        self._handler: TextHandler = _as_it_is
        self._may_wait: MayWait | None = None
        # Never more than one: nothing is parsed while one waits.
        self._message: object = None
        self._reader: asyncio.Future[None] | None = None

        # The frames that are sent at the end of the turn; None if there are none.
        self._held: list[bytes] | None = None
        # There is one while the transport takes no data, which is seldom; an event takes most of a kibibyte.
        self._drained: asyncio.Future[None] | None = None

    # --- the beginning and the end

    def begin(self, target: bytes, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Answer a request to upgrade that is malformed, and have any other served."""
        self._state.connections.add(self)  # type: ignore[arg-type]  # has what the server uses of one
        lines = [b"GET ", target, b" HTTP/1.1\r\n", *(b"%b: %b\r\n" % line for line in headers), b"\r\n"]
        request = b"".join(lines)
        self._early_bytes = len(request)
        if self._early_bytes > MAX_BYTES_BEFORE_ADMISSION:
            self._abort()
            return
        self._protocol.receive_data(request)
        events = self._protocol.events_received()
        if not events or not isinstance(events[0], Request):
            # The HTTP parser accepts it, and the library rejects it.
            self.transport.write(_BAD_REQUEST)
            self.transport.close()
            return
        response = self._protocol.accept(events[0])
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refuse(response)
            return
        self._response = response
        self.path, self.headers = unquote(events[0].path.partition("?")[0]), headers
        offered = events[0].headers.get_all("Sec-WebSocket-Protocol")
        self.subprotocols = [name.strip() for value in offered for name in value.split(",")]
        task = self._loop.create_task(self._run())
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except SocketClosedError:
            pass  # the peer was faster
        except Exception:  # noqa: BLE001 - a bug ends this connection alone
            _LOG.exception("a WebSocket was not served")
        if self._protocol.state is State.CONNECTING and self._closed is None:
            self.reject(HTTPStatus.INTERNAL_SERVER_ERROR)
        if self._close_timer is None:
            self.transport.close()

    def accept(self, subprotocol: str) -> None:
        """Accept it, and have it pinged in turn with the others."""
        response, self._response = self._response, None
        if response is not None and not self.transport.is_closing():
            response.headers["Sec-WebSocket-Protocol"] = subprotocol
            self._protocol.send_response(response)
            self._write_output()
            self._keepalive.watch(self)
            self.headers = ()

    def reject(self, status: HTTPStatus = HTTPStatus.FORBIDDEN) -> None:
        self._refuse(self._protocol.reject(status, ""))

    def _refuse(self, response: Response) -> None:
        self._end(GONE)
        if not self.transport.is_closing():
            self._protocol.send_response(response)
            self._write_output()
            self.transport.close()

    def admit(self, holder: Hashable) -> bool:
        """Count the connection towards ``holder`` from now on; return False if its limit is reached."""
        return self._connection.admit(holder)

    async def close(self, code: int) -> None:
        """Send a close with ``code`` once the peer has taken what was sent before, and wait for its own."""
        while self._is_open and self._drained is not None:
            await self._writable()
        if not self._is_open:
            raise SocketClosedError(GONE)
        if not self.transport.is_closing():
            self.send_held()
            self._protocol.send_close(code)
            self._write_output()
            self._end(code)
            self._close_timer = self._loop.call_later(_CLOSE_TIMEOUT_S, self.transport.close)
            self._read(on=True)
            self._parse()  # what is buffered may hold the peer's close

    def shutdown(self) -> None:
        """Close with 1012, unless this connection is closing: nothing may be sent then."""
        if self._protocol.state is State.CONNECTING:
            self.reject(HTTPStatus.INTERNAL_SERVER_ERROR)
        elif not self.transport.is_closing():
            self._keepalive.forget(self)
            self.send_held()
            self._fail(_RESTART)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - as asyncio has it
        for timer in (self._later, self._close_timer):
            if timer is not None:
                timer.cancel()
        self._deferral.remove(self)
        self._keepalive.forget(self)
        # What refers to this connection, or to itself, would wait for a garbage collection.
        self._handler, self._may_wait = _as_it_is, None
        self._protocol.parser.close()
        self._connection.end()
        self._end(GONE)
        self._state.connections.discard(self)
        self.resume_writing()

    @property
    def _is_open(self) -> bool:
        return self._closed is None and self._protocol.state is State.OPEN

    def _end(self, code: int) -> None:
        """Have what is sent or received from now on fail: with the first ``code`` that is given."""
        if self._closed is None:
            self._closed = code
            self._wake()

    def _fail(self, code: int, reason: str = "") -> None:
        """Close with ``code``, unless a close was sent, and do not wait for the peer's."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(code, reason)
        self._write_output()
        self._end(code)
        self.transport.close()

    def _abort(self) -> None:
        self._end(FLOODED)
        self.transport.abort()

    # --- what is sent

    async def send(self, text: str) -> None:
        """Send ``text``, once the peer has taken what was sent before."""
        while not self.send_now(text):
            if not self._is_open:
                raise SocketClosedError(GONE)
            await self._writable()

    def send_now(self, text: str, *, is_whole: bool = False) -> bool:
        """Send ``text`` in this turn; return False, without effect, if it has to wait, or must fail.

        ``is_whole``: this turn sends the peer nothing else, as ``TurnEnd.add`` has it.
        """
        if not self.can_send_now:
            return False
        payload = text.encode()
        frame = text_frame_head(len(payload)) + payload
        held = self._held
        if held is not None:
            held.append(frame)
        else:
            held = self._held = [frame]
            self._turn_end.add(self, is_whole=is_whole)
        if len(frame) > LARGE_BYTES or len(held) > MOST_HELD:
            self.send_held()
        return True

    @property
    def can_send_now(self) -> bool:
        """Whether ``send_now`` has an effect: it is open, and what was sent before is taken."""
        return self._drained is None and self._is_open

    def send_held(self) -> None:
        """Send what is held: before anything else is written, which it must not follow."""
        held, self._held = self._held, None
        if held is not None and not self.transport.is_closing():
            self.transport.write(b"".join(held))

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self._loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None:
            drained.set_result(None)

    async def _writable(self) -> None:
        while self._drained is not None:
            # Shield: a writer that is cancelled must not wake the others.
            await asyncio.shield(self._drained)

    def _write_output(self) -> None:
        self.transport.write(b"".join(self._protocol.data_to_send()))

    # --- pings

    def ping(self) -> bool:
        if self._protocol.state is not State.OPEN or self.transport.is_closing():
            return False
        self.transport.write(_PING)
        return True

    def keepalive_timeout(self) -> None:
        """Abort: closing would wait until the peer has read everything, and it does not read."""
        if self._protocol.state is State.OPEN and not self.transport.is_closing():
            self._fail(_INTERNAL, "keepalive ping timeout")
        self.transport.abort()

    def _answers_ping(self, data: bytes) -> bool:
        """Take ``data``, where a frame begins, if it is the pong that is waited for, and no more.

        Thousands of idle nodes send little else. This end has requested it, so the meter need not count it.
        """
        return len(data) == _PONG_BYTES and data.startswith(_PONG_HEAD) and self._keepalive.answered(self)

    # --- what is received

    def handle_texts(self, handler: TextHandler, may_wait: MayWait | None = None) -> None:
        """Offer each text to ``handler`` from now on, and some of them later."""
        self._handler, self._may_wait = handler, may_wait

    async def receive(self) -> object:
        """Return the next message: what the handler of texts returned, or the bytes of a binary one."""
        self._wanted = True
        try:
            self._parse()
            while self._message is None:
                if self._closed is not None:
                    raise SocketClosedError(self._closed)
                self._reader = self._loop.create_future()
                await self._reader
        finally:
            self._wanted, self._reader = False, None
        message, self._message = self._message, None
        return message

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def data_received(self, data: bytes) -> None:
        """Buffer ``data``, before authentication up to a limit, and parse what ``receive`` waits for."""
        if not self.meter.is_admitted:
            self._early_bytes += len(data)
            if self._early_bytes > MAX_BYTES_BEFORE_ADMISSION:
                self._abort()
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
        if self._may_wait is None or (head := self._slicer.head()) is None or not head.is_text:
            return False
        return self._may_wait(unmasked(self._slicer.beginning(head, BEGINNING_BYTES), head))

    def resume(self) -> None:
        self._deferred = False
        self._parse()

    def _parse(self) -> None:
        """Parse what may be parsed now, and resume reading unless data is buffered here."""
        if self._later is not None or self._deferred:
            return
        exhausted, texts = self._slicer.is_empty, 0
        while not self.transport.is_closing() and (self._is_closing or self._is_awaited):
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
                self._parse_by_library(piece)
                continue
            self._handle_text(text)
            texts += 1
            if texts == _TEXTS_AT_ONCE and not exhausted:
                self._later = self._loop.call_later(0, self._parse_later)
                break
        self._read(on=exhausted)

    @property
    def _is_awaited(self) -> bool:
        return self._wanted and self._message is None and self._closed is None

    @property
    def _is_closing(self) -> bool:
        """Whether a close was sent: nothing matters then but the peer's."""
        return self._protocol.state is State.CLOSING

    def _text_of(self, frame: bytes, head: FrameHead) -> str | None:
        """Return the text of ``frame``; None if the WebSocket library has to parse it, or to reject it."""
        if (
            len(frame) != head.head_bytes + head.payload_bytes
            or head.payload_bytes > MAX_FRAME_BYTES
            or self._fragments  # of a message whose end is still to come
            or self._protocol.state is not State.OPEN
        ):
            return None
        try:
            return unmasked(frame, head).decode()
        except UnicodeDecodeError:
            return None

    def _parse_by_library(self, piece: bytes) -> None:
        self._protocol.receive_data(piece)
        events = self._protocol.events_received()
        self._write_output()  # what answers them
        if self._protocol.parser_exc is not None and self._protocol.close_sent is not None:
            self._fail(self._protocol.close_sent.code)
            return
        for frame in events:
            match frame:
                case Frame(opcode=Opcode.PONG):
                    self._keepalive.answered(self)  # sent behind or within other data
                case Frame(opcode=Opcode.CLOSE):
                    self._receive_close()
                case Frame(opcode=Opcode.TEXT | Opcode.BINARY | Opcode.CONT, data=data):
                    self._receive_data(frame, bytes(data))

    def _receive_close(self) -> None:
        self._end(GONE)  # whatever code it gives is the peer's word
        self.transport.close()  # the library has answered it, or it answers ours

    def _receive_data(self, frame: Frame, data: bytes) -> None:
        if frame.opcode is not Opcode.CONT:
            self._is_text = frame.opcode is Opcode.TEXT
        self._fragments.append(data)
        if not frame.fin:
            if len(self._fragments) > MAX_FRAGMENTS:
                self._abort()
            return
        message, self._fragments = b"".join(self._fragments), []
        if self._is_closing:
            return
        if not self._is_text:
            self._receive(message)
            return
        try:
            text = message.decode()
        except UnicodeDecodeError:
            self._fail(_INVALID_DATA)
        else:
            self._handle_text(text)

    def _handle_text(self, text: str) -> None:
        if (handled := self._handler(text)) is not None:
            self._receive(handled)

    def _receive(self, message: object) -> None:
        self._message = message
        self._wake()

    def _allowed(self, head: FrameHead) -> bool:
        """Enter the next frame if the meter allows it; else schedule it, or abort."""
        if (wait_s := self.meter.take(head)) == 0:
            self._slicer.enter(head)
            return True
        now = self._loop.time()
        if self._behind_since is None:
            self._behind_since = now
        # After our own close no frame is worth a delay.
        if self._is_closing or now + wait_s - self._behind_since > MAX_BEHIND_S:
            self._abort()
        else:
            self._later = self._loop.call_later(wait_s, self._parse_later)
        return False

    def _parse_later(self) -> None:
        self._later = None
        self._parse()

    def _read(self, *, on: bool) -> None:
        """Resume or pause reading: unread data fills the sender's buffers."""
        if on is not self._read_paused or self.transport.is_closing():
            return
        self._read_paused = not on
        change = self.transport.resume_reading if on else self.transport.pause_reading
        change()


ServeSocket = Callable[[BoundedWebSocket], Awaitable[None]]
"""Serves a WebSocket from its upgrade to its end. It must accept or reject it."""


def _as_it_is(text: str) -> str:
    return text
