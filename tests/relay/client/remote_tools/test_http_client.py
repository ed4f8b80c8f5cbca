"""The HTTP client below the SDK: to whom a credential goes, and what an answer may cost."""

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs

import httpx2
import pytest

from relay.client.remote_tools.servers import BearerAuth, LimitedTransport, origin_of, retry_after_ms
from relay.remote_tools import (
    BearerToken,
    ClientCredentials,
    HttpServer,
    Reason,
    RemoteToolError,
    StdioServer,
    ToolProviderFailure,
    ToolRule,
    ToolUnauthorized,
)
from schemas.addresses import AddressError, BrokerAddress
from schemas.errors import Failure, ToolError
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from tests.fakes.fault_proxy import FaultProxy, LinkFault
from tests.fakes.guarded import guarded
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.raw_http_server import Asked, RawServer, http_answer, json_answer, server_context
from tests.fakes.signer import SimulatedCa

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
NOW_MS = 1_795_000_000_000


@pytest.mark.holds("SPEC-0004/3.3/unauthorized", "SPEC-0004/3.4/authentication")
async def test_a_token_is_presented_and_a_wrong_one_is_unauthorized() -> None:
    fake = FakeMcpServer(token="right")
    async with fake.over_http() as url:
        async with guarded(HttpServer(url, BearerToken("right"))) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
        async with guarded(HttpServer(url, BearerToken("wrong"))) as client:
            error = await client.fails(ToolUnauthorized, "echo", PING)
    assert (error.code, fake.sent("echo")) == (401, 1)


async def test_a_relays_refusal_is_in_its_own_words() -> None:
    words = ToolError(Failure.TOKEN_REFUSED, "The token has expired.", fix="Send a new one.")
    fake = FakeMcpServer(token="right", refusal=json.dumps(words.envelope()).encode())
    async with fake.over_http() as url, guarded(HttpServer(url)) as client:
        error = await client.fails(ToolUnauthorized, "echo", PING)
    assert str(error) == "The token has expired."
    assert (error.code, error.suggested_fix, error.may_have_run) == (401, "Send a new one.", False)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b'{"code": "E_INTERNAL", "message": "x", "suggested_fix": "y"}', id="another failure"),
        pytest.param(b'{"code": "other", "message": "Trust me."}', id="no code"),
        pytest.param(b'{"code": "E_SAFETY_DENIED", "message": "' + b"x" * 4096 + b'"}', id="long"),
        pytest.param(b"[" * 4000, id="deep"),
        pytest.param(b"<html>", id="no JSON"),
    ],
)
async def test_a_refusal_that_is_no_relays_is_told_by_its_status(body: bytes) -> None:
    fake = FakeMcpServer(token="right", refusal=body)
    async with fake.over_http() as url, guarded(HttpServer(url)) as client:
        with pytest.raises(ToolUnauthorized, match="refused the credential with HTTP 401"):
            await client.tools.execute("echo", PING)


@pytest.mark.holds("SPEC-0004/3.4/authentication")
async def test_a_token_file_that_rotates_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_atomic(file, "old\n", PRIVATE)
    fake = FakeMcpServer()
    async with fake.over_http() as url, guarded(HttpServer(url, BearerToken(file))) as client:
        await client.tools.execute("echo", PING)
        write_atomic(file, "new\n", PRIVATE)
        await client.tools.execute("echo", PING)
    assert [head["authorization"] for head in fake.heads] == ["Bearer old", "Bearer new"]


@pytest.mark.holds("SPEC-0004/4/c-high-security")
async def test_a_function_returns_the_token_of_each_request() -> None:
    tokens = iter(f"token-{number}" for number in range(100))

    async def renewed() -> str:
        return next(tokens)

    fake = FakeMcpServer()
    async with fake.over_http() as url:
        for source in (renewed, lambda: next(tokens)):
            async with guarded(HttpServer(url, BearerToken(source))) as client:
                await client.tools.execute("echo", PING)
                await client.tools.execute("echo", PING)
    assert len({head["authorization"] for head in fake.heads}) == 4


@pytest.mark.parametrize("text", ["", "two words", "line\r\nX-Evil: 1", "ü"])
async def test_what_is_no_token_is_never_sent(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    write_atomic(file, text, PRIVATE)

    def fails() -> str:
        raise ZeroDivisionError

    fake = FakeMcpServer()
    async with fake.over_http() as url:
        for source in (file, tmp_path / "absent", text, fails):
            async with guarded(HttpServer(url, BearerToken(source))) as client:
                error = await client.fails(ToolUnauthorized, "echo", PING)
                assert error.reason is Reason.CREDENTIAL
    assert (fake.opened, fake.calls) == (0, [])


async def test_a_redirect_within_the_origin_is_followed_for_a_call_that_may_be_repeated() -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        server = HttpServer(url, BearerToken("secret"))
        async with guarded(server, rules=(ToolRule("*", idempotent=True),)) as client:
            assert (await client.tools.execute("redirect", {"times": 1})).structured == {"ok": True}
    assert [head["authorization"] for head in fake.heads] == ["Bearer secret"] * 2
    assert fake.heads[0]["x-correlation-id"] == fake.heads[1]["x-correlation-id"]


async def test_a_token_of_one_origin_is_taken_off_a_request_to_another() -> None:
    auth = BearerAuth(origin_of(httpx2.URL("https://one.example/mcp")), BearerToken("secret"))
    for url, expected in (
        ("https://one.example:443/other", "Bearer secret"),
        ("https://one.example:8443/mcp", None),
        ("http://one.example/mcp", None),
        ("https://two.example/mcp", None),
        ("https://one.example.two.example/mcp", None),
    ):
        request = httpx2.Request("POST", url, headers={"Authorization": "Bearer secret"})
        sent = await anext(auth.async_auth_flow(request))
        assert sent.headers.get("authorization") == expected, url


@pytest.fixture
def tls(tmp_path: Path) -> tuple[ssl.SSLContext, Path, tuple[Path, Path]]:
    """A server's context that demands a client certificate, the root, and a client's files."""
    ca = SimulatedCa(now_ms=NOW_MS)
    context = server_context(ca, tmp_path, NOW_MS, valid_days=3000)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=ca.root_pem)
    node = ca.issue(now_ms=NOW_MS, valid_days=3000)
    root, leaf, key = tmp_path / "root.pem", tmp_path / "leaf.pem", tmp_path / "leaf.key"
    root.write_text(ca.root_pem)
    leaf.write_text(node.leaf_pem)
    write_atomic(key, private_key_to_pem(node.key), PRIVATE)
    return context, root, (leaf, key)


@pytest.mark.holds("SPEC-0004/3.4/authentication", "SPEC-0004/4/c-high-security")
async def test_a_client_certificate_is_presented(
    tls: tuple[ssl.SSLContext, Path, tuple[Path, Path]],
) -> None:
    context, root, files = tls
    fake = FakeMcpServer()
    async with fake.over_http(tls=context) as url:
        async with guarded(HttpServer(url, client_certificate=files, root=root)) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
        async with guarded(HttpServer(url, root=root)) as client:
            error = await client.fails(RemoteToolError, "echo", PING)
    assert (type(error), error.reason) == (ToolProviderFailure, Reason.UNREACHABLE)
    assert fake.sent("echo") == 1


async def test_a_server_of_another_root_gets_nothing(
    tls: tuple[ssl.SSLContext, Path, tuple[Path, Path]], tmp_path: Path
) -> None:
    context, _, _ = tls
    other = tmp_path / "other.pem"
    other.write_text(SimulatedCa("other", NOW_MS).root_pem)
    fake = FakeMcpServer()
    async with (
        fake.over_http(tls=context) as url,
        guarded(HttpServer(url, BearerToken("secret"), root=other)) as client,
    ):
        with pytest.raises(ToolProviderFailure, match="the certificate is not trusted") as caught:
            await client.tools.execute("echo", PING)
        assert caught.value.suggested_fix.startswith(f"{other} is not the root of its certificate")
        assert caught.value.retryable is False
    assert fake.opened == 0


async def test_a_server_without_tls_is_told_from_one_that_is_away() -> None:
    async def refuse(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with guarded(HttpServer(f"https://127.0.0.1:{port}/mcp")) as client:
            with pytest.raises(ToolProviderFailure, match="does not speak TLS") as caught:
                await client.tools.execute("echo", PING)
    assert "http://" in caught.value.suggested_fix


async def test_a_server_with_tls_that_is_called_without_gets_no_call(
    tls: tuple[ssl.SSLContext, Path, tuple[Path, Path]],
) -> None:
    fake = FakeMcpServer()
    async with (
        fake.over_http(tls=tls[0]) as url,
        guarded(HttpServer(url.replace("https:", "http:"))) as client,
    ):
        with pytest.raises(ToolProviderFailure, match=r"does not speak HTTP .* write https://"):
            await client.tools.execute("echo", PING)
    assert fake.opened == 0


@pytest.mark.parametrize("fault", [LinkFault.CORRUPT, LinkFault.REORDER])
async def test_a_changed_byte_loses_the_call_of_its_connection_and_no_other(
    tmp_path: Path, fault: LinkFault
) -> None:
    ca, fake, root = SimulatedCa(now_ms=NOW_MS), FakeMcpServer(), tmp_path / "root.pem"
    root.write_text(ca.root_pem)
    async with fake.over_http(tls=server_context(ca, tmp_path, NOW_MS, valid_days=3000)) as url:
        port = httpx2.URL(url).port
        assert port is not None
        async with FaultProxy(BrokerAddress("127.0.0.1", port)).running() as proxy:
            server = HttpServer(url.replace(str(port), str(proxy.address.port)), root=root)
            async with guarded(server) as client:
                waiting = asyncio.create_task(client.tools.execute("delay"))
                await asyncio.wait_for(fake.arrived.wait(), 30)
                fake.arrived.clear()
                changed = asyncio.create_task(client.tools.execute("delay"))
                await asyncio.wait_for(fake.arrived.wait(), 30)
                held = proxy.begin(LinkFault.DELAY, which=0)
                proxy.begin(fault, which=1)
                fake.released.set()
                with pytest.raises(ToolProviderFailure) as caught:
                    await changed
                proxy.end(held)
                assert (await waiting).structured == {"ok": True}
    assert (caught.value.reason, caught.value.may_have_run) == (Reason.CONNECTION_LOST, True)


class BrokenBody(httpx2.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"{"
        raise ssl.SSLError("bad record mac")


class AnswersBroken(httpx2.AsyncBaseTransport):
    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, stream=BrokenBody(), request=request)


async def test_a_body_that_tls_does_not_accept_is_a_lost_connection() -> None:
    request = httpx2.Request("POST", "https://one.example/mcp")
    response = await LimitedTransport(AnswersBroken()).handle_async_request(request)
    with pytest.raises(httpx2.StreamError):
        await response.aread()


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2", 2000), ("0", 0), ("999999", 600_000), ("-1", None), ("1.5", None), ("soon", None), ("²", None)],
)
def test_a_delay_is_read_from_a_header_in_seconds_alone(text: str, expected: int | None) -> None:
    headers = httpx2.Headers([(b"retry-after", text.encode())])
    assert retry_after_ms(headers) == expected


async def test_no_proxy_and_no_credential_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login root password secret\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    fake = FakeMcpServer()
    async with fake.over_http() as url, guarded(url) as client:
        await client.tools.execute("echo", PING)
    assert "authorization" not in fake.heads[0]


@pytest.mark.parametrize(
    "url",
    [
        "http://relay.example/mcp",
        "http://127.0.0.1.evil.example/mcp",
        "ftp://127.0.0.1/",
        "https://",
        "relay.example",
        "https://user:secret@relay.example/mcp",
        "https://:secret@relay.example/mcp",
        "https://relay.example/mcp#part",
        "https://relay.example:99999/mcp",
        "https://[::1/mcp",
    ],
)
def test_a_url_that_is_not_encrypted_or_holds_a_secret_is_refused(url: str) -> None:
    with pytest.raises(AddressError) as caught:
        HttpServer(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    ["https://relay.example/mcp", "http://127.0.0.1:8700/mcp", "http://[::1]:1/", "http://localhost/mcp"],
)
def test_a_url_over_tls_or_within_this_machine_is_used(url: str) -> None:
    assert HttpServer(url, anonymous=True).url == url


def test_the_operator_permits_an_unencrypted_connection() -> None:
    server = HttpServer("http://10.0.0.1/mcp", BearerToken("secret"), plain_allowed=True)
    assert server.name == "http://10.0.0.1/mcp"


def test_a_name_leaves_out_the_query() -> None:
    server = HttpServer("https://relay.example/mcp?key=secret", anonymous=True)
    assert server.name == "https://relay.example/mcp"


@pytest.mark.holds("SPEC-0004/3.4/authentication")
def test_calls_of_another_machine_without_a_credential_need_to_be_permitted() -> None:
    with pytest.raises(AddressError, match=r"no credential for https://relay\.example/mcp: .* --anonymous"):
        HttpServer("https://relay.example/mcp?key=secret")
    certificate = (Path("client.pem"), Path("client.key"))
    assert HttpServer("https://relay.example/mcp", client_certificate=certificate).credential is None
    assert HttpServer("http://127.0.0.1:1/mcp").credential is None


@pytest.mark.parametrize("issuer", ["http://issuer.example", "issuer.example", ""])
def test_a_client_secret_is_not_for_an_issuer_that_is_not_encrypted(issuer: str) -> None:
    with pytest.raises(AddressError):
        ClientCredentials("id", "secret", issuer)


def test_no_secret_is_shown() -> None:
    server = HttpServer("https://relay.example/mcp", BearerToken("secret"))
    credentials = ClientCredentials("id", "secret", "https://issuer.example")
    program = StdioServer("server", environment={"KEY": "secret"}, directory=Path())
    assert "secret" not in repr((server, credentials, program))


# --- oAuth client credentials: the secret goes to the configured issuer alone, the token to the server alone


RESOURCE = "/.well-known/oauth-protected-resource/mcp"
BASIC = base64.b64encode(b"client-1:the-secret").decode()


@dataclass(slots=True)
class Issuer:
    """An authorization server that issues ``access-1``, ``access-2`` and so on."""

    url: str = ""
    issued: int = 0
    asked: list[Asked] = field(default_factory=list)
    metadata: dict[str, object] = field(default_factory=dict)

    async def respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        self.asked.append(asked)
        path = asked.head.split(" ")[1]
        document: dict[str, object]
        if path.startswith("/.well-known/oauth-authorization-server"):
            document = {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "response_types_supported": ["code"],
                **self.metadata,
            }
        elif path == "/token":
            self.issued += 1
            document = {"access_token": f"access-{self.issued}", "token_type": "Bearer", "expires_in": 3600}
        else:
            writer.write(http_answer(404, b""))
            return
        writer.write(json_answer(document))

    @property
    def secrets(self) -> int:
        """How often it was shown the secret."""
        return sum(BASIC in asked.head for asked in self.asked)

    @property
    def scopes(self) -> list[list[str]]:
        """The scope of each request for a token; an empty list where none was requested."""
        forms = [parse_qs(asked.body.decode()) for asked in self.asked if asked.method == "POST"]
        return [form.get("scope", []) for form in forms]


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    async with RawServer.running(issuer.respond) as server:
        issuer.url = server.url
        yield issuer


def advertise(fake: FakeMcpServer, url: str, issuer: Issuer) -> None:
    document = {"resource": url, "authorization_servers": [issuer.url]}
    fake.documents[RESOURCE] = document


def server(url: str, issuer: Issuer) -> HttpServer:
    return HttpServer(url, ClientCredentials("client-1", "the-secret", issuer.url))


@pytest.mark.holds("SPEC-0004/3.4/authentication")
async def test_the_secret_goes_to_the_issuer_and_the_token_to_the_server() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        async with guarded(server(url, issuer)) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
            await client.tools.execute("echo", PING)
    assert (issuer.issued, issuer.secrets) == (1, 1)
    assert {head["authorization"] for head in fake.heads} == {"Bearer access-1"}
    assert not any("access-1" in asked.head for asked in issuer.asked)
    # The ids of a call are for the server.
    assert not any("x-correlation-id" in asked.head.lower() for asked in issuer.asked)


async def test_a_server_that_names_another_issuer_gets_no_secret_sent_there() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as thief, issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, thief)
        async with guarded(server(url, issuer)) as client:
            error = await client.fails(ToolUnauthorized, "echo", PING)
    assert error.reason is Reason.CREDENTIAL
    assert thief.asked == []


@pytest.mark.holds("SPEC-0004/3.4/authentication")
@pytest.mark.parametrize(
    ("scope", "requested"), [("mcp:read", ["mcp:read"]), (None, [])], ids=["configured", "none"]
)
@pytest.mark.parametrize("stated", ["challenge", "resource", "issuer"])
async def test_the_configured_scope_is_requested_whatever_the_server_states(
    scope: str | None, requested: list[str], stated: str
) -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        wide = ["admin", "payments:write"]
        if stated == "challenge":
            fake.challenge = f'Bearer scope="{" ".join(wide)}"'
        elif stated == "resource":
            fake.documents[RESOURCE]["scopes_supported"] = wide
        else:
            issuer.metadata["scopes_supported"] = wide
        credential = ClientCredentials("client-1", "the-secret", issuer.url, scope)
        async with guarded(HttpServer(url, credential)) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
    assert issuer.scopes == [requested]


async def test_metadata_is_read_from_the_servers_origin_and_the_issuer_alone() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as internal, issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        for address in (f"{internal.url}/latest/meta-data", f"{issuer.url}/admin/restart"):
            fake.challenge = f'Bearer resource_metadata="{address}"'
            fake.token = f"access-{issuer.issued + 1}"
            async with guarded(server(url, issuer)) as client:
                assert (await client.tools.execute("echo", PING)).structured == PING
    assert internal.asked == []
    paths = {asked.head.split(" ")[1] for asked in issuer.asked}
    assert paths == {"/.well-known/oauth-authorization-server", "/token"}


async def test_the_secret_is_not_sent_unencrypted_to_where_the_issuer_points() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as other, issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        issuer.metadata["token_endpoint"] = f"{other.url}/token"
        async with guarded(server(url, issuer)) as client:
            with pytest.raises(ToolUnauthorized):
                await client.tools.execute("echo", PING)
    assert other.asked == []


@pytest.mark.holds("SPEC-0004/3.5/non-idempotent-not-retried")
async def test_a_call_that_is_not_idempotent_is_not_sent_again_with_a_new_token() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        async with guarded(server(url, issuer)) as client:
            await client.tools.list_tools()
            fake.token = "access-2"
            error = await client.fails(ToolUnauthorized, "echo", PING)
            assert (error.reason, len(fake.heads)) == (Reason.SECOND_SEND, 1)
            # The new token was requested, and is used for the next call.
            assert (await client.tools.execute("echo", PING)).structured == PING
    assert issuer.issued == 2
