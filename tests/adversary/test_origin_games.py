"""Attacker: a page from elsewhere in the browser of a user who can reach the relay or the node. Tried:
requests and WebSockets with its own ``Origin``, with ``null`` (a sandboxed frame), with names that merely
look like ours, and with a good one beside a bad one; with a good token besides.

What must happen: 403 and a ``request_refused`` line at the relay; 403 at the node; a WebSocket is not
accepted.
"""

import pytest

from kubelet.loopback import MANIFEST_PATH, LoopbackServer
from tests.fakes.loopback_state import WIRE as NODES_SECRET
from tests.fakes.raw_http import exchange
from tests.fakes.served_relay import HERE, ServedRelay, parsed

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOREIGN = [
    pytest.param(["https://evil.example"], id="another"),
    pytest.param(["null"], id="null"),
    pytest.param([""], id="empty"),
    pytest.param(["http://localhost.evil.example:{port}"], id="localhost as a prefix"),
    pytest.param(["http://evil-localhost:{port}"], id="localhost as a suffix"),
    pytest.param(["http://evil.localhost:{port}"], id="below localhost"),
    pytest.param(["http://127.0.0.1.evil.example"], id="our address as a prefix"),
    pytest.param(["http://evil.example/http://127.0.0.1:{port}"], id="ours as a path"),
    pytest.param(["http://127.0.0.1:{port}@evil.example"], id="ours as a user part"),
    pytest.param(["http://evil.example#http://127.0.0.1:{port}"], id="ours as a fragment"),
    pytest.param(["http://127.0.0.1:{port}/"], id="ours and a slash"),
    pytest.param(["http://127.0.0.1:{port} http://evil.example"], id="a list"),
    pytest.param(["http://127.0.0.1:{port}, null"], id="a list with null"),
    pytest.param(["file://127.0.0.1:{port}"], id="a file"),
    pytest.param(["chrome-extension://127.0.0.1:{port}"], id="an extension"),
    pytest.param(["127.0.0.1:{port}"], id="without a scheme"),
    pytest.param(["//127.0.0.1:{port}"], id="relative"),
    pytest.param(["http://127.0.0.1:{port}", "https://evil.example"], id="ours, then another"),
    pytest.param(["https://evil.example", "http://127.0.0.1:{port}"], id="another, then ours"),
]
RELAYS = [
    pytest.param(["https://relay.example.evil.example"], id="the public name as a prefix"),
    pytest.param(["https://evilrelay.example"], id="the public name as a suffix"),
    pytest.param(["https://relay.example:8443"], id="the public name at another port"),
    pytest.param(["http://relay.example"], id="the public name in the clear"),
    pytest.param(["http://127.0.0.1:1"], id="another program on this machine"),
    pytest.param(["http://127.0.0.1:{port}", "http://127.0.0.1:{port}"], id="ours twice"),
]


def at(port: int, origins: list[str]) -> list[tuple[str, str]]:
    return [("Origin", origin.format(port=port)) for origin in origins]


@pytest.mark.parametrize("origins", [*FOREIGN, *RELAYS])
async def test_a_page_from_elsewhere_gets_nothing_of_the_relay(
    relay: ServedRelay, origins: list[str]
) -> None:
    headers = at(relay.address.port, origins)
    reply = await relay.mcp("tools/list", token=relay.hub.token(), headers=headers)
    assert reply.status == 403
    assert reply.json()["error"] == "origin"
    assert "access-control-allow-origin" not in reply.headers
    assert relay.refusals() == [("request_refused", HERE, "origin", 1)]


@pytest.mark.parametrize("origins", FOREIGN)
async def test_a_page_from_elsewhere_gets_nothing_of_the_node(
    loopback: LoopbackServer, origins: list[str]
) -> None:
    fields = [("Host", "127.0.0.1"), *at(loopback.port, origins)]
    lines = [f"GET {MANIFEST_PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in fields)]
    answer = await exchange(loopback.port, "\r\n".join([*lines, "", ""]).encode())
    assert parsed(answer).status == 403
    assert NODES_SECRET not in answer
    assert b"access-control" not in answer.lower()


@pytest.mark.parametrize("origins", [*FOREIGN, *RELAYS])
async def test_a_page_from_elsewhere_opens_no_websocket(relay: ServedRelay, origins: list[str]) -> None:
    upgrade = [
        ("Host", str(relay.address)),
        ("Upgrade", "websocket"),
        ("Connection", "Upgrade"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Protocol", "edge-kubelet.v1"),
        *at(relay.address.port, origins),
    ]
    lines = ["GET /devices/connect HTTP/1.1", *(f"{name}: {value}" for name, value in upgrade)]
    reply = parsed(await relay.exchange("\r\n".join([*lines, "", ""]).encode()))
    if len(origins) > 1:
        # No handshake at all (RFC 6455 section 10.2): it does not get as far as the relay's own code.
        assert (reply.status, relay.requests) == (400, [])
        return
    assert reply.status == 403
    assert relay.refusals() == [("request_refused", HERE, "origin", 1)]


async def test_a_preflight_from_elsewhere_is_refused(relay: ServedRelay) -> None:
    headers = [
        ("Origin", "https://evil.example"),
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", "authorization"),
    ]
    reply = await relay.ask("OPTIONS /mcp", headers)
    assert reply.status == 403
    assert "access-control-allow-origin" not in reply.headers
