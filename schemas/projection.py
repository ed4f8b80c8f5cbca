"""The name of a tool: from capability and verb to a name, and back (RFC-0001 section 3).

``{kind_short}.{node_id}.{cap_id}.{verb}`` is the canonical name. Some clients refuse dots, so the same name
with ``-`` for ``.`` is an alias; no token holds either character, so nothing is lost. The names under
``_meta`` of MCP messages are here too. Must not read which nodes and tools there are: the relay does that.
"""

import re
from typing import NamedTuple

NODE_ID_PATTERN = r"[0-9a-hjkmnp-tv-z]{26}"
MAX_NAME = 64

_TOKENS = (
    rf"([a-z][a-z0-9_]{{0,7}})%s({NODE_ID_PATTERN})"
    r"%s([a-z][a-z0-9_]{0,17})%s([a-z]{1,9})"
)
_NAME = re.compile(_TOKENS % (r"\.", r"\.", r"\."))
_ALIAS = re.compile(_TOKENS % ("-", "-", "-"))
_NODE_ID = re.compile(NODE_ID_PATTERN)


class ToolName(NamedTuple):
    """A tool's name in its four tokens, as they follow in it."""

    kind_short: str
    node_id: str
    cap_id: str
    verb: str

    @property
    def canonical(self) -> str:
        """The dotted form: as in ``cmd.payload.tool`` and in the audit."""
        return f"{self.kind_short}.{self.node_id}.{self.cap_id}.{self.verb}"

    @property
    def alias(self) -> str:
        """The dashed form, for clients that refuse dots."""
        return alias_of(self.canonical)


def alias_of(canonical: str) -> str:
    """Return the dashed form of a canonical name."""
    return canonical.replace(".", "-")


def parse(name: str) -> ToolName | None:
    """Return the tokens of ``name``, canonical or dashed; None when it is not the name of any tool.

    >>> parse("sysecho.01hzx9k3m4p7q8r9s0t1v2w3xy.echo.invoke").cap_id
    'echo'
    """
    if len(name) > MAX_NAME:
        return None
    match = _NAME.fullmatch(name) or _ALIAS.fullmatch(name)
    return ToolName(*match.groups()) if match else None


def is_node_id(text: str) -> bool:
    """Return whether ``text`` is a node id: a ULID in lower case."""
    return _NODE_ID.fullmatch(text) is not None


# Of a call.
META_CORRELATION_ID = "edge-kubelet/correlation-id"
META_IDEMPOTENCY_KEY = "edge-kubelet/idempotency-key"
META_TASK_ID = "edge-kubelet/task-id"
META_STEP_ID = "edge-kubelet/step-id"
META_TRACEPARENT = "traceparent"
META_LOG_LEVEL = "io.modelcontextprotocol/logLevel"
META_PROGRESS_TOKEN = "progressToken"  # noqa: S105 - a name of MCP
META_FOLLOW_S = "edge-kubelet/follow-s"
"""For how many seconds a call that streams stays open, where its caller follows it."""

# Of a listed tool.
META_SAFETY_CLASS = "edge-kubelet/safety-class"
META_CAPABILITY_ETAG = "edge-kubelet/capability-etag"
META_CANONICAL_NAME = "edge-kubelet/canonical-name"
META_SCHEMA_REF = "edge-kubelet/schema-ref"

# Of an answer, and of progress.
META_UNTRUSTED = "edge-kubelet/untrusted"
META_ERROR = "edge-kubelet/error"
META_HOP = "edge-kubelet/hop"
META_CHALLENGE = "mcp/www_authenticate"  # where ChatGPT looks for it
META_LOST = "edge-kubelet/lost"
