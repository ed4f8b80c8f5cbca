"""What a row of the table of failures consists of: the canonical codes, retries, and the row itself.

Must not contain a failure: those are in ``errors``.
"""

from dataclasses import dataclass
from enum import Enum


class Canonical(Enum):
    """The canonical codes; a value is ``(HTTP status, JSON-RPC code, message)``."""

    INVALID_INPUT = (400, -32602, "The request or its arguments are not valid.")
    INVALID_OUTPUT = (502, -32000, "The tool returned a result that is not valid.")
    NOT_FOUND = (404, -32601, "There is no such tool, or it is not available at the moment.")
    TIMEOUT = (504, -32003, "There was no answer in time, or no capacity for the call.")
    UNAUTHORIZED = (401, -32001, "The caller may not do this, or the node could not prove its identity.")
    INTERNAL_ERROR = (500, -32603, "An internal error occurred, or the node is not connected.")


class Retry(Enum):
    """Whether a retry can help, and whether a client may retry automatically."""

    NO = "no"
    YES = "yes"
    IF_IDEMPOTENT = "if the tool is idempotent"


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the table: a failure in each vocabulary."""

    code: str
    canonical: Canonical
    remote_tool: str
    retry: Retry
    message: str
    suggested_fix: str
    http_override: int | None = None

    @property
    def http_status(self) -> int:
        """The HTTP status, which follows the canonical code but for two overrides."""
        return self.http_override or self.canonical.value[0]

    @property
    def jsonrpc_code(self) -> int:
        """The JSON-RPC error code, which follows the canonical code."""
        return self.canonical.value[1]
