"""Good requests to a relay's HTTP port, in the form that ``live_http`` takes."""

from typing import Final

from schemas.frames import SUBPROTOCOL
from tests.fakes.served_relay import mcp_request
from tests.fuzz.samples import NAMES, compact

_ACCEPT: Final = ("Accept: application/json, text/event-stream",)
_INITIALIZE: Final = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "x", "version": "1"},
    },
}


def _request(line: str, *headers: str, body: bytes = b"") -> bytes:
    length = (f"Content-Length: {len(body)}",) if body else ()
    return "\r\n".join((f"{line} HTTP/1.1", "Host: @HOST@", *headers, *length, "", "")).encode() + body


_TOKEN: Final = "Authorization: Bearer @TOKEN@"


def _mcp(method: str, *, path: str = "/mcp", token: bool = True, **params: object) -> bytes:
    """Return a request of the new era."""
    body, named = mcp_request(method, params)
    headers = [f"{name}: {value}" for name, value in named]
    return _request(f"POST {path}", *([_TOKEN] if token else []), *headers, body=body)


_CALL: Final = _mcp("tools/call", name=NAMES[0].decode(), arguments={"message": "ping"})
HTTP_REQUESTS: Final = (
    _CALL,
    _CALL * 2,
    _mcp("tools/call", token=False, name=NAMES[0].decode(), arguments={}),
    _mcp("tools/list", path="/mcp?view=kinds"),
    _mcp("resources/read", uri="fleet://nodes?cursor=1"),
    _mcp("server/discover"),
    _request("POST /mcp", _TOKEN, "Content-Type: application/json", *_ACCEPT, body=compact(_INITIALIZE)),
    _request("GET /metrics", "Authorization: Basic eA=="),
    _request("GET /.well-known/oauth-protected-resource/mcp", "Origin: https://elsewhere.example"),
    _request("DELETE /mcp", _TOKEN, "Mcp-Session-Id: x"),
    _request("POST /mcp", _TOKEN, "Transfer-Encoding: chunked") + b'5\r\n{"a":@CUT@\r\n0\r\n\r\n',
    _request("GET http://elsewhere.example/healthz", "Expect: 100-continue"),
    _request(
        "GET /devices/connect",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
        "Sec-WebSocket-Version: 13",
        f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
    ),
)
