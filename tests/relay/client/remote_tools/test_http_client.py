"""The HTTP client below the SDK: to whom a credential goes, and what an answer may cost."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from relay.client.remote_tools.http_client import LimitedTransport, retry_after_ms
from relay.client.remote_tools.servers import BearerAuth, origin_of
from relay.remote_tools import (
    BearerToken,
    HttpServer,
    Reason,
    RemoteToolError,
    ToolProviderFailure,
    ToolRule,
    ToolUnauthorized,
)
from schemas.addresses import BrokerAddress
from schemas.errors import Failure, ToolError
from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from tests.fakes.fault_proxy import FaultProxy, LinkFault
from tests.fakes.guarded import guarded
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.raw_http_server import server_context
from tests.fakes.signer import SimulatedCa

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
NOW_MS = 1_795_000_000_000


async def test_a_token_is_presented_and_a_wrong_one_is_unauthorized() -> None:
    fake = FakeMcpServer(token="right")
    async with fake.over_http() as url:
        async with guarded(HttpServer(url, BearerToken("right"))) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
        async with guarded(HttpServer(url, BearerToken("wrong"))) as client:
            with pytest.raises(ToolUnauthorized) as caught:
                await client.tools.execute("echo", PING)
    assert (caught.value.code, fake.sent("echo")) == (401, 1)


async def test_a_relays_refusal_is_in_its_own_words() -> None:
    words = ToolError(Failure.TOKEN_REFUSED, "The token has expired.", fix="Send a new one.")
    fake = FakeMcpServer(token="right", refusal=json.dumps(words.envelope()).encode())
    async with fake.over_http() as url, guarded(HttpServer(url)) as client:
        with pytest.raises(ToolUnauthorized, match=r"^The token has expired\.$") as caught:
            await client.tools.execute("echo", PING)
    error = caught.value
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


async def test_a_token_file_that_rotates_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "token"
    write_atomic(file, "old\n", PRIVATE)
    fake = FakeMcpServer()
    async with fake.over_http() as url, guarded(HttpServer(url, BearerToken(file))) as client:
        await client.tools.execute("echo", PING)
        write_atomic(file, "new\n", PRIVATE)
        await client.tools.execute("echo", PING)
    assert [head["authorization"] for head in fake.heads] == ["Bearer old", "Bearer new"]


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
                with pytest.raises(ToolUnauthorized) as caught:
                    await client.tools.execute("echo", PING)
                assert caught.value.reason is Reason.CREDENTIAL
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


async def test_a_client_certificate_is_presented(
    tls: tuple[ssl.SSLContext, Path, tuple[Path, Path]],
) -> None:
    context, root, files = tls
    fake = FakeMcpServer()
    async with fake.over_http(tls=context) as url:
        async with guarded(HttpServer(url, client_certificate=files, root=root)) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
        async with guarded(HttpServer(url, root=root)) as client:
            with pytest.raises(RemoteToolError) as caught:
                await client.tools.execute("echo", PING)
    assert (type(caught.value), caught.value.reason) == (ToolProviderFailure, Reason.UNREACHABLE)
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
