"""What the daemon sends over its socket, one message a line. It may be of another version than this program.

Must not act on a message.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from schemas.error_roots import PeerError
from schemas.strict_json import StrictJsonError, loads

MAX_LINE_BYTES = 1 << 20
"""More than the daemon sends in one line."""


class DaemonMessageError(PeerError):
    """A line is no message that this version reads; the text, printable, states why."""


@dataclass(frozen=True, slots=True)
class Lending:
    """All that the caller ``caller_id`` lends now, each with a ``name`` and an ``inputSchema``."""

    caller_id: str
    tools: list[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class CallerMessage:
    """A message of the caller."""

    text: str


@dataclass(frozen=True, slots=True)
class Response:
    """What the request ``request_id`` ended with: a ``result``, or an ``error`` of JSON-RPC."""

    request_id: object
    result: Any
    error: Mapping[str, Any] | None


def read(line: bytes) -> Lending | CallerMessage | Response:
    """Return the message in ``line``.

    Raises:
        DaemonMessageError: it is none.
    """
    try:
        message = loads(line, max_bytes=MAX_LINE_BYTES)
    except StrictJsonError as error:
        raise DaemonMessageError(f"it is {error.reason}") from None
    if not isinstance(message, dict):
        raise DaemonMessageError("it is no object")
    match message.get("type"):
        case "caller_tools_config":
            params = _member(message, "params", dict)
            tools = _member(params, "tools", list)
            for tool in tools:
                _check_tool(tool)
            return Lending(_member(params, "caller_id", str), tools)
        case "session_message":
            return CallerMessage(_member(_member(message, "params", dict), "message", str))
        case _:
            return _response(message)


def _response(message: Mapping[str, Any]) -> Response:
    error = message.get("error")
    if error is not None:
        data = _member(message, "error", dict).get("data", {})
        if not isinstance(data, dict) or not isinstance(data.get("caller_message"), str | None):
            raise DaemonMessageError("its error has data of another form")
    return Response(message.get("id"), message.get("result"), error)


def _check_tool(tool: object) -> None:
    if not isinstance(tool, dict):
        raise DaemonMessageError("a tool is no object")
    _member(tool, "name", str)
    _member(tool, "inputSchema", dict)
    if not all(isinstance(tool.get(name, ""), str) for name in ("title", "description")):
        raise DaemonMessageError("a tool's title or description is no text")


def _member(holder: Mapping[str, Any], name: str, form: type[Any]) -> Any:
    value = holder.get(name)
    if not isinstance(value, form):
        raise DaemonMessageError(f"its member {name} is missing, or of another form")
    return value
