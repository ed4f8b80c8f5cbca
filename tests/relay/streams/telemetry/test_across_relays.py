"""A node of one relay is followed at another, and read at either."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.auth.agent_tokens import AgentName, Caller, Principal
from relay.calls.envelope import Call
from relay.calls.executor import CallRequest
from relay.fleet.node_names import UnknownNodeError
from relay.streams.telemetry.resource import FleetTelemetry, TelemetryResource
from schemas.frames import OneWayType
from schemas.registry import SchemaRegistry
from tests.fakes.caller_stage import CallerStage
from tests.fakes.cluster import JoinedHub
from tests.fakes.cluster_server import NatsServer
from tests.fakes.followed import CAP_ID, FOLLOWED, SUBSCRIBE, URI, Answering, sample_of
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa

pytestmark = pytest.mark.integration


class Relay:
    """One relay as an agent reads it."""

    def __init__(self, hub: JoinedHub) -> None:
        self.hub = hub
        self.resource = TelemetryResource(hub.telemetry, hub.fleet)
        assert hub.peers is not None
        self.everywhere = FleetTelemetry(self.resource, hub.peers, hub.authenticator, hub.seconds)
        self.gateway = hub.gateway(Answering(), hub.seconds)

    @property
    def listens(self) -> list[AgentName]:
        """The agents that listen at the other relay, which this one knows of."""
        return [name for _, (name, _) in self.everywhere._elsewhere]  # noqa: SLF001 - what nothing shows

    def agent(self, **token: Any) -> Principal:
        return self.hub.authenticator.identify(self.hub.token(**token))

    async def subscribe(self, agent: Principal, **arguments: Any) -> None:
        params = {"name": SUBSCRIBE, "arguments": {"interval_ms": 1000, **arguments}}
        call = Call({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        answer = await self.gateway.call(CallRequest(Caller(agent, "http", {}), call, None))
        assert answer.error is None, answer.error


@dataclass
class Fleet:
    """Two relays; ``node`` is connected to ``far``."""

    near: Relay
    far: Relay
    node: CallerStage

    async def sampled(self, number: int) -> None:
        """Let the node send a sample, the one of that number, and wait until it has come to ``near``."""
        payload = {"cap_id": CAP_ID, "sample": sample_of(ts_ms=NOW_MS + number)}
        for relay in (self.near, self.far):
            relay.hub.seconds.now += 1
        self.node.receive(OneWayType.TELEMETRY, payload)
        hub = self.near.hub
        await until(lambda: hub.counted("telemetry_samples_total", verdict="accepted") == number + 1)


@pytest.fixture
async def fleet(nats: NatsServer, tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Fleet]:
    ca = SimulatedCa()
    async with AsyncExitStack() as stack:
        near, far = [
            Relay(
                await stack.enter_async_context(JoinedHub.joined(nats.config, tmp_path / name, registry, ca))
            )
            for name in ("near", "far")
        ]
        node = CallerStage(far.hub, far.hub.ulids.new())
        for relay in (near, far):
            relay.hub.announce(node.node, capabilities=[FOLLOWED], issued_at_ms=NOW_MS + 1)
        await until(lambda: near.hub.part.presence.nodes_elsewhere() == 1)
        await until(lambda: len(far.hub.part.peers.running()) == 1)
        running = [asyncio.create_task(relay.everywhere.run()) for relay in (near, far)]
        yield Fleet(near, far, node)
        assert not any(task.done() for task in running)
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def test_a_node_that_another_relay_does_not_know_yet_has_no_telemetry_there(fleet: Fleet) -> None:
    fleet.near.hub.announce(fleet.near.hub.ca.issue(OTHER_NODE_ID), capabilities=[FOLLOWED])
    uri = URI.replace(NODE_ID, OTHER_NODE_ID)
    assert await fleet.near.everywhere.read(fleet.near.agent(), uri) is None
    assert fleet.far.hub.lines.entries("question of another relay failed") == []


async def test_a_subscription_at_one_relay_is_read_at_any(fleet: Fleet) -> None:
    agent = fleet.near.agent()
    await fleet.near.subscribe(agent, include=["load"])
    sent, lease = await fleet.node.next_sent()
    assert (sent, lease["interval_ms"], lease["include"]) == ("telemetry_lease", 1000, ["load"])
    for number in range(3):
        await fleet.sampled(number)
    here = await fleet.near.everywhere.read(agent, URI)
    there = await fleet.far.everywhere.read(agent, URI)
    assert here == there
    assert json.loads(there or "null").keys() == {"ts_ms", "ts", "node_id", "uptime_s", "load"}
    history = json.loads(await fleet.far.everywhere.read(agent, f"{URI}?since_ms={NOW_MS}") or "null")
    assert [sample["ts_ms"] for sample in history["samples"]] == [NOW_MS + 1, NOW_MS + 2]


async def test_reading_at_another_relay_renews_the_lease(fleet: Fleet) -> None:
    agent = fleet.near.agent()
    await fleet.near.subscribe(agent)
    (stream,) = fleet.near.hub.telemetry.streams_of(agent, fleet.node.node.node_id)
    subscription = stream.get(agent.name)
    assert subscription is not None
    before = subscription.expires_s
    fleet.near.hub.seconds.now += 20
    await fleet.far.everywhere.read(agent, URI)
    assert subscription.expires_s == before + 20


async def test_what_others_follow_at_another_relay_is_read_by_the_rights_of_the_call(fleet: Fleet) -> None:
    assert await fleet.far.everywhere.read(fleet.far.agent(), URI) is None
    await fleet.near.subscribe(fleet.near.agent())
    assert await fleet.far.everywhere.read(fleet.far.agent(sub="agent-2"), URI) is not None
    with pytest.raises(UnknownNodeError):
        await fleet.far.everywhere.read(fleet.far.agent(tenant="globex"), URI)
    revoked = fleet.far.agent(sub="agent-3")
    fleet.near.hub.authenticator.revoke(frozenset({revoked.jti}))
    assert await fleet.far.everywhere.read(revoked, URI) is None


async def test_an_agent_is_notified_where_it_listens_of_what_it_has_subscribed_to_elsewhere(
    fleet: Fleet,
) -> None:
    agent, notified = fleet.near.agent(), 0

    def notify() -> None:
        nonlocal notified
        notified += 1

    # Before the subscription, as a client may do it.
    stop = fleet.far.everywhere.follow(agent, URI, notify)
    assert stop is not None
    await until(lambda: fleet.near.listens == [agent.name])
    await fleet.near.subscribe(agent)
    assert (await fleet.node.next_sent())[1]["ttl_ms"] > 0
    for number in range(3):
        await fleet.sampled(number)
        await until(lambda: notified > number)  # noqa: B023 - called in this round alone
    stop()
    # Ending the last listener ends the subscription, and so the node stops.
    await until(lambda: not fleet.near.resource.streams_of(agent, URI))
    assert (await fleet.node.next_sent())[1]["ttl_ms"] == 0


async def test_listening_at_another_relay_holds_a_subscription_until_it_is_not_renewed(fleet: Fleet) -> None:
    agent = fleet.near.agent()
    await fleet.near.subscribe(agent)
    assert fleet.far.everywhere.follow(agent, URI, lambda: None) is not None
    await until(lambda: fleet.near.listens == [agent.name])
    near = fleet.near.hub
    near.seconds.now += 29
    near.telemetry.sweep()
    near.seconds.now += 0.5
    fleet.near.everywhere.sweep()
    assert fleet.near.resource.has_own(agent, URI)
    near.seconds.now += 1
    fleet.near.everywhere.sweep()
    assert not fleet.near.resource.streams_of(agent, URI)


async def test_listening_is_renewed_by_the_token_that_lasts_longest_of_those_that_listen(
    fleet: Fleet,
) -> None:
    near, far = fleet.near, fleet.far
    agent, shorter, longer = [far.agent(ttl_s=ttl_s) for ttl_s in (120, 60, 180)]
    assert far.everywhere.follow(agent, URI, lambda: None) is not None
    await until(lambda: near.listens == [agent.name])
    assert far.everywhere.follow(shorter, URI, lambda: None) is not None
    stop = far.everywhere.follow(longer, URI, lambda: None)
    assert stop is not None
    stop()
    near.hub.authenticator.revoke(frozenset({shorter.jti, longer.jti}))
    near.hub.seconds.now += 31
    near.everywhere.sweep()
    assert near.listens == []
    far.hub.seconds.now += 10
    far.everywhere.sweep()
    await until(lambda: near.listens == [agent.name])


async def test_a_subscription_ends_with_the_last_token_by_which_its_agent_listens_elsewhere(
    fleet: Fleet,
) -> None:
    near, far = fleet.near, fleet.far
    first, last = [far.agent(ttl_s=ttl_s) for ttl_s in (60, 180)]
    await near.subscribe(first)
    assert far.everywhere.follow(first, URI, lambda: None) is not None
    await until(lambda: near.listens == [first.name])
    assert far.everywhere.follow(last, URI, lambda: None) is not None
    (stream,) = near.resource.streams_of(first, URI)
    await until(lambda: (own := stream.get(last.name)) is not None and own.principal.jti == last.jti)


async def test_who_may_not_read_does_not_listen_elsewhere(fleet: Fleet) -> None:
    revoked = fleet.far.agent()
    fleet.near.hub.authenticator.revoke(frozenset({revoked.jti}))
    assert fleet.far.everywhere.follow(revoked, URI, lambda: None) is not None
    other = fleet.far.agent(sub="agent-2")
    assert fleet.far.everywhere.follow(other, URI, lambda: None) is not None
    await until(lambda: fleet.near.listens == [other.name])
