"""Guards every route: checks Host and Origin, and where MCP is served the bearer token.

A web page can make its browser send requests to a loopback address under a name of the page's choice (DNS
rebinding); Host and Origin reveal that, on the WebSocket too. Must not know MCP or the nodes' protocol.

Browser-based clients of this computer may use MCP, and what signs them in for it (CORS): a page that a
program on its user's computer serves, as MCP Inspector does in its direct mode. Its origin is a loopback
one, at any port; no page of the network has one, whatever it makes a browser resolve. A page may not read the
answer to a request with cookies, and no path that reads the cookie of a session is among the shared ones.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from attrs import define, field
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.auth.agent_tokens import CALLER_IN_SCOPE, Authenticator, Caller, Principal
from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.http.connections import CONNECTION_IN_STATE, AcceptedConnection, admit
from relay.http.front_page import Page, accepts_page
from relay.http.http_protocol import UNKNOWN_ADDRESS, PendingAnswer, WholeRequest
from relay.http.request_meter import RequestSource, Share, SourceKind, share_of
from relay.http.websocket_protocol import BoundedWebSocket, ServeSocket
from relay.observability.metrics import Metrics
from schemas.addresses import CONNECT_PATH, MCP_PATH, MCP_PATHS, HostPort, address_group, is_loopback
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
_NOT_ENOUGH = "Sign in again, and allow this."
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
    RATE = "rate"
    NO_TOKEN = "no_token"  # noqa: S105 - a reason, and no password
    TOKEN = "token"  # noqa: S105 - as above


# No honest client causes these; an unknown path or a missing token is no attack.
_HOSTILE = frozenset({RequestRefusal.HOST, RequestRefusal.ORIGIN})


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The names that a request may have in Host: from this machine ``hosts``, from others ``public``.

    ``metrics`` are those under which /metrics is answered here, too.
    """

    hosts: frozenset[str]
    public: frozenset[str]
    origins: frozenset[str]
    metrics: frozenset[str]

    @classmethod
    def of(
        cls, public_url: str, listen: HostPort, *, tls: bool = False, metrics: bool = False
    ) -> "AllowedHosts":
        """Return the names of a relay: its public one, and those of its loopback.

        ``tls``: it serves TLS; ``metrics``: /metrics is answered under the latter.
        """
        scheme, _, public_host = public_url.partition("://")
        usual_port = {"http": "80", "https": "443"}[scheme]
        loopback = frozenset(f"{name}:{listen.port}" for name in ("127.0.0.1", "localhost", "[::1]"))
        local = "https" if tls else "http"
        origins = frozenset({public_url, *(f"{local}://{host}" for host in loopback)})
        public = frozenset({public_host, f"{public_host}:{usual_port}", str(listen)})
        return cls(loopback | public, public, origins, loopback if metrics else frozenset())


@define(eq=False, repr=False, kw_only=True)
class RequestGuard:
    """An ASGI application that passes requests to ``mcp`` or ``other``, and WebSockets to ``node_sessions``.

    ``metadata_of`` is the relay's URL, below which a client without a token can read which authorization
    server to get one from; None without such a server. ``page`` is what a browser gets where MCP is served.
    """

    _allowed: AllowedHosts
    _authenticator: Authenticator
    _metadata_of: str | None
    _metrics: Metrics
    _refusals: RefusalCounter
    _mcp: ASGIApp
    _node_sessions: ServeSocket
    _other: ASGIApp
    _mcp_direct: BeginMcp | None = None
    _page: Page | None = None
    _challenges: dict[str, str] = field(init=False)
    _sign_in: ASGIApp | None = field(init=False, default=None)
    _sign_in_paths: frozenset[str] = field(init=False, default=frozenset())
    _shared_paths: frozenset[str] = field(init=False, default=frozenset())

    def __attrs_post_init__(self) -> None:
        self._challenges = {path: _challenge(path, self._metadata_of) for path in MCP_PATHS}

    def begin_sign_in(
        self, application: ASGIApp, paths: frozenset[str], shared: frozenset[str], public_url: str, page: Page
    ) -> None:
        """Pass requests for ``paths`` to ``application`` from now on, and name its metadata in challenges.

        ``shared``: those of them that browser-based clients use, besides MCP and its metadata.
        """
        self._sign_in, self._sign_in_paths = application, paths
        self._shared_paths = frozenset({*shared, *METADATA_PATHS, *MCP_PATHS})
        self._metadata_of, self._page = public_url, page
        self.__attrs_post_init__()

    def challenge_to_more(self, path: str) -> str:
        """Return the challenge for a caller of ``path`` whose token is good, and allows too little."""
        return (
            f'Bearer error="insufficient_scope", error_description="{_NOT_ENOUGH}", {self._challenges[path]}'
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._other(scope, receive, send)
            return
        # In place: the server keeps this list for as long as the connection, and must keep no token either.
        scope["headers"][:] = [(name, value.strip(b" \t")) for name, value in scope["headers"]]
        headers = _headers(scope["headers"])
        is_allowed, is_shared = self._has_allowed_origin(headers), False
        if not is_allowed and scope["path"] in self._shared_paths:
            is_shared = is_of_this_computer(headers[b"origin"])
            send = readable_by(headers[b"origin"], send) if is_shared else send
        if not self._has_allowed_host(headers, _address(scope)):
            await self._refuse(scope, send, 421, RequestRefusal.HOST, "This server has another name.")
        elif not (is_allowed or is_shared):
            await self._refuse(
                scope, send, 403, RequestRefusal.ORIGIN, "This origin may not use this server."
            )
        elif not self._is_within_rate(scope, headers):
            await self._refuse_rate(scope, send)
        elif is_shared and scope["method"] == "OPTIONS":
            await answer_preflight(send)
        elif scope["path"] == METRICS_PATH and headers[b"host"] not in self._allowed.metrics:
            # The same port is public, and a proxy on this machine makes strangers' requests its own.
            await self._refuse(scope, send, 404, RequestRefusal.METRICS, "Not found.")
        elif scope["path"] in self._challenges:
            await self._to_mcp(headers, scope, receive, send)
        elif self._sign_in is not None and scope["path"] in self._sign_in_paths:
            await self._sign_in(scope, receive, send)
        else:
            await self._other(scope, receive, send)

    def begin(self, request: WholeRequest) -> PendingAnswer | None:
        """Return what answers ``request``, which passes every check of ``__call__``; None if ASGI serves it.

        The connection counts towards its agent from now on: a proxy uses one for several.
        """
        headers = _headers(request.headers)
        if not (self._has_allowed_host(headers, request.address) and self._has_allowed_origin(headers)):
            return None
        authorization = headers.pop(_AUTHORIZATION, "")
        if self._mcp_direct is None or not authorization.lower().startswith(_BEARER):
            return None
        try:
            principal = self._authenticator.identify(authorization[len(_BEARER) :].strip())
        except TokenError:
            return None
        if not request.connection.may_admit(principal.name):
            return None  # ASGI rejects it, and counts that
        request.connection.admit(principal.name)
        is_metered = request.connection.source is not None  # before it was parsed
        if not is_metered and not request.connection.meter.has(_of_agent(principal), Share.REQUESTS, 1):
            return None  # ASGI refuses it: what is begun below has to be run
        path, size = request.path.decode("ascii"), len(request.body)
        pending = self._mcp_direct(_caller(principal, headers, path, request.query, size), request.body)
        if pending is not None and not is_metered:
            _within_agents_rate(request.connection, principal)  # charges it, as ASGI does what it serves
        return pending

    async def serve_socket(self, socket: BoundedWebSocket) -> None:
        """Serve a WebSocket on the path of the nodes; refuse any other, and what a web page may have sent."""
        if (refusal := self._refusal_of(socket)) is None:
            await self._node_sessions(socket)
        else:
            self._count(refusal, socket.address)
            socket.reject()

    def _is_within_rate(self, scope: Scope, headers: Mapping[bytes, str]) -> bool:
        """Charge a request that a proxy forwards: to its agent if that is known by its token, or its address.

        It does not wait: the connection is the proxy's, which sends other clients' requests behind it.
        """
        connection: AcceptedConnection | None = scope.get("state", {}).get(CONNECTION_IN_STATE)
        if connection is None or connection.source is not None:
            return True  # metered before it was parsed
        authorization = headers.get(_AUTHORIZATION, "")
        known = None
        if authorization.lower().startswith(_BEARER):
            known = self._authenticator.known(authorization[len(_BEARER) :].strip())
        source = (
            RequestSource.of_group(address_group(_address(scope)))
            if known is None
            else RequestSource(SourceKind.AGENT, known.name)
        )
        share = share_of(b"%b %b " % (scope["method"].encode("ascii"), scope["raw_path"]))
        return connection.meter.take(source, share, 1)

    def _refusal_of(self, socket: BoundedWebSocket) -> RequestRefusal | None:
        # A function of its own: the headers would live as long as the session.
        headers = _headers(socket.headers)
        if not self._has_allowed_host(headers, socket.address):
            return RequestRefusal.HOST
        if not self._has_allowed_origin(headers):
            return RequestRefusal.ORIGIN
        return None if socket.path == CONNECT_PATH else RequestRefusal.WEBSOCKET

    def _has_allowed_host(self, headers: Mapping[bytes, str], address: str) -> bool:
        # Only requests from this machine may use a loopback name.
        allowed = self._allowed.hosts if _is_loopback(address) else self._allowed.public
        return headers.get(b"host", "") in allowed

    def _has_allowed_origin(self, headers: Mapping[bytes, str]) -> bool:
        origin = headers.get(b"origin")
        return origin is None or origin in self._allowed.origins

    async def _to_mcp(self, headers: dict[bytes, str], scope: Scope, receive: Receive, send: Send) -> None:
        # Two functions: the locals of this one live as long as a session or a stream, and must hold no token.
        principal = await self._identified(headers, scope, send)
        if principal is None:
            return
        connection: AcceptedConnection | None = scope.get("state", {}).get(CONNECTION_IN_STATE)
        was_held = connection is None or connection.source is None or connection.holder == principal.name
        if not admit(scope, principal.name):
            await self._refuse(
                scope, send, 429, RequestRefusal.CONNECTIONS, "This agent holds too many connections."
            )
            return
        # Its address was charged; an agent must not have more by opening a connection for each request.
        if connection is not None and not (was_held or _within_agents_rate(connection, principal)):
            await self._refuse_rate(scope, send)
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

    async def _refuse(
        self,
        scope: Scope,
        send: Send,
        status: int,
        reason: RequestRefusal,
        text: str,
        *headers: tuple[bytes, bytes],
    ) -> None:
        self._count(reason, _address(scope))
        await _send_json(send, status, {"error": reason, "message": text}, *headers)

    async def _refuse_rate(self, scope: Scope, send: Send) -> None:
        retry = b"retry-after", b"1"
        await self._refuse(scope, send, 429, RequestRefusal.RATE, "Too many requests at once.", retry)

    def _count(self, reason: RequestRefusal, address: str) -> None:
        self._metrics.requests_refused.labels(reason).inc()
        if reason in _HOSTILE:
            self._refusals.count(RefusalEvent.REQUEST_REFUSED, address, reason)


def _of_agent(principal: Principal) -> RequestSource:
    return RequestSource(SourceKind.AGENT, principal.name)


def _within_agents_rate(connection: AcceptedConnection, principal: Principal) -> bool:
    return connection.meter.take(_of_agent(principal), Share.REQUESTS, 1)


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
    return client[0] if client else UNKNOWN_ADDRESS


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


_LOOPBACK = re.compile(r"https?://(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?")
_VARIES = b"vary", b"origin"
_READABLE = b"access-control-expose-headers", b"www-authenticate, mcp-session-id, retry-after"
_SENT = (
    b"authorization",
    b"content-type",
    b"last-event-id",
    b"mcp-method",
    b"mcp-name",
    b"mcp-protocol-version",
    b"mcp-session-id",
)
_PREFLIGHT = (
    (b"access-control-allow-methods", b"GET, POST, DELETE"),
    (b"access-control-allow-headers", b", ".join(_SENT)),
    (b"access-control-max-age", b"600"),
)


def is_of_this_computer(origin: str) -> bool:
    """Return whether ``origin`` is of a page that a program on the user's own computer serves.

    >>> is_of_this_computer("http://localhost:6274"), is_of_this_computer("http://localhost.evil.example")
    (True, False)
    """
    return _LOOPBACK.fullmatch(origin) is not None


def readable_by(origin: str, send: Send) -> Send:
    """Return ``send``, with what lets pages of ``origin`` read the answer."""
    headers = ((b"access-control-allow-origin", origin.encode("ascii")), _READABLE, _VARIES)

    async def send_readable(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *headers]}
        await send(message)

    return send_readable


async def answer_preflight(send: Send) -> None:
    """Answer a browser that asks whether a page may send its request."""
    await send({"type": "http.response.start", "status": 204, "headers": list(_PREFLIGHT)})
    await send({"type": "http.response.body", "body": b""})
