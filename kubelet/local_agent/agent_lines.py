"""What a local agent writes to standard input, as far as the SDK may read it.

The SDK ignores a line that it cannot parse, and takes a request whose id is not one for a notification: the
agent would never get an answer. Here each of them gets one. Must not know a method.
"""

import json
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

import mcp_types as types

from schemas.strict_json import StrictJsonError, loads

_MAX_BYTES = 1 << 20
"""More than the daemon accepts: its bound is told by the error of a tool."""
_NO_MESSAGE = "not a message of JSON-RPC 2.0, whose id is an integer or a text; batches are not accepted"


async def message_lines(
    lines: AsyncIterable[bytes], refuse: Callable[[types.JSONRPCError], Awaitable[None]]
) -> AsyncIterator[str]:
    """Yield the messages of ``lines``; ``refuse`` sends the error for what is none."""
    async for line in lines:
        if not line.strip():
            continue
        if (error := refusal(line)) is None:
            yield line.decode()
        else:
            await refuse(error)


def refusal(line: bytes) -> types.JSONRPCError | None:
    """Return the error to answer ``line`` with, if it is no message."""
    try:
        message = loads(line, max_bytes=_MAX_BYTES)
    except StrictJsonError as error:
        return _error(types.PARSE_ERROR, f"not accepted as JSON: {error.reason}", _id_of(_read_loosely(line)))
    try:
        parsed = types.jsonrpc_message_adapter.validate_python(message, by_name=False)
    except ValueError:
        return _error(types.INVALID_REQUEST, _NO_MESSAGE, _id_of(message))
    if isinstance(parsed, types.JSONRPCNotification) and "id" in message:
        return _error(types.INVALID_REQUEST, _NO_MESSAGE, None)
    return None


def _read_loosely(line: bytes) -> object:
    try:
        return json.loads(line.decode("utf-8", "replace"))
    except (ValueError, RecursionError):
        return None


def _id_of(message: object) -> types.RequestId | None:
    """Return the id of what is meant as a request, if it can be written."""
    if not isinstance(message, dict) or "method" not in message:
        return None
    id_ = message.get("id")
    # A text that is not ASCII may hold a lone surrogate.
    is_id = id_.isascii() if isinstance(id_, str) else isinstance(id_, int) and not isinstance(id_, bool)
    return id_ if is_id else None


def _error(code: int, text: str, request_id: types.RequestId | None) -> types.JSONRPCError:
    return types.JSONRPCError(jsonrpc="2.0", id=request_id, error=types.ErrorData(code=code, message=text))
