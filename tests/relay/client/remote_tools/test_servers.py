from pathlib import Path

import pytest

from relay.remote_tools import BearerToken, ClientCredentials, HttpServer, StdioServer
from schemas.addresses import AddressError


@pytest.mark.parametrize(
    "url",
    [
        "http://relay.example/mcp",
        "http://127.0.0.1.evil.example/mcp",
        "ftp://127.0.0.1/",
        "https://",
        "relay.example",
        "https://user:secret@relay.example/mcp",
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
