"""Parses each body on ``/mcp`` strictly, before the SDK.

The SDK accepts duplicate keys, NaN and lone surrogates, and drops unknown members. Must not interpret the
message: what it is made with judges the required members.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from schemas.error_roots import EdgeError
from schemas.errors import ToolError
from schemas.strict_json import StrictJsonError, loads

MAX_BODY_BYTES = 256 * 1024
"""The limit of a frame to a node: larger arguments could not be sent."""

MESSAGE_IN_SCOPE = "edge.message"
"""The key of the parsed body in the scope of the request."""

RefusalOf = Callable[[Caller, Mapping[str, Any]], Mapping[str, Any] | None]

_LENGTH_DIGITS = 20  # of the greatest length that the server reads
_PARSE_ERROR = -32700
_INVALID_REQUEST = -32600
_TIMEOUT = -32003
_TOO_LARGE = (413, _INVALID_REQUEST, "The request is larger than 256 KiB.")


class BodyParser:
    """An ASGI application that passes requests to ``app`` once their body is complete and parsed.

    The ``Caller`` in the scope gets the body's size. ``charge`` is called with it before the body is parsed,
    which is slow for a large one, and ``refusal_of`` with the message, unless that is a response: it returns
    the answer to one that goes no further. A ``ToolError`` that either raises is the answer.
    """

    def __init__(self, app: ASGIApp, charge: Callable[[Caller], None], refusal_of: RefusalOf) -> None:
        self._app = app
        self._charge = charge
        self._refusal_of = refusal_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: -32700 for what is not strict JSON, -32600 for what is not JSON-RPC."""
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if _declares_too_large(scope):
            await _refusal(*_TOO_LARGE)(scope, receive, send)
            return
        body = await _received(receive)
        if body is None:
            return  # the client has disconnected
        if len(body) > MAX_BODY_BYTES:
            await _refusal(*_TOO_LARGE)(scope, receive, send)
            return
        caller = scope[CALLER_IN_SCOPE] = scope[CALLER_IN_SCOPE]._replace(size=len(body))
        try:
            self._charge(caller)
            message = scope[MESSAGE_IN_SCOPE] = _message_of(body)
            malformed = None if _is_response(message) else self._refusal_of(caller, message)
        except (ToolError, _BodyError) as error:
            await _refusal_for(error)(scope, receive, send)
            return
        if malformed is not None:
            await _answer(400, malformed)(scope, receive, send)
            return
        await self._app(scope, _receive_again(body, receive), send)


class _BodyError(EdgeError):
    """The body is not a message of JSON-RPC. ``code`` is the JSON-RPC error code."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


def _message_of(body: bytes) -> dict[str, Any]:
    """Return the JSON object in ``body``; of responses, only one of JSON-RPC 2.0.

    The SDK answers another body with a dump of it.

    Raises:
        _BodyError: it is not valid; the text has none of its content.
    """
    try:
        value = loads(body, max_bytes=MAX_BODY_BYTES)
    except StrictJsonError as error:
        raise _BodyError(_PARSE_ERROR, f"Parse error: {error.reason}.") from None
    if not isinstance(value, dict):
        raise _BodyError(_INVALID_REQUEST, "Invalid Request: the body must be one JSON object.")
    if _is_response(value) and value.get("jsonrpc") != "2.0":
        raise _BodyError(_INVALID_REQUEST, 'Invalid Request: jsonrpc must be "2.0".')
    return value


def _is_response(message: Mapping[str, Any]) -> bool:
    return "method" not in message and ("result" in message or "error" in message)


def _declares_too_large(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return len(value) > _LENGTH_DIGITS or int(value) > MAX_BODY_BYTES
    return False


async def _received(receive: Receive) -> bytes | None:
    """Return the body, or what was received when it is too large; None if the client disconnected."""
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES or not message.get("more_body", False):
            return bytes(body)


def _refusal_for(error: "ToolError | _BodyError") -> Response:
    if isinstance(error, _BodyError):
        return _refusal(400, error.code, str(error))
    refusal = _refusal(429, _TIMEOUT, str(error))
    refusal.headers["retry-after"] = str(-(-(error.retry_after_ms or 0) // 1000))
    return refusal


def _refusal(status: int, code: int, message: str) -> Response:
    return _answer(status, {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}})


def _answer(status: int, document: Mapping[str, Any]) -> Response:
    return Response(json.dumps(document), status, media_type="application/json")


def _receive_again(body: bytes, receive: Receive) -> Receive:
    """Return a ``receive`` that gives ``body`` once more, and then what ``receive`` gives."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return waiting.pop() if waiting else await receive()

    return again
