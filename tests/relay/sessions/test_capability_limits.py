import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.fleet.node_record import Where
from relay.routing.port import Command, LocalRouter
from relay.sessions.node_sessions import CapabilityLimits
from schemas.errors import Failure, ToolError
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed, refusing
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, NODE_ID, OTHER_NODE_ID

CORRELATION_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XY"


def capability(rps: float = 0.5, concurrency: int = 9, **members: Any) -> dict[str, Any]:
    return {**ECHO, "constraints": {"rate_limit_rps": rps, "max_concurrency": concurrency}, **members}


def command(cap_id: str = "echo", node_id: str = NODE_ID) -> Command:
    return Command(node_id, f"sysecho.{node_id}.{cap_id}.invoke", {"message": "ping"}, 1000, CORRELATION_ID)


class Stage:
    """The limits in front of a router, and nodes that announce capabilities."""

    def __init__(self, hub: Hub, router: LocalRouter) -> None:
        self.hub = hub
        self.seconds = Seconds()
        self.limits = CapabilityLimits(hub.fleet, router, self.seconds)
        self.node = hub.ca.issue()

    def announce(self, *capabilities: Mapping[str, Any]) -> None:
        issued_at_ms = self.hub.clock.advance(1)
        self.hub.connect(self.node, capabilities=list(capabilities), issued_at_ms=issued_at_ms)

    async def failure(self, of: Command) -> ToolError:
        with pytest.raises(ToolError) as caught:
            await self.limits.run(of)
        return caught.value


async def test_a_command_without_cost_uses_up_nothing_but_a_place(hub: Hub) -> None:
    held = HeldRouter()
    stage = Stage(hub, held)
    stage.announce(capability(rps=1, concurrency=1))
    free, paid = command()._replace(cost=0.0), command()
    for _ in range(3):
        running = asyncio.create_task(stage.limits.run(free))
        sent, answer = await held.next()
        assert (await stage.failure(paid)).failure is Failure.RATE_LIMITED  # one at a time
        answer.set_result(echoed(sent))
        await running
    running = asyncio.create_task(stage.limits.run(paid))
    sent, answer = await held.next()
    answer.set_result(echoed(sent))
    await running
    assert (await stage.failure(paid)).failure is Failure.RATE_LIMITED  # one a second


@pytest.fixture
def stage(hub: Hub, router: ScriptedRouter) -> Stage:
    stage = Stage(hub, router)
    stage.announce(capability())
    return stage


async def test_a_command_within_the_limits_is_passed_on_and_answered(
    stage: Stage, router: ScriptedRouter
) -> None:
    assert await stage.limits.run(command()) == echoed(command())
    assert router.commands == [command()]


async def test_a_tool_that_is_announced_no_more_is_offline_and_nothing_is_sent(
    stage: Stage, router: ScriptedRouter
) -> None:
    assert (await stage.failure(command("other"))).failure is Failure.NODE_OFFLINE
    stage.hub.fleet.tombstone(NODE_ID)
    stage.hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    stage.announce(capability(cap_id="echo2"))
    assert (await stage.failure(command())).failure is Failure.NODE_OFFLINE
    assert router.commands == []


async def test_capabilities_of_one_name_on_two_nodes_have_limits_of_their_own(
    stage: Stage, router: ScriptedRouter
) -> None:
    stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID), capabilities=[capability()])
    for node_id in (NODE_ID, OTHER_NODE_ID):
        await stage.limits.run(command(node_id=node_id))
    for node_id in (NODE_ID, OTHER_NODE_ID):
        assert (await stage.failure(command(node_id=node_id))).failure is Failure.RATE_LIMITED
    assert len(router.commands) == 2


async def test_a_new_manifest_changes_the_limits_and_gives_back_nothing(stage: Stage) -> None:
    await stage.limits.run(command())
    stage.announce(capability(rps=2))
    assert (await stage.failure(command())).retry_after_ms == 500
    stage.seconds.now += 0.5
    await stage.limits.run(command())


def breaks(_: Command) -> dict[str, Any]:
    raise RuntimeError


@pytest.mark.parametrize("answer", [refusing(Failure.NODE_OFFLINE), breaks])
async def test_a_command_that_fails_no_longer_counts_as_in_flight(
    hub: Hub, router: ScriptedRouter, answer: Any
) -> None:
    stage = Stage(hub, router)
    stage.announce(capability(rps=50, concurrency=1))
    router.answer = answer
    with pytest.raises((ToolError, RuntimeError)):
        await stage.limits.run(command())
    router.answer = echoed
    stage.seconds.now += 1
    await stage.limits.run(command())
