"""Parses a call, of any transport, once, and checks its form: one closed envelope, and one tool IO document.

MCP allows any members around a call; a call that is made must have this form. Must not check a tool's own
arguments: its schema does, in every mode.
"""

import re
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.fleet.tools import Tool
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure, ToolError
from schemas.projection import (
    META_CORRELATION_ID,
    META_FOLLOW_S,
    META_IDEMPOTENCY_KEY,
    META_LOG_LEVEL,
    META_PROGRESS_TOKEN,
    META_TRACEPARENT,
    ToolName,
    parse,
)
from schemas.registry import TOOL_PREFIX, SchemaRegistry, Validator
from schemas.ulids import GIVEN_ID
from schemas.violations import ViolationError

TOOL_IO_REF = "tool_io@1.0.0"
LEVELS_WITH_INFO = ("debug", "info")
"""The levels at which a client gets log messages of level info."""
MAX_FOLLOW_S = 86_400

_REQUIRED = ("id", "jsonrpc", "method", "params")
_MAX_LABEL = 128
_OF_THE_WHOLE = frozenset({META_FOLLOW_S, META_IDEMPOTENCY_KEY, META_PROGRESS_TOKEN})
# W3C Trace Context, section 3.2; an id of zeros alone is invalid. Two flags are defined, sampled and
# random; the others must not be passed on.
_FLAGS = 0b11
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})(?P<parent>[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})"
)


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace context that the caller sent: a trace id of 32 hex digits, its span's of 16, two of flags."""

    trace_id: str
    parent_id: str
    flags: str

    def traceparent(self, span_id: str) -> str:
        return f"00-{self.trace_id}-{span_id}-{self.flags}"


class Call:
    """A call, parsed once. Nothing in it has been checked.

    Attributes:
        message: the JSON-RPC message that was received; with empty ``params`` if it has none.
        meta: the caller's ``_meta``; empty if there is none.
        name: the tool's name as the caller sent it, or the canonical one of what the call was directed to.
        arguments: the arguments; empty if they are absent or null.
        idempotency_key: the idempotency key, if it has one.
        parsed: the tokens of the name; None if it is the name of no tool.
        tool_id: the tool as tool IO names it, by its canonical name where it has one.
        trace: the trace context: from ``_meta``, else from the header ``traceparent``. An invalid one is
            ignored.
        given_id: the correlation id that the caller gave it, from ``_meta`` or else from the header; None if
            it gave none, empty if what it gave has not the form of one.
    """

    __slots__ = (
        "arguments",
        "given_id",
        "idempotency_key",
        "message",
        "meta",
        "name",
        "parsed",
        "tool_id",
        "trace",
    )

    def __init__(
        self, message: Mapping[str, Any], traceparent: str | None = None, correlation_id: str | None = None
    ) -> None:
        # The old era allows it; in the new one it is refused as a message.
        self.message = message if "params" in message else {**message, "params": {}}
        params = _object(message.get("params"))
        self.meta = _object(params.get("_meta"))
        self.name: Any = params.get("name")
        arguments = params.get("arguments")
        self.arguments: Any = {} if arguments is None else arguments
        self.idempotency_key: Any = message.get("idempotencyKey", self.meta.get(META_IDEMPOTENCY_KEY))
        name = self.name if isinstance(self.name, str) else ""
        self.parsed = parse(name)
        self.tool_id = TOOL_PREFIX + (self.parsed.canonical if self.parsed else name)
        self.trace = _trace(self.meta.get(META_TRACEPARENT)) or _trace(traceparent)
        given = self.meta.get(META_CORRELATION_ID)
        given = correlation_id if given is None else given
        self.given_id: str | None = given
        if given is not None and not (isinstance(given, str) and GIVEN_ID.fullmatch(given)):
            self.given_id = ""

    def directed(self, tool: Tool, arguments: Mapping[str, Any]) -> "Call":
        call = copy(self)
        kind, verb = tool.kind_verb
        call.parsed = ToolName(kind, tool.node_id, tool.cap_id, verb)
        call.name, call.tool_id, call.arguments = tool.canonical, TOOL_PREFIX + tool.canonical, arguments
        return call

    def part(self) -> "Call":
        """Return the same call without what is of its whole alone: its key, and how it is followed."""
        call = copy(self)
        call.meta = {name: value for name, value in self.meta.items() if name not in _OF_THE_WHOLE}
        call.idempotency_key = None
        return call

    def label(self, key: str) -> str | None:
        """Return the text of the caller's ``_meta`` under ``key``, if it is short enough for a log."""
        value = self.meta.get(key)
        return value if isinstance(value, str) and len(value) <= _MAX_LABEL else None


def wants_logs(meta: object) -> bool:
    """Return whether a call with this ``_meta`` opts in to log messages of level info (MCP 2026-07-28)."""
    return isinstance(meta, dict) and meta.get(META_LOG_LEVEL) in LEVELS_WITH_INFO


def follow_s(meta: Mapping[str, Any]) -> float | None:
    """Return for how long a call with this ``_meta`` is to be followed; None if it does not say."""
    value = meta.get(META_FOLLOW_S)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return value if 0 <= value <= MAX_FOLLOW_S else None


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _trace(value: object) -> Trace | None:
    match = _TRACEPARENT.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return None
    return Trace(match["trace"], match["parent"], f"{int(match['flags'], 16) & _FLAGS:02x}")


@define(eq=False, repr=False)
class EnvelopeCheck:
    """Checks the form of calls, according to ``mode``, which may be changed."""

    _registry: SchemaRegistry
    mode: EnvelopeMode
    _log: FilteringBoundLogger
    _envelope: Validator = field(init=False)
    _tool_io: Validator = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._envelope, self._tool_io = self._registry.load_envelope(), self._registry.load(TOOL_IO_REF)

    def check_required(self, message: Mapping[str, Any], *, is_request: bool, requires_params: bool) -> None:
        """Return if the four members that an envelope requires are well-formed, in any MCP message.

        In every mode: without them the message cannot be answered, or not be read at all. Only a request
        must have an id, and absent ``params`` are empty ones unless the era requires them.

        Raises:
            ToolError: ENVELOPE_INVALID; contains the first rule that is broken, and nothing of the message.
        """
        members = {name: message[name] for name in _REQUIRED if name in message}
        if not is_request:
            members.setdefault("id", 0)
        if not requires_params:
            members.setdefault("params", {})
        if isinstance(members.get("id"), float):
            members["id"] = None  # JSON Schema calls 1.0 an integer; the SDK takes it for no id
        try:
            self._envelope.check(members)
        except ViolationError as error:
            text = f"The message is malformed: {error.sentence}."
            raise ToolError(Failure.ENVELOPE_INVALID, text) from None

    def check(self, call: Call, correlation_id: str) -> None:
        """Return if ``call`` has the form, or the mode does not enforce it.

        Raises:
            ToolError: ENVELOPE_INVALID; contains the first rule that is broken, and nothing of the call.
        """
        if self.mode is EnvelopeMode.OFF:
            return
        violation = self.violation(call)
        if violation is None:
            return
        if self.mode is not EnvelopeMode.SHADOW:
            raise ToolError(Failure.ENVELOPE_INVALID, f"The request is not a call: {violation}.")
        self._log.warning("a call that would be refused", reason=violation, correlation_id=correlation_id)

    def violation(self, call: Call) -> str | None:
        """Return the first rule that ``call`` breaks, and where; None if it breaks none."""
        key, message = call.idempotency_key, call.message
        try:
            self._envelope.check(message if key is None else {**message, "idempotencyKey": key})
            self._tool_io.check({"tool": call.tool_id, "input": call.arguments})
        except ViolationError as error:
            return str(error)
        # Not ``isinstance``, to which a bool is an int.
        if type(call.meta.get(META_PROGRESS_TOKEN, "")) not in {str, int}:
            return "/params/_meta/progressToken must be of type string or integer"
        if META_FOLLOW_S in call.meta and follow_s(call.meta) is None:
            return f"/params/_meta/edge-kubelet~1follow-s must be a number from 0 to {MAX_FOLLOW_S}"
        in_meta = call.meta.get(META_IDEMPOTENCY_KEY)
        return "two idempotency keys" if in_meta is not None and in_meta != key else None
