"""The relay's own echoes, with real audit, limits and fleet, and nodes that answer as a test says."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from relay.calls.canaries import WINDOW_S, Canaries
from relay.calls.executor import CallExecutor
from relay.calls.results import Hop
from relay.routing.port import Command, NodeRef
from relay.sessions.node_sessions import CapabilityLimits
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub
from tests.fakes.pauses import Pauses
from tests.fakes.routers import ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID, TENANT

BOUND_S = 30
OTHER_TENANT = "other"
THIRD_NODE_ID = "01hzx9k3m4p7q8r9s0t1v2w3x9"
NODE = NodeRef(TENANT, NODE_ID, "s1")
OTHER = NodeRef(TENANT, OTHER_NODE_ID, "s2")
THIRD = NodeRef(OTHER_TENANT, THIRD_NODE_ID, "s3")


class Nodes(ScriptedRouter):
    """Nodes that answer, but for those that a test silences or breaks."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.failing: dict[str, Failure] = {}

    def _answer(self, command: Command) -> CmdAck:
        if (failure := self.failing.get(command.node_id)) is not None:
            raise ToolError(failure)
        return echoed(command)


class Stage:
    """Canaries, the nodes that they are sent to, and the clock that decides when."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.nodes = Nodes()
        self.seconds = Seconds()
        self.pauses = Pauses()
        self.limits = CapabilityLimits(hub.fleet, self.nodes, self.seconds)
        self.executor = CallExecutor(self.limits, hub.telemetry, hub.audit, self.seconds, bytes)
        self.canaries = Canaries(
            fleet=hub.fleet,
            executor=self.executor,
            audit=hub.audit,
            ulids=hub.ulids,
            metrics=hub.metrics,
            monotonic=self.seconds,
            log=hub.log,
            sleep=self.pauses.sleep,
        )

    def connect(self, *nodes: NodeRef, echo: bool = True) -> None:
        for node in nodes:
            issued = self.hub.ca.issue(node.node_id, tenant=node.tenant)
            self.hub.connect(issued, capabilities=[ECHO, METRICS] if echo else [METRICS])
            self.canaries.connection_changed(node, True)  # noqa: FBT003 - as the sessions call it

    def disconnect(self, node: NodeRef) -> None:
        self.canaries.connection_changed(node, False)  # noqa: FBT003 - as above

    def counted(self, **labels: str) -> float:
        return self.hub.counted("canaries_total", **labels)

    async def until_counted(self, count: float) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.counted() < count:  # noqa: ASYNC110 - tasks of this loop count
                await asyncio.sleep(0)

    async def sample(self, count: int) -> None:
        """Let ``count`` canaries of the sample be sent, and six seconds pass before each."""
        for _ in range(count):
            before = self.counted()
            pause = await self.pauses.next()
            self.seconds.now += pause.seconds
            pause.end()
            await self.until_counted(before + 1)

    def asked(self) -> list[str]:
        """Return the nodes that were sent an echo since the last time this was called."""
        asked = [command.node_id for command in self.nodes.commands]
        self.nodes.commands.clear()
        return asked


@pytest.fixture
async def stage(hub: Hub) -> AsyncIterator[Stage]:
    stage = Stage(hub)
    running = asyncio.create_task(stage.canaries.run())
    yield stage
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_node_is_sent_one_echo_for_each_welcome_once_its_manifest_was_accepted(stage: Stage) -> None:
    for welcomes in (1, 2):
        stage.connect(NODE)
        assert stage.asked() == []
        for _ in range(3):  # it announces itself with every heartbeat
            stage.canaries.announced(NODE)
        await stage.until_counted(welcomes)
        assert stage.asked() == [NODE_ID]
    assert stage.counted(code="ok", hop="") == 2


async def test_a_line_allows_the_canaries_of_a_minute_and_sums_up_those_before(stage: Stage) -> None:
    stage.connect(NODE, OTHER)
    await stage.sample(10)
    stage.nodes.failing[NODE_ID] = Failure.DEADLINE_EXCEEDED
    await stage.sample(11)
    failed = stage.counted(code="E_DEADLINE_EXCEEDED") - (stage.asked()[-1] == NODE_ID)
    lines = stage.hub.audited()
    assert {(line["event"], line["sub"]) for line in lines} == {("canaries", "relay")}
    assert [(line["code"], line["count"], line["failed"]) for line in lines] == [
        ("ok", 0, 0),
        ("ok", 10, 0),
        ("E_DEADLINE_EXCEEDED", 10, failed),
    ]
    assert failed > 0


async def test_none_is_sent_in_a_minute_whose_line_cannot_be_written(stage: Stage) -> None:
    stage.connect(NODE)
    with full_disk():
        await stage.sample(2)
    assert stage.asked() == []
    await stage.sample(1)
    assert stage.asked() == [NODE_ID]
    assert [line["failed"] for line in stage.hub.audited()] == [2]


async def test_what_the_last_line_does_not_sum_up_has_a_line_at_the_end(hub: Hub) -> None:
    stage = Stage(hub)
    running = asyncio.create_task(stage.canaries.run())
    stage.connect(NODE)
    await stage.sample(3)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert [line["count"] for line in hub.audited()] == [0, 3]


async def test_a_sample_of_ten_a_minute_goes_round_the_tenants_and_the_nodes_of_each(stage: Stage) -> None:
    stage.connect(NODE, OTHER, THIRD)
    began = stage.seconds()
    await stage.sample(10)
    assert stage.seconds() - began == 60
    asked = stage.asked()
    assert [asked.count(node) for node in (THIRD_NODE_ID, NODE_ID, OTHER_NODE_ID)] == [5, 3, 2]
    stage.disconnect(NODE)
    await stage.sample(4)
    assert sorted(stage.asked()) == sorted([THIRD_NODE_ID, OTHER_NODE_ID] * 2)


async def test_a_canary_uses_up_nothing_of_the_rate_of_the_capability(stage: Stage) -> None:
    stage.connect(NODE)
    await stage.sample(5)
    command = stage.nodes.commands[0]
    tool = stage.hub.fleet.tool_of(command.tool)
    assert tool is not None
    agents = Command(NODE_ID, tool.canonical, command.arguments, 2000, command.correlation_id)
    for _ in range(int(tool.allowance.burst)):
        await stage.limits.run(agents)
    with pytest.raises(ToolError):
        await stage.limits.run(agents)


async def test_where_agents_have_all_that_runs_at_once_their_calls_are_the_sample(stage: Stage) -> None:
    stage.connect(NODE)
    stage.nodes.failing[NODE_ID] = Failure.RATE_LIMITED  # as the limits in front of it raise it
    stage.canaries.announced(NODE)
    async with asyncio.timeout(BOUND_S):
        while stage.asked() != [NODE_ID]:  # noqa: ASYNC110 - a task of this loop asks
            await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (stage.counted(), stage.canaries.health().ready) == (0, True)


async def test_calls_flow_where_no_node_is_connected_or_none_has_an_echo(stage: Stage) -> None:
    assert stage.canaries.health().state == "no node is connected"
    stage.connect(NODE, echo=False)
    stage.canaries.announced(NODE)
    pause = await stage.pauses.next()
    pause.end()
    await stage.pauses.next()
    assert (stage.asked(), stage.canaries.health().ready) == ([], True)


async def test_a_node_that_does_not_answer_turns_only_its_own_state_red(stage: Stage) -> None:
    stage.connect(NODE, OTHER)
    stage.nodes.failing[OTHER_NODE_ID] = Failure.DEADLINE_EXCEEDED
    await stage.sample(20)
    assert stage.canaries.silent == {OTHER_NODE_ID: Hop.NODE}
    assert stage.hub.counted("nodes_silent") == 1
    assert stage.counted(code="E_DEADLINE_EXCEEDED", hop="node") == 10
    assert stage.canaries.health().ready
    [line] = stage.hub.lines.entries("node does not answer")
    assert (line["node_id"], line["hop"], line["code"]) == (OTHER_NODE_ID, "node", "E_DEADLINE_EXCEEDED")
    del stage.nodes.failing[OTHER_NODE_ID]
    await stage.sample(2)
    assert stage.canaries.silent == {}
    assert len(stage.hub.lines.entries("node answers again")) == 1


def refs(numbers: range) -> list[NodeRef]:
    return [NodeRef(TENANT, f"01hzx9k3m4p7q8r9s0t1v2w3{number}", f"s{number}") for number in numbers]


async def test_nodes_that_are_known_as_silent_do_not_turn_the_relay_red(stage: Stage) -> None:
    silent, answering = refs(range(10, 26)), refs(range(30, 34))
    stage.connect(*silent, *answering)
    stage.nodes.failing = {node.node_id: Failure.DEADLINE_EXCEEDED for node in silent}
    for node in (*silent, *answering):
        stage.canaries.announced(node)
    await stage.until_counted(20)
    assert len(stage.canaries.silent) == 16
    stage.seconds.now += WINDOW_S + 1
    ready = []
    for _ in range(100):
        await stage.sample(1)
        ready.append(stage.canaries.health().ready)
    assert ready == [True] * 100
    asked = stage.asked()[20:]
    assert {asked.count(node.node_id) for node in silent} == {3, 4}  # so that they are heard when they answer
    # What stops all calls is noticed beside them: within a minute no canary of the others has succeeded.
    stage.nodes.failing |= {node.node_id: Failure.DEADLINE_EXCEEDED for node in answering}
    await stage.sample(12)
    assert not stage.canaries.health().ready
    await stage.sample(20)  # all are silent: now each failure counts
    assert not stage.canaries.health().ready
    stage.nodes.failing.clear()
    await stage.sample(1)
    assert stage.canaries.health().ready


async def test_the_relay_is_red_when_the_canaries_of_all_tenants_fail_together(stage: Stage) -> None:
    stage.connect(NODE, THIRD)
    await stage.sample(4)
    stage.nodes.failing = dict.fromkeys((NODE_ID, THIRD_NODE_ID), Failure.DEADLINE_EXCEEDED)
    await stage.sample(int(WINDOW_S / 6))
    assert stage.canaries.health().ready  # one that succeeded is not a minute old
    await stage.sample(1)
    health = stage.canaries.health()
    assert (health.ready, health.live, health.state) == (False, True, "0 of 10 canaries answered")
    del stage.nodes.failing[THIRD_NODE_ID]
    await stage.sample(2)
    assert stage.canaries.health().ready
    assert stage.canaries.silent == {NODE_ID: Hop.NODE}


async def test_one_that_fails_just_after_the_start_is_not_enough(stage: Stage) -> None:
    stage.connect(NODE)
    stage.nodes.failing[NODE_ID] = Failure.DEADLINE_EXCEEDED
    ready = []
    for _ in range(3):
        await stage.sample(1)
        ready.append(stage.canaries.health().ready)
    assert ready == [True, True, False]


async def test_a_node_that_has_gone_meanwhile_has_not_failed(stage: Stage) -> None:
    stage.connect(NODE, OTHER)
    stage.nodes.failing = dict.fromkeys((NODE_ID, OTHER_NODE_ID), Failure.NODE_OFFLINE)
    stage.canaries.announced(NODE)
    stage.disconnect(NODE)
    await stage.until_counted(1)
    assert stage.counted(hop="session") == 1
    assert stage.canaries.silent == {}
    await stage.sample(1)
    assert stage.canaries.silent == {OTHER_NODE_ID: Hop.SESSION}
    stage.disconnect(OTHER)
    assert stage.canaries.silent == {}


async def test_the_relay_is_red_at_once_when_its_own_hop_fails(stage: Stage) -> None:
    stage.connect(NODE)
    await stage.sample(3)
    stage.seconds.now += 60  # the line of the next minute is due
    with full_disk():
        await stage.sample(1)
        health = stage.canaries.health()
    assert (health.ready, health.state) == (False, "the relay itself fails; see its log")
    assert stage.counted(code="E_INTERNAL", hop="relay") == 1
    assert stage.canaries.silent == {}
    await stage.sample(1)
    assert stage.canaries.health().ready


async def test_a_bug_fails_one_canary_and_neither_the_relay_nor_the_node(stage: Stage) -> None:
    stage.connect(NODE)

    def broken(*_: Any) -> None:
        raise RuntimeError

    stage.executor.on_result(broken)
    await stage.sample(1)
    assert not stage.canaries.health().ready
    [line] = stage.hub.lines.entries("canary failed")
    assert "RuntimeError" in line["exception"]
