"""The caller of a request: identified once by the request guard, and used by everything behind it.

Holds no bearer token: what a token proved is all that is kept of it. Must not decide what a caller may do.
"""

from collections.abc import Mapping
from typing import NamedTuple

from relay.auth.agent_tokens import Principal
from schemas.addresses import MCP_PATH

CALLER_IN_SCOPE = "edge.caller"
"""Where the guard puts the ``Caller`` of an HTTP request."""


class Caller(NamedTuple):
    """The caller of one request.

    Attributes:
        principal: who it is, as the token proved it; its ``jti`` is the token's id.
        transport: ``http``, or ``stdio`` where a bridge says so. For logs alone.
        headers: the request's headers that are read behind the guard, by lower-case name.
        query: the URL's query, unparsed.
        size: bytes of the request's body; 0 until it was read.
        path: the URL's path, one of MCP.
    """

    principal: Principal
    transport: str
    headers: Mapping[bytes, str]
    query: str = ""
    size: int = 0
    path: str = MCP_PATH

    def with_size(self, size: int) -> "Caller":
        """Return the caller of the same request, whose body has been read."""
        return self._replace(size=size)

    @property
    def traceparent(self) -> str | None:
        """The request's trace (W3C Trace Context); not validated."""
        return self.headers.get(b"traceparent")

    @property
    def correlation_id(self) -> str | None:
        """The id that the caller gave to what it requests; not validated."""
        return self.headers.get(b"x-correlation-id")
