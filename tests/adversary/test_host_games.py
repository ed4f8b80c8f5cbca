"""Attacker: a page in a user's browser on the relay's or the node's machine, under a name of its own
that it makes resolve to loopback; and a proxy that is misled. Tried: foreign names in ``Host``, none,
two, with ports, dots, user parts, in the request's target, on both HTTP relay.

What must happen: 421 and a ``request_refused`` line at the relay; 421 at the node, which keeps no audit;
nothing of what was asked for.
"""

import pytest

from kubelet.loopback import HEALTH_PATH, MANIFEST_PATH, LoopbackServer
from tests.fakes.loopback_state import WIRE as NODES_SECRET
from tests.fakes.raw_http import exchange
from tests.fakes.served_relay import HERE, ServedRelay, parsed

pytestmark = pytest.mark.asyncio(loop_scope="module")

FOREIGN = [
    pytest.param(["evil.example"], id="another name"),
    pytest.param(["evil.example:{port}"], id="another name at our port"),
    pytest.param(["127.0.0.1.evil.example:{port}"], id="our address as a prefix"),
    pytest.param(["evil-127.0.0.1:{port}"], id="our address as a suffix"),
    pytest.param(["localhost.evil.example:{port}"], id="localhost as a prefix"),
    pytest.param(["evil.localhost:{port}"], id="a name below localhost"),
    pytest.param(["127.0.0.1:{port}@evil.example"], id="as a user part"),
    pytest.param(["evil.example@127.0.0.1:{port}"], id="with a user part"),
    pytest.param(["127.0.0.1:{port}.evil.example"], id="behind the port"),
    pytest.param(["127.0.0.1:{port}/"], id="with a path"),
    pytest.param(["127.0.0.1:{port}#"], id="with a fragment"),
    pytest.param(["127.0.0.1.:{port}"], id="an address and a dot"),
    pytest.param(["localhost.:{port}"], id="a name and a dot"),
    pytest.param(["127.0.0.1:"], id="no port"),
    pytest.param(["127.0.0.1:{port}0000"], id="a port too long"),
    pytest.param(["127.0.0.1:-1"], id="a negative port"),
    pytest.param(["127.1:{port}"], id="our address in short"),
    pytest.param(["2130706433:{port}"], id="our address as a number"),
    pytest.param(["0x7f.0.0.1:{port}"], id="our address in hex"),
    pytest.param(["0177.0.0.1:{port}"], id="our address in octal"),
    pytest.param(["0.0.0.0:{port}"], id="any address"),
    pytest.param(["[::]:{port}"], id="any address of IPv6"),
    pytest.param(["[::ffff:127.0.0.1]:{port}"], id="our address in IPv6"),
    pytest.param(["127.0.0.1:{port}, evil.example"], id="a list"),
    pytest.param(["evil.example, 127.0.0.1:{port}"], id="a list, ours last"),
    pytest.param(["\xb2\xb7.0.0.1:{port}"], id="digits of another script"),
    pytest.param([""], id="empty"),
    pytest.param([], id="none"),
    pytest.param(["127.0.0.1:{port}", "127.0.0.1:{port}"], id="ours twice"),
    pytest.param(["127.0.0.1:{port}", "evil.example"], id="ours, then another"),
    pytest.param(["evil.example", "127.0.0.1:{port}"], id="another, then ours"),
]
RELAYS = [
    pytest.param(["127.0.0.1:1"], id="another port"),
    pytest.param(["relay.example:80"], id="the public name at another port"),
    pytest.param(["relay.example."], id="the public name and a dot"),
    pytest.param(["relay.example.evil.example"], id="the public name as a prefix"),
    pytest.param(["www.relay.example"], id="below the public name"),
]


def request(method: str, target: str, hosts: list[str], port: int) -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *(f"Host: {host.format(port=port)}" for host in hosts)]
    return "\r\n".join([*lines, "Connection: close", "", ""]).encode("latin-1")


@pytest.mark.parametrize("hosts", [*FOREIGN, *RELAYS])
@pytest.mark.parametrize("target", ["/mcp", "/metrics"])
async def test_the_relay_answers_to_no_other_name(relay: ServedRelay, hosts: list[str], target: str) -> None:
    reply = parsed(await relay.exchange(request("POST", target, hosts, relay.address.port)))
    assert reply.status == 421
    assert reply.json()["error"] == "host"
    assert relay.refusals() == [("request_refused", HERE, "host", 1)]


@pytest.mark.parametrize("hosts", FOREIGN)
@pytest.mark.parametrize("target", [MANIFEST_PATH, HEALTH_PATH])
async def test_the_node_answers_to_no_other_name(
    loopback: LoopbackServer, hosts: list[str], target: str
) -> None:
    answer = await exchange(loopback.port, request("GET", target, hosts, loopback.port))
    assert parsed(answer).status == 421
    assert NODES_SECRET not in answer


@pytest.mark.parametrize("hosts", [["evil.example"], [], ["127.0.0.1:{port}", "evil.example"]])
async def test_a_websocket_under_another_name_is_refused(relay: ServedRelay, hosts: list[str]) -> None:
    raw = request("GET", "/devices/connect", hosts, relay.address.port)
    upgrade = (
        b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: edge-kubelet.v1\r\n\r\n"
    )
    reply = parsed(await relay.exchange(raw.replace(b"Connection: close\r\n\r\n", upgrade)))
    assert reply.status == 403
    assert relay.refusals() == [("request_refused", HERE, "host", 1)]


# --- the name in the request's target, which counts for more than Host (RFC 9112 section 3.2.2)


async def test_a_foreign_name_in_the_target_reaches_nothing_at_the_node(loopback: LoopbackServer) -> None:
    raw = request("GET", f"http://evil.example{MANIFEST_PATH}", ["127.0.0.1"], loopback.port)
    answer = await exchange(loopback.port, raw)
    assert parsed(answer).status == 404
    assert NODES_SECRET not in answer


async def test_our_name_in_the_target_makes_no_foreign_host_good(relay: ServedRelay) -> None:
    raw = request("GET", f"http://{relay.address}/metrics", ["evil.example"], relay.address.port)
    assert parsed(await relay.exchange(raw)).status == 421
    assert relay.refusals() == [("request_refused", HERE, "host", 1)]


async def test_a_target_with_a_name_does_not_get_around_the_token(relay: ServedRelay) -> None:
    raw = request("POST", f"http://{relay.address}/mcp", ["127.0.0.1:{port}"], relay.address.port)
    assert parsed(await relay.exchange(raw)).status == 401


async def test_a_foreign_name_in_the_target_is_refused(relay: ServedRelay) -> None:
    raw = request("GET", "http://evil.example/healthz", ["127.0.0.1:{port}"], relay.address.port)
    assert parsed(await relay.exchange(raw)).status == 421
    assert relay.refusals() == [("request_refused", HERE, "host", 1)]


@pytest.mark.parametrize("target", ["evil.example:443", "127.0.0.1:22"])
async def test_the_relay_is_no_proxy(relay: ServedRelay, target: str) -> None:
    reply = parsed(await relay.exchange(request("CONNECT", target, ["127.0.0.1:{port}"], relay.address.port)))
    assert reply.status == 400
    assert relay.requests == []
