"""Guards every route: checks Host and Origin, and on ``/mcp`` the bearer token.

A web page can make its browser send requests to a loopback address under a name of the page's choice (DNS
rebinding); Host and Origin reveal that, on the WebSocket too. Must not know MCP or the nodes' protocol.
"""

import json
from dataclasses import dataclass
from functools import lru_cache

from starlette.types import ASGIApp, Receive, Scope, Send

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.auth.agent_tokens import Authenticator, Principal
from relay.auth.caller import CALLER_IN_SCOPE, Caller
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.http.connections import admit
from relay.observability.metrics import Metrics
from schemas.addresses import MCP_PATH, HostPort, is_loopback
from schemas.frames import CONNECT_PATH
from schemas.tokens import TokenError

_METADATA_ROOT = "/.well-known/oauth-protected-resource"
METADATA_PATH = _METADATA_ROOT + MCP_PATH
METADATA_PATHS = (METADATA_PATH, _METADATA_ROOT)
"""Where RFC 9728 puts the metadata of ``/mcp``, and where clients without a hint request it."""

METRICS_PATH = "/metrics"

_BEARER = "bearer "
_AUTHORIZATION = b"authorization"
_TRANSPORT = b"edge-transport"  # sent by the stdio bridge; for the access log alone
_NAMES = frozenset({b"host", b"origin"})  # host names: case-insensitive
_READ_HEADERS = _NAMES | {
    b"accept",
    _AUTHORIZATION,
    b"content-type",
    _TRANSPORT,
    b"mcp-method",
    b"mcp-name",
    b"mcp-protocol-version",
    b"mcp-session-id",
    b"traceparent",
}
TWICE = "\n"
"""The value of a header that was sent twice; a header sent once cannot have it."""

_CHALLENGED = SCOPE_OF_SAFETY_CLASS["read_only"]
"""The scope that a client without configuration requests (docs/decisions/0013)."""

_FROM_AN_ISSUER = "Send a bearer token. The metadata of this resource names the server that issues one."
_FROM_THE_OPERATOR = (
    "Send a bearer token in the header Authorization. The operator of this relay issues one with: "
    "relay token issue --sub NAME"
)
_REFUSED = "The token is not accepted."
_REFUSALS = {
    "expired": "The token has expired; get a new one.",
    "revoked": "The token has been revoked.",
    "not_yet": "The token is not valid yet.",
    "audience": "The token is for another resource.",
}
# No honest client causes these; an unknown path or a missing token is no attack.
_HOSTILE = frozenset({"host", "origin"})


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names that a request may have in Host: from this machine ``hosts``, from others ``public``.

    ``loopback`` are the names of this machine's loopback.
    """

    hosts: frozenset[str]
    public: frozenset[str]
    origins: frozenset[str]
    loopback: frozenset[str]

    @classmethod
    def of(cls, public_url: str, listen: HostPort, *, tls: bool = False) -> "AllowedHosts":
        """Return the names of a relay: its public one, and those of its loopback. ``tls``: it serves TLS."""
        scheme, _, public_host = public_url.partition("://")
        usual_port = {"http": "80", "https": "443"}[scheme]
        loopback = frozenset(f"{name}:{listen.port}" for name in ("127.0.0.1", "localhost", "[::1]"))
        local = "https" if tls else "http"
        origins = frozenset({public_url, *(f"{local}://{host}" for host in loopback)})
        public = frozenset({public_host, f"{public_host}:{usual_port}", str(listen)})
        return cls(loopback | public, public, origins, loopback)


class RequestGuard:
    """An ASGI application that passes requests to ``mcp``, ``node_sessions`` or ``other``.

    ``metadata_url`` is where a client without a token can read which authorization server to get one from;
    None without such a server.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        allowed: AllowedHosts,
        authenticator: Authenticator,
        metadata_url: str | None,
        metrics: Metrics,
        refusals: RefusalCounter,
        mcp: ASGIApp,
        node_sessions: ASGIApp,
        other: ASGIApp,
    ) -> None:
        self._allowed = allowed
        self._authenticator = authenticator
        self._metrics = metrics
        self._refusals = refusals
        self._mcp = mcp
        self._node_sessions = node_sessions
        self._other = other
        scope = f'scope="{_CHALLENGED}"'
        self._challenge = f'resource_metadata="{metadata_url}", {scope}' if metadata_url else scope
        # A client that is sent to an authorization server that does not exist shows its user that failure.
        self._how_to_get_one = _FROM_AN_ISSUER if metadata_url else _FROM_THE_OPERATOR

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, connection or lifespan."""
        if scope["type"] == "lifespan":
            await self._other(scope, receive, send)
            return
        # RFC 9110 section 5.5: white space around a value is not part of it. httptools keeps it after one.
        # In place: the server keeps this list for as long as the connection, and must keep no token either.
        scope["headers"][:] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        headers = _headers(scope)
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        if host not in (self._allowed.hosts if _is_local(scope) else self._allowed.public):
            await self._refuse(scope, send, 421, "host", "This server has another name.")
        elif origin is not None and origin not in self._allowed.origins:
            await self._refuse(scope, send, 403, "origin", "This origin may not use this server.")
        elif scope["path"] == METRICS_PATH and host not in self._allowed.loopback:
            # The same port is public: the relay's metrics are for its own machine.
            await self._refuse(scope, send, 404, "metrics", "Not found.")
        elif scope["type"] == "websocket":
            await self._to_node_sessions(scope, receive, send)
        elif scope["path"] == MCP_PATH:
            await self._to_mcp(headers, scope, receive, send)
        else:
            await self._other(scope, receive, send)

    async def _to_node_sessions(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without layers in between: thousands of these stay open, each with its layers.
        if scope["path"] == CONNECT_PATH:
            await self._node_sessions(scope, receive, send)
        else:
            await self._refuse(scope, send, 404, "websocket", "Not found.")

    async def _to_mcp(self, headers: dict[bytes, str], scope: Scope, receive: Receive, send: Send) -> None:
        # Two functions: the locals of this one live as long as a session or a stream, and must hold no token.
        principal = await self._identified(headers, scope, send)
        if principal is None:
            return
        if not admit(scope, principal.name):
            await self._refuse(scope, send, 429, "connections", "This agent holds too many connections.")
            return
        scope[CALLER_IN_SCOPE] = Caller(
            principal,
            transport="stdio" if headers.get(_TRANSPORT) == "stdio" else "http",
            headers=headers,
            query=scope["query_string"].decode("latin-1"),
        )
        await self._mcp(scope, receive, send)

    async def _identified(self, headers: dict[bytes, str], scope: Scope, send: Send) -> Principal | None:
        """Return who sent the request, by its token, which is taken out of it; None if it was refused."""
        authorization = headers.pop(_AUTHORIZATION, None)
        scope["headers"][:] = [line for line in scope["headers"] if line[0] != _AUTHORIZATION]
        if authorization == TWICE:
            self._refusals.count(RefusalEvent.TOKEN_REFUSED, _address(scope), "twice")
        if authorization is None or not authorization.lower().startswith(_BEARER):
            # RFC 6750 section 3.1: the answer to a request without credentials has no error code.
            await self._refuse(
                scope, send, 401, "no_token", self._how_to_get_one, f"Bearer {self._challenge}"
            )
            return None
        try:
            return await self._authenticator.recognise(authorization[len(_BEARER) :].strip())
        except TokenError as error:
            self._metrics.tokens_refused.labels(error.reason).inc()
            self._refusals.count(RefusalEvent.TOKEN_REFUSED, _address(scope), error.reason)
            text = _REFUSALS.get(error.reason, _REFUSED)
            challenge = f'Bearer error="invalid_token", error_description="{text}", {self._challenge}'
            await self._refuse(scope, send, 401, "token", text, challenge)
            return None

    async def _refuse(  # noqa: PLR0913, PLR0917 - the parts of one answer
        self, scope: Scope, send: Send, status: int, reason: str, text: str, challenge: str | None = None
    ) -> None:
        self._metrics.requests_refused.labels(reason).inc()
        if reason in _HOSTILE:
            self._refusals.count(RefusalEvent.REQUEST_REFUSED, _address(scope), reason)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        body = json.dumps({"error": reason, "message": text}).encode("ascii")
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        if challenge is not None:
            headers.append((b"www-authenticate", challenge.encode("ascii")))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def _is_local(scope: Scope) -> bool:
    """Return whether the request comes from this machine: only then may it use a loopback name."""
    return _is_loopback(_address(scope))


@lru_cache(maxsize=1024)
def _is_loopback(address: str) -> bool:
    # A few addresses repeat, and parsing one takes longer than the rest of the check.
    return is_loopback(address)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def _headers(scope: Scope) -> dict[bytes, str]:
    """Return the headers that are read here or behind, by name. One that was sent twice is ``TWICE``."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in _READ_HEADERS:
            text = value.decode("latin-1")
            text = text.lower() if name in _NAMES else text
            found[name] = text if name not in found else TWICE
    return found
