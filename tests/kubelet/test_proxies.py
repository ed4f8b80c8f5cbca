"""How a node reaches a relay elsewhere: by the environment's proxy, and this machine's without one."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from kubelet.identity.http_exchange import HttpRequest, NoAnswerError, exchange
from kubelet.session.channel import NOT_REACHED, open_channel
from kubelet.session.relay_addresses import RelayAddress
from schemas.addresses import port_of
from schemas.faults import connection_reason
from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from schemas.tls import client_context
from schemas.ulids import UlidSource
from tests.fakes.fault_proxy import HttpProxy
from tests.fakes.raw_http_server import RawServer, http_answer

pytestmark = pytest.mark.integration

BOUND_S = 30
BASIC = b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ws_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
async def server() -> AsyncIterator[RawServer]:
    async with RawServer.running(http_answer(200, b"pong")) as server:
        yield server


async def test_an_enrolment_elsewhere_goes_through_the_proxy(
    monkeypatch: pytest.MonkeyPatch, server: RawServer
) -> None:
    target = ("127.0.0.1", port_of(server.url))
    async with asyncio.timeout(BOUND_S), HttpProxy.running(target) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        answer = await exchange(HttpRequest("http://relay.example", "/x"), client_context())
    assert answer.body == b"pong"
    [head] = proxy.asked
    assert head.startswith(b"CONNECT relay.example:80 HTTP/1.1\r\n")
    assert BASIC in head


async def test_an_enrolment_on_this_machine_does_not(
    monkeypatch: pytest.MonkeyPatch, server: RawServer
) -> None:
    async with asyncio.timeout(BOUND_S), HttpProxy.running(None) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        answer = await exchange(HttpRequest(server.url, "/x"), client_context())
    assert answer.body == b"pong"
    assert proxy.asked == []


async def test_a_proxy_that_refuses_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    async with asyncio.timeout(BOUND_S), HttpProxy.running(None) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        with pytest.raises(NoAnswerError) as caught:
            await exchange(HttpRequest("http://relay.example", "/x"), client_context())
    assert str(caught.value) == "the proxy 127.0.0.1 does not connect to relay.example:80"


@pytest.mark.parametrize(
    "proxy",
    [
        "http://10.0.0.1:99999",
        "http://u:secret@[::1",
        "http://u:secret/word@10.0.0.1:3128",
        f"http://{'secret' * 12}:3128",
    ],
)
async def test_a_proxy_that_no_enrolment_can_use_is_said_to_be_none(
    monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("https_proxy", proxy)
    with pytest.raises(NoAnswerError, match=r"^https_proxy or all_proxy names no HTTP proxy") as caught:
        await exchange(HttpRequest("https://relay.example", "/x"), client_context())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "proxy", ["socks5://127.0.0.1:1080", "http://10.0.0.1:99999", "http://u:secret@[::1"]
)
async def test_a_proxy_that_no_session_can_use_is_as_one_that_is_away(
    monkeypatch: pytest.MonkeyPatch, registry: SchemaRegistry, proxy: str
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, proxy)
    url, ulids = "http://relay.example", UlidSource(lambda: 1, bytes)
    with pytest.raises(NOT_REACHED) as caught:
        async with open_channel(url, RelayAddress(url), None, FrameReader(registry), ulids, BOUND_S):
            pass
    assert "secret" not in connection_reason(caught.value)


@pytest.mark.parametrize(("url", "asked"), [("http://relay.example", 1), ("http://127.0.0.1:9", 0)])
async def test_a_session_uses_the_proxy_for_a_relay_elsewhere_alone(
    monkeypatch: pytest.MonkeyPatch, registry: SchemaRegistry, url: str, asked: int
) -> None:
    ulids = UlidSource(lambda: 1, bytes)
    async with asyncio.timeout(BOUND_S), HttpProxy.running(None) as proxy:
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy.url)
        with pytest.raises(NOT_REACHED):
            async with open_channel(url, RelayAddress(url), None, FrameReader(registry), ulids, BOUND_S):
                pass
    assert len(proxy.asked) == asked
    assert all(head.startswith(b"CONNECT relay.example:80 ") for head in proxy.asked)
