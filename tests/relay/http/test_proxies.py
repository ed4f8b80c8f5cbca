"""Whom a proxy forwards: by the header that it adds, and by the PROXY protocol on real sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from ipaddress import ip_network

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from relay.http.proxies import TrustedProxies
from tests.fakes.proxied import PROXY_V2, proxy_header
from tests.fakes.raw_http import exchange
from tests.fakes.serving import Server

HERE, PROXY, CLIENT = "127.0.0.1", "192.0.2.10", "203.0.113.7"
NETWORKS = [ip_network("192.0.2.0/24"), ip_network("2001:db8::/32"), ip_network(HERE)]
GET = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"


@pytest.mark.parametrize(
    ("values", "client"),
    [
        ([], PROXY),
        ([CLIENT], CLIENT),
        (["198.51.100.1, " + CLIENT], CLIENT),
        (["198.51.100.1", CLIENT], CLIENT),
        ([CLIENT + ", 192.0.2.11"], CLIENT),
        ([CLIENT + "\t,192.0.2.11 , 2001:db8::1"], CLIENT),
        (["192.0.2.12, 192.0.2.11"], "192.0.2.12"),
        ([CLIENT + ", ::ffff:192.0.2.11"], CLIENT),
        ([CLIENT + ":4711"], CLIENT),
        (["[2001:470::7]:4711"], "2001:470::7"),
        (["[2001:470::7]"], "2001:470::7"),
        (["2001:470::7"], "2001:470::7"),
        (["::ffff:203.0.113.7"], CLIENT),
        (["unknown"], PROXY),
        ([CLIENT + ", unknown"], PROXY),
        ([CLIENT + ", "], PROXY),
        ([CLIENT + ", unknown, 192.0.2.11"], "192.0.2.11"),
        (["\xff"], PROXY),
        (["1" * 10_000], PROXY),
        ([CLIENT + ", 192.0.2.11" * 1000], "192.0.2.11"),
    ],
)
def test_the_client_is_the_first_from_the_right_that_is_not_trusted(
    values: Sequence[str], client: str
) -> None:
    proxies = TrustedProxies(NETWORKS)
    assert proxies.client_of(PROXY, [value.encode("latin-1") for value in values]) == client


@pytest.mark.parametrize(
    ("address", "is_trusted"),
    [
        (PROXY, True),
        ("::ffff:192.0.2.10", True),
        ("2001:db8:ffff::1", True),
        ("fe80::1%eth0", False),
        (CLIENT, False),
        ("", False),
        ("unknown", False),
    ],
)
def test_a_proxy_is_known_by_its_network(address: str, is_trusted: bool) -> None:  # noqa: FBT001 - a parameter
    assert TrustedProxies(NETWORKS).trusts(address) is is_trusted
    assert not TrustedProxies().trusts(address)


async def show_client(scope: Scope, receive: Receive, send: Send) -> None:
    client = Request(scope).client
    await PlainTextResponse("nobody" if client is None else client.host)(scope, receive, send)


@asynccontextmanager
async def running(*networks: str) -> AsyncIterator[Server]:
    async with Server.running(proxies=TrustedProxies([ip_network(each) for each in networks])) as server:
        server.app = show_client
        yield server


@pytest.mark.integration
async def test_the_header_of_one_that_is_not_trusted_says_nothing() -> None:
    async with running("192.0.2.0/24") as server:
        said = GET + b"X-Forwarded-For: 203.0.113.7\r\n\r\n"
        assert (await exchange(server.address.port, said)).endswith(HERE.encode())


@pytest.mark.integration
async def test_each_request_of_a_proxys_connection_has_its_own_client() -> None:
    async with running(HERE) as server:
        first = GET.replace(b"close", b"keep-alive") + b"X-Forwarded-For: 203.0.113.7\r\n\r\n"
        second = GET.replace(b"close", b"keep-alive") + b"X-Forwarded-For: 203.0.113.8\r\n\r\n"
        answers = await exchange(server.address.port, first + second + GET + b"\r\n")
        assert [part.rpartition(b"\r\n\r\n")[2] for part in answers.split(b"HTTP/1.1 200 OK")[1:]] == [
            b"203.0.113.7",
            b"203.0.113.8",
            b"127.0.0.1",
        ]


@pytest.mark.integration
@pytest.mark.parametrize(
    ("source", "client"),
    [(CLIENT, CLIENT), ("2001:470::7", "2001:470::7"), ("::ffff:203.0.113.7", CLIENT), (None, HERE)],
)
async def test_the_client_of_a_connection_that_is_passed_on_is_in_its_header(
    source: str | None, client: str
) -> None:
    async with running(HERE) as server:
        said = proxy_header(source) + GET + b"X-Forwarded-For: 198.51.100.1\r\n\r\n"
        answer = await exchange(server.address.port, said)
        # Of the client's own headers none counts; where the proxy speaks for itself, its own does.
        assert answer.endswith(b"198.51.100.1" if client == HERE else client.encode())


@pytest.mark.integration
@pytest.mark.parametrize(
    "said",
    [
        pytest.param(b"\r\n\r\n" + GET + b"\r\n", id="empty lines"),
        pytest.param(PROXY_V2 + b"\x11\x11\x00\x0c" + bytes(12) + GET + b"\r\n", id="another version"),
        pytest.param(PROXY_V2 + b"\x2f\x11\x00\x0c" + bytes(12) + GET + b"\r\n", id="another command"),
        pytest.param(PROXY_V2 + b"\x21\x11\xff\xff" + bytes(65_535) + GET + b"\r\n", id="too long"),
        pytest.param(PROXY_V2 + b"\x21\x11\x00\x04" + bytes(4) + GET + b"\r\n", id="too short"),
        pytest.param(PROXY_V2[:-1] + b"x\x21\x11\x00\x0c" + bytes(12) + GET + b"\r\n", id="no signature"),
        pytest.param(PROXY_V2[:5], id="half of it"),
    ],
)
async def test_what_only_begins_like_a_header_ends_the_connection(said: bytes) -> None:
    async with running(HERE) as server:
        reader, writer = await asyncio.open_connection(HERE, server.address.port)
        writer.write(said)
        writer.write_eof()
        received = b""
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                received = await reader.read()
        writer.close()
        assert received == b""


@pytest.mark.integration
async def test_a_header_of_one_that_is_not_trusted_is_no_request() -> None:
    async with running("192.0.2.0/24") as server:
        assert b"200" not in await exchange(server.address.port, proxy_header(CLIENT) + GET + b"\r\n")


@pytest.mark.integration
async def test_a_header_is_read_though_it_comes_a_byte_at_a_time() -> None:
    async with running(HERE) as server:
        reader, writer = await asyncio.open_connection(HERE, server.address.port)
        writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in proxy_header(CLIENT):
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        writer.write(GET + b"\r\n")
        async with asyncio.timeout(30):
            assert (await reader.read()).endswith(CLIENT.encode())
        writer.close()
