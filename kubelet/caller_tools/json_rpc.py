"""JSON-RPC 2.0 as the socket speaks it, one message a line; this end's notifications are ``{type, params}``.

Every line of a client is parsed here, strictly. Must not know a method.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from schemas.error_roots import PeerError
from schemas.errors import ToolError
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_LINE_BYTES = 256 * 1024
PARSE_ERROR = -32700
INVALID_REQUEST = -32600
METHOD_NOT_FOUND = -32601
INVALID_PARAMS = -32602
MAX_ID_LENGTH = 128
_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class LineSplitter:
    """The lines of one connection, as bytes. A line over the limit is dropped byte by byte as it comes in."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._is_dropping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield each line that ``data`` ends, without its end; None as soon as a line is over the limit."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            yield from self._line(data[start:end])
            start = end + 1
        yield from self._take(data[start:])

    def _line(self, rest: bytes) -> Iterator[bytes | None]:
        yield from self._take(rest)
        if not self._is_dropping:
            yield bytes(self._held).removesuffix(b"\r")
        self._held.clear()
        self._is_dropping = False

    def _take(self, piece: bytes) -> Iterator[None]:
        if self._is_dropping:
            return
        if len(self._held) + len(piece) > self._max_bytes:
            self._held.clear()
            self._is_dropping = True
            yield None
            return
        self._held += piece


RequestId = str | int


class RpcError(PeerError):
    """A client broke the rules of JSON-RPC, or of a method's parameters. The text is a constant of ours."""

    def __init__(self, code: int, text: str, request_id: RequestId | None = None) -> None:
        super().__init__(text)
        self.code = code
        self.request_id = request_id


@dataclass(frozen=True, slots=True)
class JsonRpcRequest:
    """One request of a client. ``request_id`` is None for a notification, which gets no response."""

    method: str
    params: Mapping[str, Any]
    request_id: RequestId | None


def parse(line: bytes | None) -> JsonRpcRequest:
    """Return the request that ``line`` holds; None is a line over the limit.

    Raises:
        RpcError: it holds none.
    """
    if line is None:
        raise RpcError(INVALID_REQUEST, f"a line is at most {MAX_LINE_BYTES} bytes")
    try:
        message = loads(line, max_bytes=MAX_LINE_BYTES)
    except StrictJsonError as error:
        raise RpcError(PARSE_ERROR, f"not accepted as JSON: {error.reason}") from None
    if not isinstance(message, dict):
        raise RpcError(INVALID_REQUEST, "a message is one object; batches are not accepted")
    request_id = message.get("id")
    if "id" in message and not is_request_id(request_id):
        raise RpcError(INVALID_REQUEST, f"an id is an integer or a text of 1 to {MAX_ID_LENGTH} characters")
    method, params = message.get("method"), message.get("params", {})
    if message.get("jsonrpc") != "2.0" or not isinstance(method, str):
        raise RpcError(INVALID_REQUEST, 'a request has "jsonrpc": "2.0" and a method', request_id)
    if not isinstance(params, dict):
        raise RpcError(INVALID_PARAMS, "params is an object", request_id)
    return JsonRpcRequest(method, params, request_id)


def is_request_id(value: object) -> TypeGuard[RequestId]:
    """Return whether ``value`` can be the id of a request."""
    if isinstance(value, str):
        return 0 < len(value) <= MAX_ID_LENGTH
    return isinstance(value, int) and not isinstance(value, bool)


def request(request_id: RequestId, method: str, params: Mapping[str, Any]) -> bytes:
    """Return the line of a request, for clients of ours.

    Raises:
        ValueError: the params hold a number that JSON cannot express.
    """
    return _line({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})


def response(request_id: RequestId, result: Any) -> bytes:
    """Return the line of a result."""
    return _line({"jsonrpc": "2.0", "id": request_id, "result": result})


def rpc_error(error: RpcError) -> bytes:
    """Return the line of an error of the protocol. Without an id where none could be read."""
    body = {"code": error.code, "message": str(error)}
    return _line({"jsonrpc": "2.0", "id": error.request_id, "error": body})


def tool_error(request_id: RequestId, error: ToolError, caller_text: str | None) -> bytes:
    """Return the line of a request that failed; ``data`` is the error envelope of RFC-0001 section 4.

    ``caller_text`` is what a caller gave as the reason, for the local agent to read as data.
    """
    envelope: dict[str, Any] = {**error.envelope()}
    message = envelope["message"]
    if caller_text is not None:
        envelope["caller_message"] = caller_text
        message = printable(caller_text, 512) or message
    body = {"code": error.failure.value.jsonrpc_code, "message": message, "data": envelope}
    return _line({"jsonrpc": "2.0", "id": request_id, "error": body})


def notification(type_: str, params: Mapping[str, Any]) -> bytes:
    """Return the line of a notification."""
    return _line({"type": type_, "params": params})


def _line(message: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(message).encode("ascii") + b"\n"
