"""The clients of a relay hear of the nodes of another one: as they come, change and go."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from relay.auth.permissions import Rights
from relay.calls.results import CallAnswer
from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import GRACE_MS
from relay.mcp_api.resources import FleetResources
from relay.routing.port import Command, CommandAnswer, LocalRouter, NodeRouter, answer_of
from schemas.errors import Failure
from schemas.frames import OneWayType
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from tests.fakes.background import in_background
from tests.fakes.caller_stage import CallerStage
from tests.fakes.callers import call_of
from tests.fakes.cluster import JoinedHub, Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.hub import Hub
from tests.fakes.polling import until
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import (
    ECHO,
    METRICS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

pytestmark = pytest.mark.integration

READERS = Rights(TENANT, frozenset({"read_only"}))


class Client:
    """A client of ``hub``, which lists the tools whenever it hears that they have changed."""

    def __init__(self, hub: JoinedHub, notifier: ChangeNotifier) -> None:
        self._hub = hub
        self._lists: asyncio.Queue[set[str]] = asyncio.Queue()
        notifier.listen(READERS, self._changed)

    async def until_listed(self, capabilities: set[str]) -> None:
        """Wait until it has heard of a list with tools of exactly these capabilities."""
        async with asyncio.timeout(30):
            while await self._lists.get() != capabilities:
                pass

    async def _changed(self) -> None:
        self._lists.put_nowait({tool.cap_id for tool in self._hub.fleet.selected.listed(READERS)})


@pytest.fixture
async def hubs(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> AsyncIterator[tuple[JoinedHub, JoinedHub]]:
    ca = SimulatedCa()
    async with AsyncExitStack() as stack:
        here, there = [
            await stack.enter_async_context(JoinedHub.joined(nats.config, tmp_path / name, registry, ca))
            for name in ("here", "there")
        ]
        yield here, there


async def test_the_list_of_nodes_has_the_relay_that_each_is_connected_to(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    node = there.ca.issue()
    here.announce(node, capabilities=[ECHO])
    resources = FleetResources(here.fleet, here.part.peers.relay_of)

    def relay() -> str | None:
        (shown,) = json.loads(resources.read(READERS, "nodes", "") or "")["nodes"]
        found: str | None = shown["relay"]
        return found

    stage = CallerStage(there, there.ulids.new(), node)
    await until(lambda: relay() == there.part.peers.relay)
    stage.lose()
    await until(lambda: relay() is None)
    CallerStage(here, here.ulids.new(), node)
    await until(lambda: relay() == here.part.peers.relay)


async def test_what_is_wrong_with_a_node_is_shown_at_every_relay_while_its_session_lasts(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    node = there.ca.issue()
    for hub in hubs:
        hub.announce(node, capabilities=[ECHO])
    stage = CallerStage(there, there.ulids.new(), node)
    hot = {"code": "hot", "severity": "warning", "count": 1, "since_ms": NOW_MS}
    failed = {"code": "unit_failed", "severity": "error", "count": 1, "since_ms": None}

    def shown() -> list[str]:
        record = here.fleet.node_of(TENANT, node.node_id)
        return [each["code"] for each in record.findings] if record is not None else []

    stage.receive(OneWayType.FINDINGS, {"findings": [hot]})
    await until(lambda: shown() == ["hot"])
    stage.receive(OneWayType.FINDINGS, {"findings": [hot, failed]})
    await until(lambda: shown() == ["unit_failed", "hot"])
    stage.receive(OneWayType.FINDINGS, {"findings": []})
    await until(lambda: shown() == [])
    stage.receive(OneWayType.FINDINGS, {"findings": [hot]})
    await until(lambda: shown() == ["hot"])
    stage.link(there.ulids.new())  # another session, which has not reported yet
    await until(lambda: shown() == [])
    stage.receive(OneWayType.FINDINGS, {"findings": [hot]})
    await until(lambda: shown() == ["hot"])
    stage.lose()
    await until(lambda: shown() == [])


async def test_a_client_hears_of_a_node_of_another_relay_that_comes_changes_and_goes(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    here.clock.advance(GRACE_MS)
    notifier = ChangeNotifier(here.fleet, here.log, interval_s=0)
    async with in_background(notifier.run()):
        client = Client(here, notifier)
        node = there.ca.issue()
        here.announce(node, capabilities=[ECHO])
        assert here.fleet.selected.listed(READERS) == []  # it is connected nowhere
        stage = CallerStage(there, there.ulids.new(), node)
        await client.until_listed({"echo"})
        here.announce(node, capabilities=[ECHO, METRICS], issued_at_ms=here.clock() + 1)
        await client.until_listed({"echo", str(METRICS["cap_id"])})
        stage.lose()
        await until(lambda: not here.part.presence.nodes_elsewhere())
        here.clock.advance(GRACE_MS)
        await client.until_listed(set())


async def test_what_this_relay_has_not_verified_is_not_listed_wherever_the_node_is_connected(
    hubs: tuple[JoinedHub, JoinedHub],
) -> None:
    here, there = hubs
    here.clock.advance(GRACE_MS)
    node = there.ca.issue()
    forged = SimulatedNode(node.node_id, TENANT, key_named("of no node"), node.leaf_pem, node.root_pem)
    CallerStage(there, there.ulids.new(), node)
    assert there.fleet.selected.listed(READERS)
    here.announce(forged, capabilities=[ECHO])
    await until(lambda: here.part.presence.nodes_elsewhere() == 1)  # its leaf is known, and it is connected
    assert here.fleet.selected.listed(READERS) == []
    here.announce(node, capabilities=[ECHO])
    await until(lambda: here.fleet.selected.listed(READERS))


# --- a result that comes by way of another relay is checked as that of a node of this relay


NAME = f"sysecho.{NODE_ID}.echo.invoke"
SHOWN = "what the node must not say"
GOOD: Mapping[str, Any] = {"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID}
OF_ITS_OWN = {"correlation_id", "jti", "duration_ms", "ts_ms"}
"""What differs between two calls that end alike."""


class Elsewhere(LocalRouter):
    """The nodes of other relays, for a gateway that begins commands; a relay only awaits those."""

    def __init__(self, router: NodeRouter) -> None:
        self._router = router

    def start(self, command: Command) -> CommandAnswer:
        """Ask the relay that has the node."""
        return answer_of(self._router.run(command))


async def called(hub: Hub, router: LocalRouter) -> tuple[CallAnswer, list[dict[str, Any]]]:
    """Return what a call by way of ``router`` is answered, and what the audit has of it."""
    before = len(hub.audited())
    answer = await hub.gateway(router).call(call_of(hub.token(), NAME, {"message": "ping"}))
    return answer, [without_own(line) for line in hub.audited()[before:]]


def without_own(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in OF_ITS_OWN}


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param({"text": SHOWN}, id="another form"),
        pytest.param({**GOOD, "more": SHOWN}, id="a member besides"),
        pytest.param({**GOOD, "received_at_ms": SHOWN}, id="a member of another type"),
        pytest.param({**GOOD, "message": SHOWN}, id="not what was sent"),
        pytest.param({**GOOD, "node_id": OTHER_NODE_ID}, id="another node's"),
    ],
)
async def test_a_result_that_breaks_its_schema_is_refused_as_of_a_node_of_its_own(
    hub: Hub, asker: Member, owner: Member, broken: Mapping[str, Any]
) -> None:
    hub.connect(hub.ca.issue())

    def answer(_command: Command) -> CmdAck:
        return {"ok": True, "result": broken}

    own, audited_of_own = await called(hub, ScriptedRouter(answer))
    await owner.hold(NODE_ID, asker)
    calling = asyncio.create_task(called(hub, Elsewhere(asker.part.router)))
    command, waiter = await owner.held.next()
    waiter.set_result(answer(command))
    other, audited = await calling

    assert own.error is not None
    assert other.error is not None
    assert own.error["code"] == Failure.RESULT_INVALID.value.code
    assert without_own(other.error) == without_own(own.error)
    assert other.result is None
    assert audited == audited_of_own
    assert [line.get("code") for line in audited][-1] == Failure.RESULT_INVALID.value.code
    parts = [other.text, hub.lines.getvalue(), hub.access_lines.getvalue(), asker.fake.lines.getvalue()]
    for part in (*parts, owner.fake.lines.getvalue(), json.dumps(hub.audited())):
        assert SHOWN not in part
        assert OTHER_NODE_ID not in part
