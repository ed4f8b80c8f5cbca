"""The errors of remote calls: one type for each word of SPEC-0004 section 3.3.

    RemoteToolError
    ├── ToolTimeout             no answer within the deadline; the call may have run
    ├── ToolUnauthorized        refused, by a local check or by the server
    ├── ToolNotFound            the server has no such tool
    ├── ToolInvalidArguments    the arguments do not fit the tool's input schema
    └── ToolProviderFailure     everything else: the server, the network, or a result that is not valid

Must not contain text from outside unless it is printable, short and redacted.
"""

from enum import StrEnum

from schemas.error_roots import EdgeError


class Reason(StrEnum):
    """Why a call was refused or failed: for audit records, and for programs that handle the error."""

    # Refused here: nothing of the call was sent.
    CORRELATION_ID = "correlation_id"
    ALLOWLIST = "allowlist"
    RISK = "risk"
    SCOPE = "scope"
    BUDGET = "budget"
    PIN = "pin"
    MANIFEST = "manifest"
    CONTRACT = "contract"
    UNLISTED = "unlisted"
    ARGUMENTS = "arguments"
    # Failed on the way.
    CREDENTIAL = "credential"
    UNREACHABLE = "unreachable"
    CONNECTION_LOST = "connection_lost"
    SECOND_SEND = "second_send"
    TOO_LARGE = "too_large"
    PROTOCOL = "protocol"
    DEADLINE = "deadline"
    CANCELLED = "cancelled"
    # The server answered.
    HTTP_STATUS = "http_status"
    JSONRPC_ERROR = "jsonrpc_error"
    TOOL_ERROR = "tool_error"
    RESULT = "result"


REFUSALS = frozenset(
    {
        Reason.ALLOWLIST,
        Reason.RISK,
        Reason.SCOPE,
        Reason.BUDGET,
        Reason.PIN,
        Reason.MANIFEST,
        Reason.CONTRACT,
        Reason.UNLISTED,
        Reason.ARGUMENTS,
        Reason.CORRELATION_ID,
    }
)
"""The decisions of this client. A call that ends before it is sent for another reason was not refused."""


class RemoteToolError(EdgeError):
    """A remote call that was refused or has failed.

    Attributes:
        reason: why.
        correlation_id: the call's own, as in its audit records.
        retryable: whether the same call may succeed later and can safely be made again.
        suggested_fix: what to do, one sentence.
        code: the remote code, if the server sent one: an ``E_...`` of a relay, or a JSON-RPC or HTTP number.
        remote_correlation_id: the id under which the server recorded the call, if it sent one.
        retry_after_ms: when the server permits the next attempt, in milliseconds from now.
        may_have_run: whether the tool may have run. False only if it certainly did not.
    """

    def __init__(  # noqa: PLR0913 - what a caller needs to know, each by its name
        self,
        message: str,
        *,
        reason: Reason,
        suggested_fix: str,
        retryable: bool = False,
        may_have_run: bool = False,
        code: str | int | None = None,
        remote_correlation_id: str | None = None,
        retry_after_ms: int | None = None,
        correlation_id: str = "",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.suggested_fix = suggested_fix
        self.retryable = retryable
        self.may_have_run = may_have_run
        self.code = code
        self.remote_correlation_id = remote_correlation_id
        self.retry_after_ms = retry_after_ms
        self.correlation_id = correlation_id


class ToolTimeout(RemoteToolError):  # noqa: N818 - the seed's names
    """No answer within the deadline; the call may have run."""


class ToolUnauthorized(RemoteToolError):  # noqa: N818 - as above
    """A local check or the server refused the call."""


class ToolNotFound(RemoteToolError):  # noqa: N818 - as above
    """The server has no such tool."""


class ToolInvalidArguments(RemoteToolError):  # noqa: N818 - as above
    """The arguments do not fit the tool's input schema."""


class ToolProviderFailure(RemoteToolError):  # noqa: N818 - as above
    """The server, the network or the result failed."""


ERROR_TYPES: dict[str, type[RemoteToolError]] = {
    "timeout": ToolTimeout,
    "unauthorized": ToolUnauthorized,
    "tool_not_found": ToolNotFound,
    "invalid_arguments": ToolInvalidArguments,
    "provider_failure": ToolProviderFailure,
}
"""The types by the words of the specification, and of ``schemas.errors``."""
