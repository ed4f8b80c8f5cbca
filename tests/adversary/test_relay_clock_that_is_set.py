"""Attacker: one who sets the clock of the relay's machine, or answers for its NTP server. Tried: steps
either way while nodes are connected and agents call.

What must happen: a step of up to 4 min costs no call, no session and no token that was good. A larger one
shows in ``/readyz`` and in the log until the clock is right again, and then calls go on.
"""

import asyncio
import json

import pytest

from relay.settings.environment import TOLERANCE_MS
from schemas.delivery import TransitGauge
from tests.fakes.node_end import NodeEnd
from tests.fakes.refusals import echo_of
from tests.fakes.served_relay import Reply, ServedRelay, auth_for
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

STEPS = [10_000, -10_000, TOLERANCE_MS, -TOLERANCE_MS]
HOUR_MS = 3_600_000
DEADLINE_MS = 2000


async def called(
    relay: ServedRelay, end: NodeEnd, node: SimulatedNode, gauge: TransitGauge, token: str
) -> Reply:
    """Call echo, answered as a node does that measures delays by its own ticks."""
    call = asyncio.create_task(relay.call(echo_of(node), token))
    command = await end.receive("cmd")
    delay = gauge.delay_ms(command.payload["sent_at_ms"], relay.hub.clock.ticks_ms())
    assert command.payload["deadline_ms"] - delay == DEADLINE_MS
    result = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
    await end.send("cmd_ack", {"ok": True, "result": result}, command.msg_id)
    return await call


async def announce(relay: ServedRelay, end: NodeEnd, node: SimulatedNode) -> bool:
    """Announce ``node``, whose own clock was not set; return whether the relay takes it."""
    manifest = node.manifest(issued_at_ms=relay.hub.clock.ticks_ms())
    await end.send("announce", json.loads(manifest))
    return bool((await end.receive("announce_ack")).payload["ok"])


def passing(relay: ServedRelay, ms: int = 1000) -> None:
    relay.hub.clock.advance(ms)


@pytest.mark.parametrize("by_ms", STEPS)
async def test_a_step_of_four_minutes_costs_no_call_and_no_session(
    relay: ServedRelay, node: SimulatedNode, by_ms: int
) -> None:
    token = relay.hub.token(ttl_s=600)
    async with relay.session(node) as end:
        gauge = TransitGauge()
        gauge.delay_ms(NOW_MS, relay.hub.clock.ticks_ms())
        await called(relay, end, node, gauge, token)
        relay.hub.clock.step(by_ms)
        for _ in range(5):
            reply = await called(relay, end, node, gauge, token)
            assert reply.json()["result"].get("isError", False) is False
            passing(relay, 60_000)
            assert await announce(relay, end, node)
        assert (await relay.ask("GET /readyz")).status == 200
    assert [line for line in relay.calls() if line[1] != "ok"] == []
    assert relay.refusals() == []


@pytest.mark.parametrize("by_ms", STEPS)
async def test_a_node_gets_in_while_the_clock_is_set(
    relay: ServedRelay, node: SimulatedNode, by_ms: int
) -> None:
    async with relay.end(node) as end:
        challenge = await end.receive("challenge")
        relay.hub.clock.step(by_ms)
        await end.send("auth", auth_for(node, challenge), challenge.msg_id)
        assert (await end.receive("welcome")).payload["server_time_ms"] == NOW_MS
        assert await announce(relay, end, node)
    assert relay.refusals() == []


@pytest.mark.parametrize("by_ms", STEPS)
@pytest.mark.parametrize("passed_ms", [0, HOUR_MS], ids=["at once", "when it is made up"])
async def test_a_token_of_an_issuer_with_the_right_time_is_accepted(
    relay: ServedRelay, by_ms: int, passed_ms: int
) -> None:
    assert (await relay.ask("GET /readyz")).status == 200
    relay.hub.clock.step(by_ms)
    relay.hub.judged_by()
    relay.hub.clock.advance(passed_ms)
    now_s = relay.hub.clock.ticks_ms() // 1000
    token = relay.hub.issuer.issue(
        sub="agent-1", tenant="acme", scopes=["tools:call:read_only"], now_s=now_s, ttl_s=300, jti="1"
    )
    assert (await relay.mcp("tools/list", token=token)).status == 200


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
async def test_a_large_step_is_seen_and_heals_with_its_correction(
    relay: ServedRelay, node: SimulatedNode, by_ms: int
) -> None:
    token = relay.hub.token(ttl_s=600)
    async with relay.session(node) as end:
        gauge = TransitGauge()
        gauge.delay_ms(NOW_MS, relay.hub.clock.ticks_ms())
        await called(relay, end, node, gauge, token)
        relay.hub.clock.step(by_ms)
        passing(relay)
        assert not await announce(relay, end, node)
        not_ready = await relay.ask("GET /readyz")
        assert not_ready.status == 503
        assert not_ready.json()["subsystems"]["clock"]["ready"] is False
        if by_ms > 0:
            assert (await relay.mcp("tools/list", token=token)).status == 401  # it has rightly expired
        relay.hub.clock.step(-by_ms)
        passing(relay)
        assert (await relay.ask("GET /readyz")).status == 200
        assert await announce(relay, end, node)
        reply = await called(relay, end, node, gauge, token)
        assert reply.json()["result"].get("isError", False) is False


async def test_a_clock_that_was_wrong_before_heals_with_the_first_manifest(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with relay.end(node) as end:
        await end.authenticate()
        relay.hub.clock.step(2 * HOUR_MS)
        assert (await relay.ask("GET /readyz")).status == 503
        await end.send("announce", json.loads(node.manifest(issued_at_ms=relay.hub.clock())))
        assert (await end.receive("announce_ack")).payload["ok"] is True
        assert (await relay.ask("GET /readyz")).status == 200
