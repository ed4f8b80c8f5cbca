from collections.abc import Callable
from pathlib import Path

import pytest

from relay.client.credentials import RenewableToken, TokenMissingError, check_token_file, keep_token
from relay.client.http import ProxyError, proxy_of
from relay.client.stdio_bridge.http_client import RelayHttp
from schemas.files import ExposedFileError
from schemas.tls import client_context
from tests.fakes.fault_proxy import HttpProxy


def token_file(directory: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file = directory / "token"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def test_the_token_is_in_the_file_or_else_in_the_environment(tmp_path: Path) -> None:
    environment = {"EDGE_TOKEN": " from-the-environment\n"}
    assert RenewableToken.find(token_file(tmp_path, "from-the-file\n"), environment).text == "from-the-file"
    assert RenewableToken.find(None, environment).text == "from-the-environment"


@pytest.mark.parametrize("use", [lambda file: RenewableToken.find(file, {}), check_token_file])
def test_a_token_that_others_can_read_is_not_used(tmp_path: Path, use: Callable[[Path], object]) -> None:
    with pytest.raises(ExposedFileError, match="chmod 600"):
        use(token_file(tmp_path, "secret", 0o644))


@pytest.mark.parametrize("text", ["", "two words", "line\nbreak", "größe", b"\xff", "x" * 8193])
def test_what_is_no_token_is_said_without_showing_it(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(TokenMissingError) as caught:
        RenewableToken.find(token_file(tmp_path, text), {})
    assert str(caught.value) == f"{tmp_path / 'token'} holds no token"
    with pytest.raises(TokenMissingError, match="holds no token: write the output of"):
        check_token_file(tmp_path / "token")


def test_without_any_token_it_is_said_where_one_is_looked_for() -> None:
    with pytest.raises(TokenMissingError, match=r"--token-file, or in EDGE_TOKEN"):
        RenewableToken.find(None, {})


def test_a_file_is_looked_at_again_and_the_environment_is_not(tmp_path: Path) -> None:
    file = token_file(tmp_path, "old")
    token = RenewableToken.find(file, {})
    assert not token.is_newer_than("old")
    file.write_text("new\n")
    assert token.is_newer_than("old")
    assert token.text == "new"
    # Another request has found it already.
    assert token.is_newer_than("old")
    assert not token.is_newer_than("new")
    assert "--token-file" in token.advice
    fixed = RenewableToken.find(None, {"EDGE_TOKEN": "old"})
    assert not fixed.is_newer_than("old")
    assert "EDGE_TOKEN" in fixed.advice


@pytest.mark.parametrize("damage", ["gone", "empty", "exposed"])
def test_a_file_that_is_being_replaced_leaves_the_token_as_it_was(tmp_path: Path, damage: str) -> None:
    file = token_file(tmp_path, "old")
    token = RenewableToken.find(file, {})
    if damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_text("")
    else:
        file.write_text("new")
        file.chmod(0o644)
    assert not token.is_newer_than("old")
    assert token.text == "old"


def test_a_token_is_kept_where_only_this_user_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "edge-kubelet" / "edge.token"
    keep_token(file, "  a.b.c\n")
    assert check_token_file(file) == file
    assert file.read_text() == "a.b.c\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("text", ["", "two words", "x" * 8193])
def test_what_is_no_token_is_not_kept_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokenMissingError) as refused:
        keep_token(tmp_path / "edge.token", text)
    assert not text or text not in str(refused.value)
    assert not (tmp_path / "edge.token").exists()


# --- which proxy the relay's clients use: the environment's, and none on this machine


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


@pytest.mark.parametrize("named", ["socks5://{}proxy", "http://{}proxy:port", "http://{}[::1", "http://{}"])
def test_what_is_no_http_proxy_is_named_without_its_password(
    monkeypatch: pytest.MonkeyPatch, named: str
) -> None:
    monkeypatch.setenv("https_proxy", named.format("user:secret@"))
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
