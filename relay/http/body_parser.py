"""Every body on ``/mcp`` passes the strict parser before the SDK sees it.

The SDK takes duplicate keys, NaN and lone surrogates, and drops what it does not know. Must not look at what
the message says.
"""

import json
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relay.auth.caller import CALLER_IN_SCOPE, Caller
from schemas.errors import ToolError
from schemas.strict_json import StrictJsonError, loads

MAX_BODY_BYTES = 256 * 1024
"""As much as a frame to a node: larger arguments would not get there."""

MESSAGE_IN_SCOPE = "edge.message"
"""What the body holds, in the scope of the request."""

_LENGTH_DIGITS = 20  # of the greatest length that a server reads
_PARSE_ERROR = -32700
_INVALID_REQUEST = -32600
_TIMEOUT = -32003
_TOO_LARGE = (413, _INVALID_REQUEST, "The request is larger than 256 KiB.")


class BodyParser:
    """An ASGI application that lets requests through to ``app`` once their body is whole and was parsed.

    The ``Caller`` in the scope is told the body's size. ``charge`` gets it before the body is parsed, which
    for a large one takes a while; the ``ToolError`` that it raises is the answer.
    """

    def __init__(self, app: ASGIApp, charge: Callable[[Caller], None]) -> None:
        self._app = app
        self._charge = charge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: -32700 for what is not JSON as this system accepts it."""
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if _is_announced_too_large(scope):
            await _refusal(*_TOO_LARGE)(scope, receive, send)
            return
        body = await _whole(receive)
        if body is None:
            return  # nobody is there any more
        if len(body) > MAX_BODY_BYTES:
            await _refusal(*_TOO_LARGE)(scope, receive, send)
            return
        caller = scope[CALLER_IN_SCOPE] = scope[CALLER_IN_SCOPE].with_size(len(body))
        try:
            self._charge(caller)
        except ToolError as error:
            wait_s = -(-(error.retry_after_ms or 0) // 1000)
            refusal = _refusal(429, _TIMEOUT, str(error))
            refusal.headers["retry-after"] = str(wait_s)
            await refusal(scope, receive, send)
            return
        try:
            scope[MESSAGE_IN_SCOPE] = loads(body, max_bytes=MAX_BODY_BYTES)
        except StrictJsonError as error:
            await _refusal(400, _PARSE_ERROR, f"Parse error: {error.reason}.")(scope, receive, send)
            return
        await self._app(scope, _replayed(body, receive), send)


def _is_announced_too_large(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return len(value) > _LENGTH_DIGITS or int(value) > MAX_BODY_BYTES
    return False


async def _whole(receive: Receive) -> bytes | None:
    """Return the body, or what has come of it when it is too large; None if it never came to its end."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES or not message.get("more_body", False):
            return bytes(body)


def _refusal(status: int, code: int, message: str) -> Response:
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return Response(json.dumps(error), status, media_type="application/json")


def _replayed(body: bytes, receive: Receive) -> Receive:
    """Return what gives ``body`` once more, and then whatever ``receive`` gives."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
