"""Which proxy the relay's clients use: the environment's, and none on this machine."""

import pytest

from relay.client.credentials import RenewableToken
from relay.client.http import ProxyError, proxy_of
from relay.client.stdio_bridge.http_client import RelayHttp
from schemas.tls import client_context
from tests.fakes.http_proxy import HttpProxy

PROXY = "http://proxy.example:3128"
NAMES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


def test_without_a_proxy_connections_are_direct() -> None:
    assert proxy_of("https://relay.example/mcp") is None


@pytest.mark.parametrize("name", ["https_proxy", "HTTPS_PROXY", "all_proxy"])
def test_a_relay_elsewhere_is_reached_by_the_proxy(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, PROXY)
    assert proxy_of("https://relay.example/mcp") == PROXY


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "[::1]"])
def test_this_machine_is_never_reached_by_a_proxy(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    for name in NAMES[:3]:
        monkeypatch.setenv(name, PROXY)
    assert proxy_of(f"http://{host}:8700/mcp") is None


def test_a_host_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", PROXY)
    monkeypatch.setenv("no_proxy", "relay.example")
    assert proxy_of("https://relay.example/mcp") is None
    assert proxy_of("https://other.example/mcp") == PROXY


def test_what_is_no_http_proxy_is_named_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5://user:secret@proxy.example")
    with pytest.raises(ProxyError) as caught:
        proxy_of("https://relay.example/mcp")
    assert "https_proxy" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.integration
async def test_the_stdio_bridge_goes_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with HttpProxy.running(None) as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        http = RelayHttp("http://relay.example/mcp", RenewableToken("t"), client_context())
        async with http.exchange("POST", {}, b"{}") as response:
            assert response.status == 502
        await http.close()
    [head] = proxy.asked
    assert head.startswith(b"POST http://relay.example/mcp ")
