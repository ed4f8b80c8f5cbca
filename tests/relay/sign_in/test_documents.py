"""Clients that publish a document of themselves: what is fetched, from where, and what is believed of it."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import pytest

from relay.pki.roots import server_key_to_pem
from relay.sign_in.assertions import Assertions
from relay.sign_in.clients import NONE, ClientError, Clients
from relay.sign_in.fetching import TIMEOUT_S, Fetched, Fetcher, FetchError, parts_of
from relay.sign_in.known_clients import KNOWN_CLIENTS, known_client
from relay.sign_in.metadata import server_metadata
from relay.sign_in.redirects import target_of
from schemas.addresses import is_public
from schemas.tls import client_context
from tests.fakes.openid import SigningKey
from tests.fakes.raw_http_server import Asked, RawServer, http_answer
from tests.fakes.seconds import LoopSeconds
from tests.fakes.server_ca import SimulatedServerCa, server_key_named

HOST = "client.example"
URL = f"https://{HOST}/oauth/client.json"
DOCUMENT = {"client_id": URL, "client_name": "It", "redirect_uris": ["https://client.example/callback"]}
NOW_S = 1_800_000_000


@pytest.mark.parametrize(
    "url",
    [
        "http://client.example/x",
        "https://client.example",
        "https://client.example/",
        "https://client.example:8443/x",
        "https://user@client.example/x",
        "https://client.example/x#y",
        "https://client.example/x?y",
        "https://client.example/../x",
        "https://client.example/a/%2e%2e/x",
        "https://169.254.169.254/latest",
        "https://[::1]/x",
        "https://localhost/x",
        "https://10.0.0.1/x",
        "https://0x7f.1/x",
        "https://client.example\\@evil.example/x",
        "https://client.example/x y",
        "https://CLIENT.example/x",
        "https://client.example/" + "x" * 600,
    ],
)
def test_what_is_no_document_of_a_client(url: str) -> None:
    assert parts_of(url) is None


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),  # noqa: S104
        *("224.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "240.0.0.1"),
        *("::1", "::", "fe80::1", "fc00::1", "ff02::1", "2001:db8::1", "fe80::1%eth0", "::127.0.0.1"),
        *("::ffff:127.0.0.1", "::ffff:a00:1", "2002:7f00:1::", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe"),
        *("64:ff9b:1::1", "2001:0:7f00:1::1", "fec0::1", "x", ""),
    ],
)
def test_what_is_no_address_of_the_public_internet(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["93.184.215.14", "2606:4700::1111", "::ffff:93.184.215.14"])
def test_what_is_one(address: str) -> None:
    assert is_public(address)


async def test_a_name_of_which_one_address_is_private_is_not_connected_to() -> None:
    asked: list[str] = []

    async def resolve(host: str) -> Sequence[str]:
        asked.append(host)
        return ["93.184.215.14", "127.0.0.1"]

    with pytest.raises(FetchError, match="not at a public address"):
        await Fetcher(resolve).fetch(URL)
    assert asked == [HOST]


def certificate(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the TLS of a server called ``HOST``, and of a client that trusts it."""
    ca, key = SimulatedServerCa("a root", time.time_ns() // 1_000_000), server_key_named(HOST)
    file = directory / "server.pem"
    file.write_text(ca.issue(HOST, [HOST], key.public_key()) + server_key_to_pem(key))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(file)
    return server, client_context(ca.root_pem)


@asynccontextmanager
async def published(
    directory: Path, answer: bytes, more: "asyncio.Queue[bytes] | None" = None
) -> AsyncIterator[tuple[Fetcher, list[Asked]]]:
    """Serve ``answer`` to each request; the fetcher's resolver answers another address each time.

    After it comes what a test puts into ``more``, until that is empty bytes.
    """
    server_tls, client_tls = certificate(directory)

    async def respond(_asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        while more is not None and (piece := await more.get()):
            writer.write(piece)
            await writer.drain()

    addresses = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.3"]])

    async def resolve(_host: str) -> Sequence[str]:
        return next(addresses)

    async with RawServer.running(respond, server_tls) as server:
        port = int(server.url.rpartition(":")[2])
        yield Fetcher(resolve, lambda address: address.startswith("127."), port, tls=client_tls), server.asked


@pytest.mark.integration
async def test_a_document_is_fetched_from_the_address_that_was_checked(tmp_path: Path) -> None:
    """Rebinding: the name is resolved once, and what it resolves to later is not asked for."""
    body = json.dumps(DOCUMENT).encode()
    answer = http_answer(200, body, **{"cache-control": "max-age=300"})
    async with published(tmp_path, answer) as (fetcher, requests):
        assert await fetcher.fetch(URL) == Fetched(body, 300)
    (request,) = requests
    assert request.head.startswith("GET /oauth/client.json HTTP/1.1\r\n")
    assert "cookie" not in request.head.lower()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (http_answer(302, b"", location="https://169.254.169.254/"), "answered 302"),
        (http_answer(404, b"{}"), "answered 404"),
        (http_answer(200, b"x" * 10_000_000), "too large"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 200_000, "too large"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000, "the answer is not HTTP"),
        (b"SSH-2.0-x\r\n", "the answer is not HTTP"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort", "the answer is not HTTP"),
    ],
    ids=["redirect", "404", "10 MB", "without a length", "a long head", "no HTTP", "cut short"],
)
async def test_what_is_not_taken(tmp_path: Path, answer: bytes, why: str) -> None:
    async with published(tmp_path, answer) as (fetcher, _):
        with pytest.raises(FetchError, match=why):
            await fetcher.fetch(URL)


@pytest.mark.integration
async def test_a_document_that_comes_slowly_is_waited_for_three_seconds_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n"
    clock, received = LoopSeconds(monkeypatch), h11.Connection.receive_data
    pieces, more = asyncio.Queue[int](), asyncio.Queue[bytes]()

    def noted(connection: h11.Connection, data: bytes) -> None:
        received(connection, data)
        pieces.put_nowait(len(data))

    monkeypatch.setattr(h11.Connection, "receive_data", noted)
    async with published(tmp_path, begun, more) as (fetcher, _):
        fetched = asyncio.create_task(fetcher.fetch(URL))
        await pieces.get()
        for _ in range(2):  # a byte now and again keeps nothing open
            more.put_nowait(b" ")
            assert await pieces.get() == 1
            await clock.pass_by(0.5)
            assert not fetched.done()
        await clock.pass_by(TIMEOUT_S - 1.0)
        with pytest.raises(FetchError, match="no answer in time"):
            await fetched
        more.put_nowait(b"")


@pytest.mark.integration
async def test_a_certificate_of_another_name_is_refused(tmp_path: Path) -> None:
    async with published(tmp_path, http_answer(200, b"{}")) as (fetcher, requests):
        with pytest.raises(FetchError, match="not reached"):
            await fetcher.fetch("https://another.example/oauth/client.json")
    assert requests == []


class Published:
    """A fetcher whose documents are given."""

    def __init__(self, documents: Mapping[str, object]) -> None:
        self.documents = dict(documents)
        self.asked: list[str] = []

    async def fetch(self, url: str) -> Fetched:
        self.asked.append(url)
        if url not in self.documents:
            raise FetchError("not reached")
        value = self.documents[url]
        return Fetched(value if isinstance(value, bytes) else json.dumps(value).encode(), None)


def clients(
    documents: Mapping[str, object], monotonic: Callable[[], float] = lambda: 0.0
) -> tuple[Clients, Published]:
    fetcher: Any = Published(documents)
    return Clients(bytes(32), fetcher, monotonic), fetcher


async def test_a_document_describes_its_client_and_is_kept_for_a_while() -> None:
    now = 0.0
    found, fetcher = clients({URL: DOCUMENT}, lambda: now)
    for _ in range(3):
        client = await found.find(URL)
    assert (client.id, client.name, client.origin) == (URL, "It", HOST)
    assert fetcher.asked == [URL]
    now = 3601.0
    await found.find(URL)
    assert fetcher.asked == [URL, URL]


@pytest.mark.parametrize(
    "document",
    [
        DOCUMENT | {"client_id": "https://client.example/oauth/other.json"},
        {name: value for name, value in DOCUMENT.items() if name != "client_id"},
        DOCUMENT | {"client_secret": "x"},
        DOCUMENT | {"redirect_uris": ["http://evil.example/"]},
        DOCUMENT | {"redirect_uris": None},
        DOCUMENT | {"token_endpoint_auth_method": "client_secret_post"},
        DOCUMENT | {"token_endpoint_auth_method": "private_key_jwt"},
        DOCUMENT | {"jwks_uri": "http://169.254.169.254/"},
        DOCUMENT | {"jwks": "x"},
        b"not JSON",
        b"[]",
        b'{"client_id": "' + URL.encode() + b'", "client_id": "x"}',
    ],
    ids=str,
)
async def test_a_document_that_is_not_believed(document: object) -> None:
    found, _ = clients({URL: document})
    with pytest.raises(ClientError):
        await found.find(URL)


async def test_a_known_client_is_known_while_its_document_cannot_be_fetched() -> None:
    found, fetcher = clients({})
    for row in KNOWN_CLIENTS:
        client_id = row.client_id.replace("{id}", "g-123abc")
        client = await found.find(client_id)
        assert client.name == row.name
        assert client.origin in client_id
        assert all(target_of(uri) is not None for uri in client.redirect_uris)
        assert row.source
        assert row.read_on
    chatgpt = await found.find("https://chatgpt.com/oauth/g-1/client.json")
    assert chatgpt.redirect_uris == ("https://chatgpt.com/connector/oauth/g-1",)
    assert not chatgpt.may_redirect_to("https://chatgpt.com/connector/oauth/g-2")
    codex = await found.find("https://chatgpt.com/oauth/codex/client.json")
    assert codex.name == "Codex"
    with pytest.raises(ClientError, match="could not be read"):
        await found.find(URL)
    assert len(fetcher.asked) == len(KNOWN_CLIENTS) + 3


async def test_where_documents_are_not_fetched_known_clients_are_known_and_no_other() -> None:
    found = Clients(bytes(32), None, lambda: 0.0)
    for row in KNOWN_CLIENTS:
        client = await found.find(row.client_id.replace("{id}", "g-1"))
        assert client.methods == {NONE}
        with pytest.raises(ClientError, match="has not announced private_key_jwt"):
            await found.keys_of(client)
    with pytest.raises(ClientError, match="reads no documents of clients: have the client register"):
        await found.find(URL)
    registered = found.register(json.dumps({"redirect_uris": DOCUMENT["redirect_uris"]}).encode())
    assert (await found.find(registered["client_id"])).redirect_uris == ("https://client.example/callback",)
    offered, without = (server_metadata("https://hub.example", fetches=fetches) for fetches in (True, False))
    assert "private_key_jwt" in json.dumps(offered)
    assert "private_key_jwt" not in json.dumps(without)
    assert without["token_endpoint_auth_methods_supported"] == ["none"]
    assert {name for name in offered if name not in without} == {
        "token_endpoint_auth_signing_alg_values_supported",
        "revocation_endpoint_auth_signing_alg_values_supported",
    }


async def test_a_document_that_was_fetched_counts_and_not_the_table() -> None:
    row = KNOWN_CLIENTS[0]
    document = {
        "client_id": row.client_id,
        "client_name": "Anew",
        "redirect_uris": ["https://new.example/cb"],
    }
    found, _ = clients({row.client_id: document})
    assert (await found.find(row.client_id)).redirect_uris == ("https://new.example/cb",)
    wrong, _ = clients({row.client_id: document | {"client_id": "x"}})
    with pytest.raises(ClientError):
        await wrong.find(row.client_id)


@pytest.mark.parametrize(
    "client_id",
    ["https://chatgpt.com/oauth/a/b/client.json", "https://chatgpt.com.evil.example/oauth/a/client.json"],
)
def test_a_pattern_of_the_table_stands_for_one_part(client_id: str) -> None:
    assert known_client(client_id) is None


# --- client assertions -------------------------------------------------------------------------------------


SIGNERS = {algorithm: SigningKey(algorithm, algorithm) for algorithm in ("RS256", "ES256", "EdDSA")}
KEYS: Sequence[Mapping[str, Any]] = (
    *({name: each.jwk[name] for name in each.jwk.keys() - {"use", "alg"}} for each in SIGNERS.values()),
    {"kty": "oct", "kid": "HS256", "k": "AAAA"},
    {"kid": "broken", "kty": "RSA", "n": 1},
)
CLAIMS = {
    "iss": URL,
    "sub": URL,
    "aud": "https://relay.example/token",
    "exp": NOW_S + 300,
    "iat": NOW_S,
    "jti": "1",
}


def signed(claims: dict[str, Any], algorithm: str = "ES256", **header: Any) -> str:
    return SIGNERS[algorithm].jwt(claims, **header)


def assertions() -> Assertions:
    return Assertions(
        frozenset({"https://relay.example", "https://relay.example/token"}), lambda: NOW_S * 1000
    )


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_client_proves_itself_by_a_key(algorithm: str) -> None:
    assertions().verify(signed(CLAIMS, algorithm), URL, KEYS)
    assertions().verify(signed(CLAIMS | {"aud": ["x", "https://relay.example"]}, algorithm), URL, KEYS)


@pytest.mark.parametrize(
    "assertion",
    [
        signed(CLAIMS | {"iss": "https://other.example/x"}),
        signed(CLAIMS | {"sub": "https://other.example/x"}),
        signed(CLAIMS | {"aud": "https://another-hub.example/token"}),
        signed(CLAIMS | {"aud": None}),
        signed(CLAIMS | {"exp": NOW_S - 60}),
        signed(CLAIMS | {"exp": NOW_S + 86_400}),
        signed(CLAIMS | {"exp": "soon"}),
        signed({name: value for name, value in CLAIMS.items() if name != "exp"}),
        signed(CLAIMS | {"iat": NOW_S + 3600}),
        signed(CLAIMS | {"jti": ""}),
        signed({name: value for name, value in CLAIMS.items() if name != "jti"}),
        signed(CLAIMS, kid="RS256"),
        signed(CLAIMS, kid="none of them"),
        signed(CLAIMS, alg="none"),
        signed(CLAIMS, alg="HS256", kid="HS256"),
        signed(CLAIMS, crit=["x"]),
        signed(CLAIMS, kid="broken"),
        signed(CLAIMS)[:-4] + "AAAA",
        "a.b",
        "..",
        "x" * 10_000,
        "\u00e9.e.e",
    ],
)
def test_an_assertion_that_proves_nothing(assertion: str) -> None:
    with pytest.raises(ClientError):
        assertions().verify(assertion, URL, KEYS)


def test_an_assertion_is_good_once() -> None:
    verifier, assertion = assertions(), signed(CLAIMS)
    verifier.verify(assertion, URL, KEYS)
    with pytest.raises(ClientError, match="used before"):
        verifier.verify(assertion, URL, KEYS)


async def test_the_keys_are_those_that_the_document_names() -> None:
    keys = "https://client.example/oauth/jwks.json"
    methods = {
        "token_endpoint_auth_method": "private_key_jwt",
        "token_endpoint_auth_methods_supported": ["none"],
    }
    found, fetcher = clients({URL: DOCUMENT | methods | {"jwks_uri": keys}, keys: {"keys": list(KEYS)}})
    client = await found.find(URL)
    assert client.methods == {"none", "private_key_jwt"}
    for _ in range(2):
        assert await found.keys_of(client) == list(KEYS)
    assert fetcher.asked == [URL, keys]
