import asyncio
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from relay.auth.agent_tokens import CALLER_IN_SCOPE, Caller
from relay.http.connections import CONNECTION_IN_STATE, AcceptedConnection
from relay.http.front_page import FrontPage
from relay.http.http_protocol import PendingAnswer, WholeRequest
from relay.http.request_guard import AllowedHosts, RequestGuard
from relay.http.websocket_protocol import BoundedWebSocket
from schemas.addresses import MCP_PATHS, HostPort
from schemas.registry import SchemaRegistry
from tests.fakes.hub import Hub
from tests.fakes.issuer import BOUND_S, TwoIssuers, outside_token
from tests.fakes.raw_http import HeldConnections
from tests.fakes.scripted_socket import ScriptedSocket

PUBLIC_URL = "https://relay.example"
LISTEN = HostPort("127.0.0.1", 8700)
METADATA = f"{PUBLIC_URL}/.well-known/oauth-protected-resource/mcp"
PAGE = FrontPage(PUBLIC_URL).page
Headers = Sequence[tuple[str, str]]


class Served:
    """An application that notes which requests reached it."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def lines(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]


class Bench:
    """A guard between an ASGI server and two applications."""

    def __init__(self, hub: Hub, *, metrics: bool = False) -> None:
        self.hub = hub
        self._begun: list[Caller] = []
        self.mcp, self.other = Served(), Served()
        self.sockets: list[BoundedWebSocket] = []
        self.guard = RequestGuard(
            allowed=AllowedHosts.of(PUBLIC_URL, LISTEN, metrics=metrics),
            authenticator=hub.authenticator,
            metadata_of=PUBLIC_URL,
            metrics=hub.metrics,
            refusals=hub.refusals,
            mcp=self.mcp,
            mcp_direct=self._begin,
            node_sessions=self._serve_socket,
            other=self.other,
            page=PAGE,
        )

    async def _serve_socket(self, socket: BoundedWebSocket) -> None:
        self.sockets.append(socket)

    async def connects(self, path: str, headers: Headers) -> bool:
        """Return whether a WebSocket is served; else it is refused."""
        socket = ScriptedSocket(address="127.0.0.1")
        socket.path, socket.headers = path, lines(headers)
        await self.guard.serve_socket(socket)
        assert socket.closes == ([] if self.sockets == [socket] else [403])
        return self.sockets == [socket]

    async def ask(self, path: str, headers: Headers, **more: Any) -> list[Message]:
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "client": ("127.0.0.1", 40000),
            "headers": lines(headers),
        }
        return await self.asked(scope | more)

    async def asked(self, scope: Scope) -> list[Message]:
        sent: asyncio.Queue[Message] = asyncio.Queue()

        async def receive() -> Message:
            raise AssertionError

        await self.guard(scope, receive, sent.put)
        return [sent.get_nowait() for _ in range(sent.qsize())]

    def begins(
        self, headers: Headers, address: str = "127.0.0.1", over: AcceptedConnection | None = None
    ) -> list[Caller]:
        """Return the caller of a whole request, if it is begun; by default another agent holds ``over``."""
        self._begun.clear()
        connection = over or HeldConnections().hold("another agent")
        self.guard.begin(WholeRequest(lines(headers), address, connection, b"/mcp", b"names=dashed", b"{}"))
        return list(self._begun)

    def _begin(self, caller: Caller, body: bytes) -> PendingAnswer | None:
        assert body == b"{}"
        self._begun.append(caller)
        return None

    async def status(self, path: str, headers: Headers) -> int:
        return int((await self.ask(path, headers))[0]["status"])

    async def reached(self, path: str, headers: Headers) -> bool:
        before = len(self.mcp.scopes) + len(self.other.scopes)
        await self.ask(path, headers)
        return len(self.mcp.scopes) + len(self.other.scopes) > before


@pytest.fixture
def bench(hub: Hub) -> Bench:
    return Bench(hub)


def challenge(messages: Iterable[Message]) -> tuple[int, str]:
    start = next(iter(messages))
    return start["status"], dict(start["headers"]).get(b"www-authenticate", b"").decode()


PUBLIC = ("Host", "relay.example")
LOOPBACK = ("Host", "127.0.0.1:8700")
GOOD_HOSTS = ["relay.example", "127.0.0.1:8700", "localhost:8700", "[::1]:8700"]
BAD_HOSTS = [
    pytest.param([("Host", "evil.example")], id="another name"),
    pytest.param([("Host", "relay.example.evil.example")], id="the name as a prefix"),
    pytest.param([("Host", "127.0.0.1")], id="loopback without the port"),
    pytest.param([("Host", "127.0.0.1:8701")], id="another port"),
    pytest.param([("Host", "127.0.0.2:8700")], id="another loopback address"),
    pytest.param([("Host", "")], id="empty"),
    pytest.param([], id="none"),
    pytest.param([PUBLIC, PUBLIC], id="twice"),
    pytest.param([PUBLIC, ("Host", "evil.example")], id="a good one, then another"),
    pytest.param([("Host", "evil.example"), PUBLIC], id="another, then a good one"),
]
BAD_ORIGINS = [
    pytest.param([("Origin", "https://evil.example")], id="another"),
    pytest.param([("Origin", "null")], id="null"),
    pytest.param([("Origin", "")], id="empty"),
    pytest.param([("Origin", "http://relay.example")], id="the name in the clear"),
    pytest.param([("Origin", "http://127.0.0.1:9999")], id="another program on this machine"),
    pytest.param([("Origin", PUBLIC_URL), ("Origin", PUBLIC_URL)], id="twice"),
]


@pytest.mark.parametrize("host", GOOD_HOSTS)
async def test_the_relay_answers_to_its_own_names(bench: Bench, host: str) -> None:
    assert await bench.reached("/devices/connect", [("Host", host)])
    assert await bench.connects("/devices/connect", [("Host", host)])


@pytest.mark.parametrize("headers", BAD_HOSTS)
@pytest.mark.parametrize("path", ["/mcp", "/healthz", "/metrics", "/devices/connect"])
async def test_a_request_under_another_name_is_misdirected(bench: Bench, headers: Headers, path: str) -> None:
    assert await bench.status(path, headers) == 421
    assert bench.mcp.scopes == bench.other.scopes == []
    assert bench.hub.counted("requests_refused_total", reason="host") == 1


@pytest.mark.parametrize("headers", BAD_HOSTS)
async def test_a_websocket_under_another_name_is_not_accepted(bench: Bench, headers: Headers) -> None:
    assert not await bench.connects("/devices/connect", headers)
    assert bench.hub.counted("requests_refused_total", reason="host") == 1


@pytest.mark.parametrize(
    "origin", [PUBLIC_URL, "http://127.0.0.1:8700", "http://localhost:8700", "http://[::1]:8700"]
)
async def test_pages_of_the_relay_itself_may_ask(bench: Bench, origin: str) -> None:
    assert await bench.status("/healthz", [PUBLIC, ("Origin", origin)]) == 200


@pytest.mark.parametrize("headers", BAD_ORIGINS)
@pytest.mark.parametrize("path", ["/mcp", "/healthz", "/devices/connect"])
async def test_a_page_from_elsewhere_is_refused_whatever_token_it_has(
    bench: Bench, headers: Headers, path: str
) -> None:
    token = ("Authorization", f"Bearer {bench.hub.token()}")
    assert await bench.status(path, [PUBLIC, token, *headers]) == 403
    assert bench.mcp.scopes == bench.other.scopes == []
    assert bench.hub.counted("requests_refused_total", reason="origin") == 1


@pytest.mark.parametrize("headers", BAD_ORIGINS)
async def test_a_websocket_of_a_page_from_elsewhere_is_not_accepted(bench: Bench, headers: Headers) -> None:
    assert not await bench.connects("/devices/connect", [PUBLIC, *headers])
    assert bench.hub.counted("requests_refused_total", reason="origin") == 1


# --- the token ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["Bearer", "bearer", "BEARER"])
async def test_a_good_token_reaches_mcp_and_goes_along(bench: Bench, word: str) -> None:
    token = bench.hub.token()
    assert await bench.status("/mcp", [PUBLIC, ("Authorization", f"{word} {token}")]) == 200
    (scope,) = bench.mcp.scopes
    caller = scope[CALLER_IN_SCOPE]
    assert caller.principal == bench.hub.authenticator.identify(token)
    assert caller.transport == "http"
    assert token.encode() not in repr(scope).encode()
    of_the_server = {"type", "method", "path", "query_string", "client", "headers"}
    assert scope.keys() - of_the_server == {CALLER_IN_SCOPE}


@pytest.mark.parametrize("token", ["good", "x.y.z"])
async def test_the_servers_own_list_of_headers_keeps_no_token(bench: Bench, token: str) -> None:
    authorization = f"Bearer {bench.hub.token() if token == 'good' else token}".encode()
    headers = [(b"host", b"relay.example"), (b"authorization", authorization)]
    await bench.asked({"type": "http", "path": "/mcp", "query_string": b"", "headers": headers})
    assert headers == [(b"host", b"relay.example")]


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([], id="none"),
        pytest.param([("Authorization", "")], id="empty"),
        pytest.param([("Authorization", "Basic dTpw")], id="another scheme"),
        pytest.param([("Authorization", "Bearer")], id="the word alone"),
    ],
)
async def test_without_a_token_the_challenge_says_where_to_learn_more_and_names_no_error(
    bench: Bench, headers: Headers
) -> None:
    for path in MCP_PATHS:
        status, text = challenge(await bench.ask(path, [PUBLIC, *headers]))
        metadata = METADATA.removesuffix("/mcp") + path
        assert status == 401
        assert text == f'Bearer resource_metadata="{metadata}", scope="tools:call:read_only"'
    assert bench.mcp.scopes == []


@pytest.mark.parametrize("path", MCP_PATHS)
async def test_a_browser_without_a_token_gets_the_page_and_the_challenge(bench: Bench, path: str) -> None:
    start, body = await bench.ask(path, [PUBLIC, ("Accept", "text/html,*/*;q=0.8")])
    headers = dict(start["headers"])
    assert (start["status"], body["body"]) == (401, PAGE.body)
    assert headers[b"content-type"] == b"text/html; charset=utf-8"
    assert headers[b"www-authenticate"].startswith(b"Bearer resource_metadata=")
    assert int(headers[b"content-length"]) == len(PAGE.body)
    assert bench.hub.counted("requests_refused_total", reason="no_token") == 1


@pytest.mark.parametrize(
    "path", ["/mcp/", "//mcp", "/MCP", "/mcp%2f", "/mcp/nodes", "/mcp/kinds/", "/MCP/kinds", "//mcp/kinds"]
)
async def test_other_paths_are_none_of_mcp(bench: Bench, path: str) -> None:
    await bench.ask(path, [PUBLIC, ("Authorization", f"Bearer {bench.hub.token()}")])
    assert (bench.mcp.scopes, len(bench.other.scopes)) == ([], 1)


@pytest.mark.parametrize("path", MCP_PATHS)
async def test_the_caller_has_the_path_that_it_has_requested(bench: Bench, path: str) -> None:
    await bench.ask(path, [PUBLIC, ("Authorization", f"Bearer {bench.hub.token()}")])
    assert bench.mcp.scopes[0][CALLER_IN_SCOPE].path == path


async def test_a_whole_request_with_a_good_token_is_begun(bench: Bench) -> None:
    token = bench.hub.token()
    principal = bench.hub.authenticator.identify(token)
    headers = [PUBLIC, ("Authorization", f"Bearer {token} \t"), ("Edge-Transport", "stdio")]
    (caller,) = bench.begins(headers)
    assert (caller.principal, caller.transport, caller.query, caller.size) == (
        principal,
        "stdio",
        "names=dashed",
        2,
    )
    assert token not in repr(caller)


@pytest.mark.parametrize(
    ("change", "address"),
    [
        pytest.param({"Host": "other.example"}, "127.0.0.1", id="another host"),
        pytest.param({"Host": "localhost:8700"}, "192.0.2.1", id="a loopback name from elsewhere"),
        pytest.param({"Origin": "https://other.example"}, "127.0.0.1", id="another origin"),
        pytest.param({"Authorization": ""}, "127.0.0.1", id="no token"),
        pytest.param({"Authorization": "Bearer x.y.z"}, "127.0.0.1", id="no good token"),
        pytest.param({"Authorization": "Basic eDp5"}, "127.0.0.1", id="another scheme"),
    ],
)
async def test_a_whole_request_that_would_be_rejected_is_left_to_asgi(
    bench: Bench, change: dict[str, str], address: str
) -> None:
    token = bench.hub.token()
    headers = dict([PUBLIC, ("Authorization", f"Bearer {token}")])
    assert len(bench.begins(list(headers.items()))) == 1
    assert bench.begins(list((headers | change).items()), address) == []
    assert bench.hub.counted("tokens_refused_total") == 0


@pytest.mark.parametrize("name", ["Authorization", "Host"])
async def test_a_whole_request_with_a_header_twice_is_left_to_asgi(bench: Bench, name: str) -> None:
    token = bench.hub.token()
    headers = [PUBLIC, ("Authorization", f"Bearer {token}")]
    twice = [*headers, *(line for line in headers if line[0] == name)]
    assert bench.begins(twice) == []


async def test_the_connection_of_a_whole_request_counts_towards_the_agent_that_has_sent_it(
    bench: Bench,
) -> None:
    token, held = bench.hub.token(), HeldConnections()
    agent = bench.hub.authenticator.identify(token).name
    shared = held.hold("another agent")
    (caller,) = bench.begins([PUBLIC, ("Authorization", f"Bearer {token}")], over=shared)
    assert caller.principal.name == shared.holder == agent
    for _ in range(held.per_holder):
        held.hold("another agent")


async def test_a_whole_request_of_an_agent_that_holds_too_many_connections_is_left_to_asgi(
    bench: Bench,
) -> None:
    token, held = bench.hub.token(), HeldConnections()
    agent = bench.hub.authenticator.identify(token).name
    own = [held.hold(agent) for _ in range(held.per_holder)]
    another = held.hold("another agent")
    headers = [PUBLIC, ("Authorization", f"Bearer {token}")]
    assert bench.begins(headers, over=another) == []
    assert another.holder == "another agent"
    assert held.refused() == 0  # ASGI rejects it, and counts that
    assert len(bench.begins(headers, over=own[0])) == 1


async def test_asgi_rejects_a_request_of_an_agent_that_holds_too_many_connections(bench: Bench) -> None:
    token, held = bench.hub.token(), HeldConnections()
    agent = bench.hub.authenticator.identify(token).name
    for _ in range(held.per_holder):
        held.hold(agent)
    headers = [PUBLIC, ("Authorization", f"Bearer {token}")]
    state = {CONNECTION_IN_STATE: held.hold("another agent")}
    assert (await bench.ask("/mcp", headers, state=state))[0]["status"] == 429
    assert bench.mcp.scopes == []


async def test_a_revoked_or_expired_token_begins_nothing(bench: Bench) -> None:
    revoked, expiring = bench.hub.token(), bench.hub.token(ttl_s=60)
    principal = bench.hub.authenticator.identify(revoked)
    headers = [[PUBLIC, ("Authorization", f"Bearer {token}")] for token in (revoked, expiring)]
    assert [len(bench.begins(lines)) for lines in headers] == [1, 1]
    bench.hub.authenticator.revoke(frozenset({principal.jti}))
    bench.hub.clock.advance(60_000)
    assert [len(bench.begins(lines)) for lines in headers] == [0, 0]


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        pytest.param("no-token", "malformed", id="not a token"),
        pytest.param("\xff.b.c", "malformed", id="not ASCII"),
        pytest.param("x" * 100_000, "malformed", id="enormous"),
    ],
)
async def test_a_token_that_is_not_accepted_is_challenged_as_invalid(
    bench: Bench, token: str, reason: str
) -> None:
    messages = await bench.ask("/mcp", [PUBLIC, ("Authorization", f"Bearer {token}")])
    status, text = challenge(messages)
    assert status == 401
    assert text == (
        'Bearer error="invalid_token", error_description="The token is not accepted.", '
        f'resource_metadata="{METADATA}", scope="tools:call:read_only"'
    )
    assert token.encode("latin-1") not in messages[1]["body"]
    assert bench.mcp.scopes == []
    assert bench.hub.counted("tokens_refused_total", reason=reason) == 1


async def test_a_token_that_has_expired_is_challenged_as_invalid(bench: Bench) -> None:
    header = ("Authorization", f"Bearer {bench.hub.token(ttl_s=60)}")
    assert await bench.status("/mcp", [PUBLIC, header]) == 200
    bench.hub.clock.advance(60_000)
    messages = await bench.ask("/mcp", [PUBLIC, header])
    status, text = challenge(messages)
    assert status == 401
    assert text.startswith('Bearer error="invalid_token", error_description="The token has expired."')
    assert json.loads(messages[1]["body"])["message"] == "The token has expired."


@pytest.mark.holds("RFC-0005/8/errors")
async def test_a_revoked_token_is_challenged_by_the_standard_envelope_whose_id_is_in_the_audit(
    bench: Bench, registry: SchemaRegistry
) -> None:
    token = bench.hub.token()
    bench.hub.authenticator.revoke(frozenset({bench.hub.authenticator.identify(token).jti}))
    headers = [PUBLIC, ("Authorization", f"Bearer {token}")]
    answers = [await bench.ask("/mcp", headers) for _ in range(2)]
    status, text = challenge(answers[0])
    assert status == 401
    assert text.startswith('Bearer error="invalid_token", error_description="The token has been revoked."')
    assert bench.hub.counted("tokens_refused_total", reason="revoked") == 2
    bodies = [body["body"] for _, body in answers]
    envelope = json.loads(bodies[0])
    assert registry.load("error@1.0.0").is_valid(envelope)
    assert (envelope["code"], envelope["message"]) == ("E_SAFETY_DENIED", "The token has been revoked.")
    assert "Send a bearer token" in envelope["suggested_fix"]
    bench.hub.refusals.write()
    (line,) = bench.hub.audited()
    assert (line["event"], line["reason"], line["count"]) == ("token_refused", "revoked", 2)
    assert bodies[0] == bodies[1]
    assert line["correlation_id"] == envelope["correlation_id"]
    later = json.loads((await bench.ask("/mcp", headers))[1]["body"])
    assert later["correlation_id"] != envelope["correlation_id"]  # of the next line


async def test_a_request_without_a_token_is_answered_with_the_envelope_too_and_no_id(
    bench: Bench, registry: SchemaRegistry
) -> None:
    envelope = json.loads((await bench.ask("/mcp", [PUBLIC]))[1]["body"])
    assert registry.load("error@1.0.0").is_valid(envelope)
    assert envelope["code"] == "E_SAFETY_DENIED"
    assert "correlation_id" not in envelope  # it is in no line of the audit


@pytest.mark.integration
async def test_the_first_token_of_a_new_key_of_the_outside_issuer_gets_through(
    hub: Hub, registry: SchemaRegistry
) -> None:
    async with TwoIssuers.running(registry) as world, asyncio.timeout(BOUND_S):
        hub.authenticator = world.authenticator
        bench = Bench(hub)
        header = ("Authorization", f"Bearer {outside_token()}")
        assert await bench.status("/mcp", [PUBLIC, header]) == 200
        assert await bench.status("/mcp", [PUBLIC, header]) == 200
        assert world.fetches == 1
        stranger = ("Authorization", f"Bearer {outside_token(kid='unknown')}")
        assert await bench.status("/mcp", [PUBLIC, stranger]) == 401
        assert world.fetches == 1
    assert hub.counted("tokens_refused_total", reason="unknown_key") == 1


@pytest.mark.parametrize(
    "path",
    [
        "/healthz",
        "/schemas/",
        "/.well-known/oauth-protected-resource/mcp",
        "/.well-known/oauth-protected-resource",
    ],
)
async def test_public_routes_need_no_token(bench: Bench, path: str) -> None:
    assert await bench.status(path, [PUBLIC]) == 200
    assert bench.mcp.scopes == []


@pytest.mark.parametrize("path", ["/mcp", "/devices/connect/", "/"])
async def test_there_is_no_other_websocket(bench: Bench, path: str) -> None:
    assert not await bench.connects(path, [PUBLIC])


async def test_the_nodes_path_is_for_websockets_only(bench: Bench) -> None:
    await bench.ask("/devices/connect", [PUBLIC])
    assert bench.sockets == []


# --- metrics and life ---------------------------------------------------------------------------------


LOOPBACK_NAMES = ["127.0.0.1:8700", "localhost:8700", "[::1]:8700"]


@pytest.mark.parametrize("host", LOOPBACK_NAMES)
async def test_metrics_are_there_on_loopback_where_that_is_still_allowed(hub: Hub, host: str) -> None:
    assert await Bench(hub, metrics=True).status("/metrics", [("Host", host)]) == 200


async def test_metrics_do_not_exist_under_the_public_name(hub: Hub) -> None:
    bench, token = Bench(hub, metrics=True), ("Authorization", f"Bearer {hub.token()}")
    assert await bench.status("/metrics", [PUBLIC, token]) == 404
    assert bench.other.scopes == []


@pytest.mark.parametrize("host", LOOPBACK_NAMES)
async def test_a_stranger_behind_a_proxy_of_this_machine_cannot_read_metrics(bench: Bench, host: str) -> None:
    assert await bench.status("/metrics", [("Host", host)]) == 404
    assert bench.other.scopes == []


async def test_the_lifespan_passes(bench: Bench) -> None:
    await bench.guard({"type": "lifespan"}, asyncio.Queue[Message]().get, asyncio.Queue[Message]().put)
    assert [scope["type"] for scope in bench.other.scopes] == ["lifespan"]


@pytest.mark.parametrize(
    ("public_url", "listen", "host", "origin"),
    [
        pytest.param(PUBLIC_URL, LISTEN, "relay.example", PUBLIC_URL, id="usual port"),
        pytest.param(
            "https://relay.example:8443",
            LISTEN,
            "relay.example:8443",
            "https://relay.example:8443",
            id="port",
        ),
        pytest.param("http://127.0.0.1:8700", LISTEN, "127.0.0.1:8700", "http://127.0.0.1:8700", id="local"),
        pytest.param(PUBLIC_URL, HostPort("::1", 9000), "[::1]:9000", "http://[::1]:9000", id="IPv6"),
    ],
)
def test_the_names_of_a_relay_are_its_public_one_and_its_loopbacks(
    public_url: str, listen: HostPort, host: str, origin: str
) -> None:
    allowed = AllowedHosts.of(public_url, listen)
    assert host in allowed.hosts
    assert origin in allowed.origins
    assert not allowed.metrics
    old = AllowedHosts.of(public_url, listen, metrics=True).metrics
    assert "relay.example" not in old
    assert old <= allowed.hosts


@pytest.mark.parametrize(("tls", "ours", "others"), [(False, "http", "https"), (True, "https", "http")])
def test_a_page_of_this_machine_is_one_that_came_as_the_relay_serves(
    *, tls: bool, ours: str, others: str
) -> None:
    allowed = AllowedHosts.of("https://relay.example", HostPort("127.0.0.1", 8700), tls=tls)
    for name in ("127.0.0.1", "localhost", "[::1]"):
        assert f"{ours}://{name}:8700" in allowed.origins
        assert f"{others}://{name}:8700" not in allowed.origins
