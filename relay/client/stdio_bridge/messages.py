"""What the bridge reads of a line of MCP: whether it expects an answer, and its HTTP headers.

A message is never encoded again: ``raw`` is what was read, and what is sent. Must not do any I/O, nor
validate: the relay rejects what is malformed, with the same error as over HTTP.
"""

import base64
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from schemas.errors import to_jsonrpc_error
from schemas.strict_json import StrictJsonError, loads

MAX_LINE_BYTES = 256 * 1024
"""The relay's limit of a body."""
MAX_HEADER_CHARS = 8192

INITIALIZE = "initialize"
INITIALIZED = "notifications/initialized"
CANCELLED = "notifications/cancelled"
SET_LEVEL = "logging/setLevel"
SUBSCRIBE = "resources/subscribe"
UNSUBSCRIBE = "resources/unsubscribe"
LISTEN = "subscriptions/listen"
LIST_CHANGED = "notifications/tools/list_changed"
ACKNOWLEDGED = "notifications/subscriptions/acknowledged"

_INVALID_REQUEST = -32600
_VERSION_KEY = "io.modelcontextprotocol/protocolVersion"
_SUBSCRIPTION_KEY = "io.modelcontextprotocol/subscriptionId"
_NAME_OF = {"tools/call": "name", "prompts/get": "name", "resources/read": "uri"}
_REPEATABLE = frozenset(
    {INITIALIZE, LISTEN, "ping", "server/discover", "tools/list", "prompts/list", "prompts/get"}
)
_NOTIFICATIONS = "notifications/"
_REPEATABLE_PREFIXES = ("resources/", _NOTIFICATIONS)
_PLAIN = re.compile(r"(?!=\?base64\?.*\?=$)[!-~]([ -~]*[!-~])?")

Id = str | int


@dataclass(frozen=True, slots=True)
class Message:
    """A line that was read.

    Attributes:
        raw: its bytes.
        method: of a request or notification; None for all else.
        id: of a request; its answer has the same id.
        version: the protocol's, if the message contains it, as each of the new era does.
        name: what the method is about, if a header repeats it.
        target: the request that a cancellation is for.
        is_answer: it answers a request of the relay's.
        follows_tools: it subscribes to changes of the tools.
        resource: what a session of the old era is to follow, or no longer.
    """

    raw: bytes
    method: str | None = None
    id: Id | None = None
    version: str | None = None
    name: str | None = None
    target: Id | None = None
    is_answer: bool = False
    follows_tools: bool = False
    resource: str | None = None

    @property
    def may_repeat(self) -> bool:
        method = self.method or ""
        return method in _REPEATABLE or method.startswith(_REPEATABLE_PREFIXES)

    @property
    def is_silent(self) -> bool:
        """Whether it expects no answer: a notification, or an answer itself.

        A request without an id is neither: the relay refuses it.
        """
        return self.id is None and (self.is_answer or (self.method or "").startswith(_NOTIFICATIONS))

    def headers(self) -> dict[str, str]:
        """Return the headers that Streamable HTTP mirrors the message in, in the new era."""
        headers = {"mcp-method": self.method, "mcp-name": self.name, "mcp-protocol-version": self.version}
        return {name: header_value(value) for name, value in headers.items() if value is not None}


def read(raw: bytes) -> Message:
    """Parse ``raw``; of what the relay would not accept as JSON, only the bytes."""
    try:
        value = loads(raw, max_bytes=MAX_LINE_BYTES)
    except StrictJsonError:
        return Message(raw)
    if not isinstance(value, dict):
        return Message(raw)
    method, params = value.get("method"), value.get("params", {})
    own_id = _id(value.get("id"))
    if "method" not in value and ("result" in value or "error" in value):
        return Message(raw, is_answer="id" in value)
    has_id = own_id is not None or "id" not in value
    if not (
        has_id and value.get("jsonrpc") == "2.0" and isinstance(method, str) and isinstance(params, dict)
    ):
        return Message(raw, id=own_id)  # no notification, whatever it is called: the relay rejects it
    meta, name = params.get("_meta"), params.get(_NAME_OF.get(method, ""))
    uri = params.get("uri") if method in {SUBSCRIBE, UNSUBSCRIBE} else None
    version = meta.get(_VERSION_KEY) if isinstance(meta, dict) else None
    filter_ = params.get("notifications")
    return Message(
        raw,
        method,
        own_id,
        version=version if isinstance(version, str) else None,
        name=name if isinstance(name, str) else None,
        target=_id(params.get("requestId")),
        follows_tools=isinstance(filter_, dict) and filter_.get("toolsListChanged") is True,
        resource=uri if isinstance(uri, str) else None,
    )


def header_value(text: str) -> str:
    """Return ``text`` as a header may hold it: what is not plain in the form of the protocol, in base64."""
    if _PLAIN.fullmatch(text):
        return text
    return f"=?base64?{base64.b64encode(text.encode('utf-8')).decode('ascii')}?="


def internal_error(request: Id | None, text: str, *, retryable: bool) -> bytes:
    """Return the answer to a request that failed in the bridge."""
    return canonical_error(request, "INTERNAL_ERROR", text, retryable=retryable)


def canonical_error(request: Id | None, code: str, text: str, *, retryable: bool = False) -> bytes:
    """Return an answer with the canonical ``code`` and the message ``text``."""
    body = to_jsonrpc_error(code, text)
    return _error(request, body | {"data": body["data"] | {"retryable": retryable}})


def invalid_request(text: str) -> bytes:
    """Return the error for a line that is not a message."""
    return _error(None, {"code": _INVALID_REQUEST, "message": text})


def _error(request: Id | None, body: Mapping[str, Any]) -> bytes:
    return encode({"jsonrpc": "2.0", "id": request, "error": body})


def list_changed(subscription: Id | None = None) -> bytes:
    """Return the notification that the list of tools may have changed; ``subscription`` is the new era's."""
    value: dict[str, Any] = {"jsonrpc": "2.0", "method": LIST_CHANGED}
    if subscription is not None:
        value["params"] = {"_meta": {_SUBSCRIPTION_KEY: subscription}}
    return encode(value)


def encode(value: Any) -> bytes:
    """Return ``value`` as one line of JSON."""
    return json.dumps(value, separators=(",", ":")).encode("ascii")


def _id(value: Any) -> Id | None:
    return value if isinstance(value, str | int) and not isinstance(value, bool) else None


class MessageSplitter:
    """Splits bytes into lines. The bytes of a line that is too long are dropped."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest = bytearray()
        self._too_long = False

    def feed(self, chunk: bytes) -> Iterator[bytes | None]:
        """Add a chunk, and yield the lines that it completes; None for one that is too long."""
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._take(piece)
            yield self.end()
        self._take(rest)

    def end(self) -> bytes | None:
        line = None if self._too_long else bytes(self._rest)
        self._rest.clear()
        self._too_long = False
        return line

    def _take(self, piece: bytes) -> None:
        self._too_long = self._too_long or len(self._rest) + len(piece) > self._max_bytes
        if self._too_long:
            self._rest.clear()
        else:
            self._rest += piece
