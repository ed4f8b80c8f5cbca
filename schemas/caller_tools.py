"""The limits of caller tools that both ends keep, and the errors that a request for one ends with.

A caller lends tools to the local agent of a node (DESIGN section 9). Must not hold state, nor know sessions.
"""

import json
from enum import StrEnum

from schemas.errors import Failure

MAX_VALUE_BYTES = 192 * 1024
"""The size of one message, of the arguments of one request, or of its result: a frame holds one of them."""
MAX_TOOLS_BYTES = 192 * 1024
"""The size of all tools of one session together: one frame holds them."""
MAX_SCHEMA_BYTES = 32 * 1024
MAX_TOOLS = 64
SESSION_ID_PATTERN = "^gogol_[0-9]{8}_[0-9]{6}_[0-9a-f]{8}$"
"""The id of a session, as the documents have it."""
MAX_SESSIONS = 64
"""The live sessions of one node."""
MAX_PENDING = 128
"""The pending requests of one session."""
SESSIONS_LAST_S = 90.0
"""How long a node that is away keeps its sessions: it sees the loss of its connection within 30 s, and they
outlive that by 60 s."""
NODE_MARGIN_S = 5.0
"""How much longer than the relay a node waits for an answer: the relay's error says what was waited for."""
MAX_ERROR_TEXT = 4096
"""The characters of a caller's own error that are passed on."""

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)


class CallerToolError(StrEnum):
    """The codes of an error in ``caller_tool_result``."""

    DISCONNECTED = "caller_disconnected"
    TIMEOUT = "timeout"
    TOOL_FAILED = "tool_failed"
    TOOL_UNKNOWN = "tool_unknown"
    INVALID = "invalid"
    OVER_CAPACITY = "over_capacity"
    INTERNAL = "internal"

    @property
    def failure(self) -> Failure:
        return _FAILURES[self]


_FAILURES = {
    CallerToolError.DISCONNECTED: Failure.CALLER_DISCONNECTED,
    CallerToolError.TIMEOUT: Failure.CALLER_TIMEOUT,
    CallerToolError.TOOL_FAILED: Failure.CALLER_TOOL_FAILED,
    CallerToolError.TOOL_UNKNOWN: Failure.CALLER_TOOL_UNKNOWN,
    CallerToolError.INVALID: Failure.ARGUMENTS_INVALID,
    CallerToolError.OVER_CAPACITY: Failure.RATE_LIMITED,
    CallerToolError.INTERNAL: Failure.INTERNAL,
}


def size_of(value: object) -> int:
    """Return the bytes of ``value`` as a frame contains it: compact JSON in ASCII, escapes included.

    Raises:
        ValueError: it holds a number that JSON cannot express.
    """
    return len(_ENCODER.encode(value))
