"""Attacker: any client, for each can write a header. Tried: to pass as another client, elsewhere, by the
headers in which proxies describe the request that they forward: to reach ``/metrics`` from outside, to pass
under a foreign name, to have its refusals audited under another's address.

What must happen: they are ignored. The audit names the address that the connection came from.
"""

import pytest

from tests.fakes.served_relay import HERE, ServedRelay

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLAIMS = [
    [("X-Forwarded-For", "192.0.2.1")],
    [("X-Forwarded-For", "192.0.2.1\t, 127.0.0.1")],
    [("X-Real-IP", "192.0.2.1")],
    [("Forwarded", "for=192.0.2.1;host=127.0.0.1;proto=https")],
    [("X-Client-IP", "192.0.2.1"), ("True-Client-IP", "192.0.2.1"), ("CF-Connecting-IP", "192.0.2.1")],
]
ids = ["X-Forwarded-For", "a list", "X-Real-IP", "Forwarded", "others"]


@pytest.mark.parametrize("headers", CLAIMS, ids=ids)
async def test_the_audit_names_the_address_of_the_connection(
    relay: ServedRelay, headers: list[tuple[str, str]]
) -> None:
    assert (await relay.mcp("tools/list", token="x", headers=headers)).status == 401
    assert (await relay.ask("GET /", headers, host="evil.example")).status == 421
    assert relay.refusals() == [
        ("token_refused", HERE, "malformed", 1),
        ("request_refused", HERE, "host", 1),
    ]
    assert "192.0.2.1" not in relay.hub.audit_file.read_text("ascii")


@pytest.mark.parametrize(
    "name", ["X-Forwarded-Host", "X-Host", "X-Original-Host", "X-Forwarded-Server", "Forwarded"]
)
async def test_a_foreign_name_is_not_made_good_by_one_that_was_forwarded(
    relay: ServedRelay, name: str
) -> None:
    value = f"host={relay.address}" if name == "Forwarded" else str(relay.address)
    assert (await relay.ask("GET /healthz", [(name, value)], host="evil.example")).status == 421
    assert relay.refusals() == [("request_refused", HERE, "host", 1)]


@pytest.mark.parametrize("name", ["X-Forwarded-Host", "X-Forwarded-For", "X-Real-IP", "X-Host"])
async def test_metrics_are_not_on_the_public_listener(relay: ServedRelay, name: str) -> None:
    for host in ("relay.example", f"localhost:{relay.address.port}"):
        reply = await relay.ask("GET /metrics", [(name, str(relay.address))], host=host)
        assert reply.status == 404
        assert b"edge_relay" not in reply.body


@pytest.mark.parametrize("name", ["X-Original-URL", "X-Rewrite-URL", "X-HTTP-Method-Override", "X-Method"])
async def test_a_request_is_not_made_another_by_a_header(relay: ServedRelay, name: str) -> None:
    reply = await relay.ask("GET /healthz", [(name, "/metrics")])
    assert (reply.status, reply.json()) == (200, {"status": "ok"})
    assert relay.requests == ["/healthz"]
