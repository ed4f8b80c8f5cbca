"""The agent runtime's side of remote tools: a guarded client for any MCP server.

Usable alone, with the extra ``[client]``. Must not import the relay's server parts or other packages.
"""

from relay.client.remote_tools.admission import Budget, Permissions
from relay.client.remote_tools.audit import AuditFailedError, AuditRecord, AuditSink, JsonLines
from relay.client.remote_tools.client import (
    ClientEnvironment,
    RemoteTools,
    RetryPolicy,
    Surveyed,
    ToolResult,
)
from relay.client.remote_tools.contracts import Risk, RiskSource, ToolContract, ToolRule
from relay.client.remote_tools.errors import (
    Reason,
    RemoteToolError,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolTimeout,
    ToolUnauthorized,
)
from relay.client.remote_tools.redaction import Redaction
from relay.client.remote_tools.servers import BearerToken, ClientCredentials, HttpServer, StdioServer

__all__ = [
    "AuditFailedError",
    "AuditRecord",
    "AuditSink",
    "BearerToken",
    "Budget",
    "ClientCredentials",
    "ClientEnvironment",
    "HttpServer",
    "JsonLines",
    "Permissions",
    "Reason",
    "Redaction",
    "RemoteToolError",
    "RemoteTools",
    "RetryPolicy",
    "Risk",
    "RiskSource",
    "StdioServer",
    "Surveyed",
    "ToolContract",
    "ToolInvalidArguments",
    "ToolNotFound",
    "ToolProviderFailure",
    "ToolResult",
    "ToolRule",
    "ToolTimeout",
    "ToolUnauthorized",
]
