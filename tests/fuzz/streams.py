"""Targets: bytes of a connection before they are a message: HTTP, WebSocket frames, lines, events."""

import io
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Final

import httpx2
from starlette.types import Message, Receive, Scope, Send
from websockets.exceptions import ProtocolError
from websockets.frames import Frame as WebSocketFrame

from kubelet.caller_tools import json_rpc
from kubelet.caller_tools.json_rpc import LineSplitter as SocketLines
from kubelet.loopback import BadRequestError, read_request
from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.client.stdio_bridge.http_client import RelayResponse
from relay.client.stdio_bridge.messages import Message as StdioMessage
from relay.client.stdio_bridge.messages import MessageSplitter
from relay.client.stdio_bridge.messages import read as read_message
from relay.http.body_parser import MESSAGE_IN_SCOPE, BodyParser
from relay.http.websocket_protocol import unmasked
from schemas.strict_json import StrictJsonError, loads
from schemas.websocket_frames import FrameHead, FrameSlicer
from tests.fakes.callers import principal_of
from tests.fakes.hostile_texts import is_clean
from tests.fuzz import samples
from tests.fuzz.target import REFUSED, Refused, Target, finished, plain_json, tried

_MOST_BYTES: Final = 64
_NAMELESS: Final = Caller(principal_of(""), "http", {})


def loopback_request(data: bytes) -> None:
    """What is read of a request to the node's own port is of plain characters, and no more than was sent."""
    request = tried(lambda: read_request(io.BufferedReader(io.BytesIO(data))), BadRequestError)
    if request is None or request is REFUSED:
        return
    assert is_clean(request.method + request.target)
    assert f"{request.method} {request.target} HTTP/".encode() in data
    assert sum(len(name) + len(value) for name, value in request.headers) <= len(data)


def body(data: bytes) -> None:
    """A body is one message of JSON-RPC, as another reader has it, or is refused without repeating it."""
    passed: list[Any] = []
    sent: list[Message] = []

    async def app(scope: Scope, receive: Receive, _send: Send) -> None:
        assert (await receive())["body"] == data
        passed.append(scope[MESSAGE_IN_SCOPE])

    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-length", b"%d" % len(data))]
    scope = {"type": "http", "method": "POST", "headers": headers, CALLER_IN_SCOPE: _NAMELESS}
    finished(BodyParser(app, lambda _: None, lambda _, __: None)(scope, receive, send))
    assert bool(passed) is not bool(sent)
    if passed:
        [message] = passed
        assert message == plain_json(data)
        if "method" not in message and message.keys() & {"result", "error"}:
            assert message["jsonrpc"] == "2.0"  # of other messages, what the parser is given judges it
    else:
        assert sent[0]["status"] == 400
        assert loads(sent[1]["body"], max_bytes=1024)["error"]["code"] in {-32700, -32600}


def socket_line(data: bytes) -> None:
    """A line of a local client is a request, as another reader has it, or an error of our own words."""
    request = tried(lambda: json_rpc.parse(data), json_rpc.RpcError)
    if request is REFUSED:
        return
    message = plain_json(data)
    assert (request.method, request.request_id) == (message["method"], message.get("id"))
    assert request.params == message.get("params", {})
    line = json_rpc.request(request.request_id or 0, request.method, request.params)
    assert json_rpc.parse(line.removesuffix(b"\n")).params == request.params


def stdio_message(data: bytes) -> None:
    """A line on standard input is sent as it came; its headers are plain, whatever the line holds."""
    message = read_message(data)
    assert message.raw == data
    for name, value in message.headers().items():
        assert is_clean(name + value)
        assert value == value.strip()
    if message.method is not None:
        value = loads(data, max_bytes=len(data))
        assert message == StdioMessage(
            data,
            value["method"],
            value.get("id"),
            message.version,
            message.name,
            message.target,
            message.is_answer,
            message.follows_tools,
        )
    elif tried(lambda: loads(data, max_bytes=len(data)), StrictJsonError) is REFUSED:
        assert message == StdioMessage(data)


def lines(data: bytes) -> None:
    """However bytes arrive, they make the same lines: those of a plain split, without those too long."""
    for splitter, end in ((SocketLines, b"\r"), (MessageSplitter, b"")):
        wanted = [
            None if len(line) > _MOST_BYTES else line.removesuffix(end) if end else line
            for line in data.split(b"\n")[:-1]
        ]
        for chunks in _cuts(data):
            cutter = splitter(_MOST_BYTES)
            found = [line for chunk in chunks for line in cutter.feed(chunk)]
            # The one on a socket reports a line that is too long before its end has come.
            assert found in (wanted, [*wanted, None])


def event_stream(data: bytes) -> None:
    """However bytes arrive, they make the same events, and no event holds an end of a line but its own."""
    wanted: list[bytes] | None = None
    for chunks in _cuts(data):
        found = finished(_events(chunks))
        assert wanted is None or found == wanted
        wanted = found
        assert not any(b"\r" in event for event in found)


async def _events(chunks: Iterable[bytes]) -> list[bytes]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    asked, headers = httpx2.Request("GET", "http://127.0.0.1/mcp"), {"content-type": "text/event-stream"}
    answer = RelayResponse(httpx2.Response(200, headers=headers, content=arriving(), request=asked))
    return [event async for event in answer.documents()]


def _cuts(data: bytes) -> Iterable[list[bytes]]:
    middle = len(data) // 2
    yield [data]
    yield [data[:middle], data[middle:]]
    yield [data[at : at + 1] for at in range(len(data))]


def websocket_frames(data: bytes) -> None:
    """Frames begin and end where another library has them, and hold what it reads."""
    slicer = FrameSlicer()
    slicer.feed(data)
    start, stream = 0, _Stream(data)
    while (head := slicer.head()) is not None and head.payload_bytes <= len(data):
        slicer.enter(head)
        piece = slicer.take()
        assert piece == data[start : start + head.head_bytes + head.payload_bytes]
        is_whole = len(piece) == head.head_bytes + head.payload_bytes
        second = _second_frame(stream, masked=bool(piece[1] & 0x80))
        if second is REFUSED or second is None:
            return  # what is malformed passes through, and what is incomplete waits
        assert is_whole
        start += len(piece)
        assert stream.at == start
        _compare(piece, head, second)


def _compare(piece: bytes, head: FrameHead, second: WebSocketFrame) -> None:
    assert head.is_control is (second.opcode >= 8)
    assert head.payload_bytes == len(second.data)
    if head.is_text:
        assert second.fin
        assert unmasked(piece, head) == second.data


class _Stream:
    """What the library's parser reads from; None of it waits."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def read_exact(self, count: int) -> Any:
        """Return the next bytes; what is missing is waited for, which ends the parser here."""
        if self.at + count > len(self._data):
            yield
        piece = self._data[self.at : self.at + count]
        self.at += count
        return piece


def _second_frame(stream: _Stream, *, masked: bool) -> WebSocketFrame | Refused | None:
    read: Callable[..., Any] = WebSocketFrame.parse
    parser = read(stream.read_exact, mask=masked, max_size=None)
    try:
        next(parser)
    except StopIteration as end:
        frame: WebSocketFrame = end.value
        return frame
    except ProtocolError:
        return REFUSED
    return None


TARGETS: Final = {
    "loopback_request": Target(loopback_request, samples.LOOPBACK_REQUESTS),
    "body": Target(body, samples.BODIES, share=2),
    "socket_line": Target(socket_line, samples.SOCKET_LINES),
    "stdio_message": Target(stdio_message, samples.BODIES),
    "lines": Target(lines, samples.LINES, max_bytes=512),
    "event_stream": Target(event_stream, samples.EVENTS, max_bytes=512),
    "websocket_frames": Target(websocket_frames, samples.WEBSOCKET_FRAMES, max_bytes=512),
}
