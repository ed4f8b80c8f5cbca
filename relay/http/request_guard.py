"""Guards every route: checks Host and Origin, and where MCP is served the bearer token.

A web page can make its browser send requests to a loopback address under a name of the page's choice (DNS
rebinding); Host and Origin reveal that, on the WebSocket too. Must not know MCP or the nodes' protocol.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from attrs import define, field
from starlette.types import ASGIApp, Receive, Scope, Send

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.auth.agent_tokens import CALLER_IN_SCOPE, Authenticator, Caller, Principal
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.http.connections import admit
from relay.http.front_page import Page, accepts_page
from relay.http.http_protocol import PendingAnswer, WholeRequest
from relay.observability.metrics import Metrics
from schemas.addresses import CONNECT_PATH, MCP_PATH, MCP_PATHS, HostPort, is_loopback
from schemas.errors import Failure, ToolError
from schemas.payloads import ErrorEnvelope
from schemas.tokens import TokenError

_METADATA_ROOT = "/.well-known/oauth-protected-resource"
METADATA_PATHS = {_METADATA_ROOT: MCP_PATH, **{_METADATA_ROOT + path: path for path in MCP_PATHS}}
"""Where RFC 9728 puts the metadata of each path of MCP, and where clients without a hint request it."""

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
    b"x-correlation-id",
}
TWICE = "\n"
"""The value of a header that was sent twice; a header sent once cannot have it."""

BeginMcp = Callable[[Caller, bytes], PendingAnswer | None]
"""Returns what answers a request of that caller with that body, or None if ASGI has to serve it."""

_CHALLENGED = SCOPE_OF_SAFETY_CLASS["read_only"]
"""The scope that a client without configuration requests (docs/decisions/0013)."""

_FROM_AN_ISSUER = "Send a bearer token. The metadata of this resource names the server that issues one."
_FROM_THE_OPERATOR = (
    "Send a bearer token in the header Authorization. The operator of this relay issues one with: "
    "relay token issue --sub NAME"
)
_NO_TOKEN = "The request has no bearer token."  # noqa: S105 - a sentence
_REFUSALS = {
    "expired": "The token has expired.",
    "revoked": "The token has been revoked.",
    "not_yet": "The token is not valid yet.",
    "audience": "The token is for another resource.",
}


class RequestRefusal(StrEnum):
    """Why a request is refused: the label of a counter, and but for 401 the ``error`` of the answer."""

    HOST = "host"
    ORIGIN = "origin"
    METRICS = "metrics"
    WEBSOCKET = "websocket"
    CONNECTIONS = "connections"
    NO_TOKEN = "no_token"  # noqa: S105 - a reason, and no password
    TOKEN = "token"  # noqa: S105 - as above


# No honest client causes these; an unknown path or a missing token is no attack.
_HOSTILE = frozenset({RequestRefusal.HOST, RequestRefusal.ORIGIN})


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


@define(eq=False, repr=False, kw_only=True)
class RequestGuard:
    """An ASGI application that passes requests to ``mcp``, ``node_sessions`` or ``other``.

    ``metadata_of`` is the relay's URL, below which a client without a token can read which authorization
    server to get one from; None without such a server. ``page`` is what a browser gets where MCP is served.
    """

    _allowed: AllowedHosts
    _authenticator: Authenticator
    _metadata_of: str | None
    _metrics: Metrics
    _refusals: RefusalCounter
    _mcp: ASGIApp
    _node_sessions: ASGIApp
    _other: ASGIApp
    _mcp_direct: BeginMcp | None = None
    _page: Page | None = None
    _challenges: dict[str, str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._challenges = {path: _challenge(path, self._metadata_of) for path in MCP_PATHS}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._other(scope, receive, send)
            return
        # In place: the server keeps this list for as long as the connection, and must keep no token either.
        scope["headers"][:] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        headers = _headers(scope["headers"])
        if not self._has_allowed_host(headers, _address(scope)):
            await self._refuse(scope, send, 421, RequestRefusal.HOST, "This server has another name.")
        elif not self._has_allowed_origin(headers):
            await self._refuse(
                scope, send, 403, RequestRefusal.ORIGIN, "This origin may not use this server."
            )
        elif scope["path"] == METRICS_PATH and headers[b"host"] not in self._allowed.loopback:
            # The same port is public: the relay's metrics are for its own machine.
            await self._refuse(scope, send, 404, RequestRefusal.METRICS, "Not found.")
        elif scope["type"] == "websocket":
            headers.clear()  # not needed any more, and the session lasts
            await self._to_node_sessions(scope, receive, send)
        elif scope["path"] in self._challenges:
            await self._to_mcp(headers, scope, receive, send)
        else:
            await self._other(scope, receive, send)

    def begin(self, request: WholeRequest) -> PendingAnswer | None:
        """Return what answers ``request``, which passes every check of ``__call__``; None if ASGI serves it.

        The connection counts towards its agent from now on: a proxy uses one for several.
        """
        headers = _headers(request.headers)
        if self._mcp_direct is None:
            return None
        if not (self._has_allowed_host(headers, request.address) and self._has_allowed_origin(headers)):
            return None
        authorization = headers.pop(_AUTHORIZATION, "")
        if not authorization.lower().startswith(_BEARER):
            return None
        try:
            principal = self._authenticator.identify(authorization[len(_BEARER) :].strip())
        except TokenError:
            return None
        if not request.connection.may_admit(principal.name):
            return None  # ASGI rejects it, and counts that
        request.connection.admit(principal.name)
        path, size = request.path.decode("ascii"), len(request.body)
        return self._mcp_direct(_caller(principal, headers, path, request.query, size), request.body)

    def _has_allowed_host(self, headers: Mapping[bytes, str], address: str) -> bool:
        # Only requests from this machine may use a loopback name.
        allowed = self._allowed.hosts if _is_loopback(address) else self._allowed.public
        return headers.get(b"host", "") in allowed

    def _has_allowed_origin(self, headers: Mapping[bytes, str]) -> bool:
        origin = headers.get(b"origin")
        return origin is None or origin in self._allowed.origins

    async def _to_node_sessions(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Without layers in between: thousands of these stay open, each with its layers.
        if scope["path"] == CONNECT_PATH:
            await self._node_sessions(scope, receive, send)
        else:
            await self._refuse(scope, send, 404, RequestRefusal.WEBSOCKET, "Not found.")

    async def _to_mcp(self, headers: dict[bytes, str], scope: Scope, receive: Receive, send: Send) -> None:
        # Two functions: the locals of this one live as long as a session or a stream, and must hold no token.
        principal = await self._identified(headers, scope, send)
        if principal is None:
            return
        if not admit(scope, principal.name):
            await self._refuse(
                scope, send, 429, RequestRefusal.CONNECTIONS, "This agent holds too many connections."
            )
            return
        scope[CALLER_IN_SCOPE] = _caller(principal, headers, scope["path"], scope["query_string"])
        await self._mcp(scope, receive, send)

    async def _identified(self, headers: dict[bytes, str], scope: Scope, send: Send) -> Principal | None:
        """Return who sent the request, by its token, which is taken out of it; None if it was refused."""
        authorization = headers.pop(_AUTHORIZATION, None)
        address, counted_as = _address(scope), None
        scope["headers"][:] = [line for line in scope["headers"] if line[0] != _AUTHORIZATION]
        if authorization == TWICE:
            event, reason = RefusalEvent.TOKEN_REFUSED, RefusalReason.TOKEN_TWICE
            counted_as = self._refusals.count_with_id(event, address, reason)
        if authorization is None or not authorization.lower().startswith(_BEARER):
            # RFC 6750 section 3.1: the answer to a request without credentials has no error code.
            if self._page is not None and accepts_page(headers.get(b"accept", "")):
                self._metrics.requests_refused.labels(RequestRefusal.NO_TOKEN).inc()
                await _send(send, 401, self._page.body, *self._page.headers, self._challenge_to(scope))
                return None
            denied = ToolError(Failure.TOKEN_REFUSED, _NO_TOKEN, fix=self._how_to_get_one())
            envelope = denied.envelope(counted_as)
            await self._challenged(scope, send, RequestRefusal.NO_TOKEN, envelope, "")
            return None
        try:
            return await self._authenticator.recognise(authorization[len(_BEARER) :].strip())
        except TokenError as error:
            self._metrics.tokens_refused.labels(error.reason).inc()
            counted_as = self._refusals.count_with_id(RefusalEvent.TOKEN_REFUSED, address, error.reason)
            text = _REFUSALS.get(error.reason, Failure.TOKEN_REFUSED.value.message)
            envelope = ToolError(Failure.TOKEN_REFUSED, text, fix=self._how_to_get_one()).envelope(counted_as)
            error_of_challenge = f'error="invalid_token", error_description="{text}", '
            await self._challenged(scope, send, RequestRefusal.TOKEN, envelope, error_of_challenge)
            return None

    def _how_to_get_one(self) -> str:
        # A client that is sent to an authorization server that does not exist shows its user that failure.
        return _FROM_AN_ISSUER if self._metadata_of else _FROM_THE_OPERATOR

    async def _challenged(
        self, scope: Scope, send: Send, reason: RequestRefusal, envelope: ErrorEnvelope, error: str
    ) -> None:
        """Answer 401 with ``envelope`` (RFC-0005 section 8), and the challenge of RFC 6750 with ``error``."""
        self._metrics.requests_refused.labels(reason).inc()
        await _send_json(send, 401, envelope, self._challenge_to(scope, error))

    def _challenge_to(self, scope: Scope, error: str = "") -> tuple[bytes, bytes]:
        return b"www-authenticate", f"Bearer {error}{self._challenges[scope['path']]}".encode("ascii")

    async def _refuse(self, scope: Scope, send: Send, status: int, reason: RequestRefusal, text: str) -> None:
        self._metrics.requests_refused.labels(reason).inc()
        if reason in _HOSTILE:
            self._refusals.count(RefusalEvent.REQUEST_REFUSED, _address(scope), reason)
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": ""})
            return
        await _send_json(send, status, {"error": reason, "message": text})


async def _send_json(
    send: Send, status: int, value: Mapping[str, object], *headers: tuple[bytes, bytes]
) -> None:
    await _send(
        send, status, json.dumps(value).encode("ascii"), (b"content-type", b"application/json"), *headers
    )


async def _send(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    sized = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [*headers, sized]})
    await send({"type": "http.response.body", "body": body})


@lru_cache(maxsize=1024)
def _is_loopback(address: str) -> bool:
    # A few addresses repeat, and parsing one takes longer than the rest of the check.
    return is_loopback(address)


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return client[0] if client else "unknown"


def _challenge(path: str, metadata_of: str | None) -> str:
    scope = f'scope="{_CHALLENGED}"'
    return f'resource_metadata="{metadata_of}{_METADATA_ROOT}{path}", {scope}' if metadata_of else scope


def _caller(
    principal: Principal, headers: Mapping[bytes, str], path: str, query: bytes, size: int = 0
) -> Caller:
    transport = "stdio" if headers.get(_TRANSPORT) == "stdio" else "http"
    return Caller(principal, transport, headers, query.decode("latin-1"), size, path)


def _headers(lines: Iterable[tuple[bytes, bytes]]) -> dict[bytes, str]:
    """Return the headers that are read here or behind, by name. One that was sent twice is ``TWICE``."""
    found: dict[bytes, str] = {}
    for name, value in lines:
        if name in _READ_HEADERS:
            # RFC 9110 section 5.5: white space around a value is not part of it; httptools keeps some.
            text = value.strip(b" \t").decode("latin-1")
            text = text.lower() if name in _NAMES else text
            found[name] = text if name not in found else TWICE
    return found
