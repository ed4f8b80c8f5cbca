"""What is read of nodes and tools, in a fleet of 20 nodes and in one of 500: counted, not timed.

Every access to an attribute of a node's record or of a tool counts, also of sorting and searching.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.clock_comparison import FEWEST_AHEAD
from relay.fleet.node_record import NodeRecord, Where
from relay.fleet.tools import Tool
from relay.mcp_api.tool_list import PAGE_SIZE, text_of
from schemas.labels import NodeName
from schemas.manifest import MAX_FUTURE_MS
from schemas.registry import SchemaRegistry
from tests.fakes.callers import call_of, request_of
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import ECHO, METRICS, NOW_MS, TENANT, TTL_MS, SimulatedNode

BOUND_S = 30
SIZES = (20, 500)
# A search halves the list: of 1 000 tools it reads 10, and one more for each end of a page.
SEARCH = 12
IDLE_SECONDS = 100
LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}


@dataclass
class Read:
    """The objects that were read, by identity."""

    nodes: set[int] = field(default_factory=set)
    tools: set[int] = field(default_factory=set)


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Read]:
    """Count what is read."""
    read = Read()

    def counting(found: set[int]) -> Any:
        def get(self: object, name: str) -> Any:
            found.add(id(self))
            return object.__getattribute__(self, name)

        return get

    with monkeypatch.context() as patch:
        patch.setattr(NodeRecord, "__getattribute__", counting(read.nodes))
        patch.setattr(Tool, "__getattribute__", counting(read.tools))
        yield read


@dataclass
class Fleet:
    """A hub with nodes that are connected."""

    hub: Hub
    nodes: list[SimulatedNode]


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory, registry: SchemaRegistry) -> Iterator[list[Fleet]]:
    fleets = [filled(tmp_path_factory.mktemp("relay"), registry, size) for size in SIZES]
    yield fleets
    for fleet in fleets:
        fleet.hub.close()


def filled(directory: Path, registry: SchemaRegistry, size: int) -> Fleet:
    hub = Hub(directory, registry)
    nodes = [hub.ca.issue(f"01hzx9k3m4p7q8r9s0t1v2{number:04}") for number in range(size)]
    for node in nodes:
        hub.connect(node)
    return Fleet(hub, nodes)


async def test_an_idle_second_reads_no_node(fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleets[-1]
    hub = fleet.hub
    notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=0)
    heard = asyncio.Event()

    async def listener() -> None:
        heard.set()

    notifier.listen(call_of(hub.token(), "", {}).caller.principal.rights, listener)
    seconds, all_passed = count(1), asyncio.Event()
    sweep = hub.fleet.sweep

    def counted() -> None:
        sweep()
        if next(seconds) == IDLE_SECONDS:
            all_passed.set()

    with monkeypatch.context() as patch, reads(monkeypatch) as read:
        patch.setattr(hub.fleet, "sweep", counted)
        patch.setattr(hub.fleet.selected, "version", None)  # to call it would end the notifier
        task = asyncio.create_task(notifier.run())
        await asyncio.wait_for(all_passed.wait(), BOUND_S)
    assert (read.nodes, read.tools) == (set(), set())
    assert not heard.is_set()
    fleet.hub.announce(fleet.nodes[0], issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    await asyncio.wait_for(heard.wait(), BOUND_S)
    fleet.hub.announce(fleet.nodes[0], issued_at_ms=NOW_MS + 2)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def test_what_is_missing_and_whose_clocks_are_ahead_is_told_without_reading_a_node(
    tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = filled(tmp_path, registry, 20)
    inventory, ahead_ms = fleet.hub.fleet.inventory, NOW_MS + MAX_FUTURE_MS + 1
    inventory.subscribed()
    for node in fleet.nodes[:FEWEST_AHEAD]:
        fleet.hub.announce(node, issued_at_ms=ahead_ms)
    with reads(monkeypatch) as read:
        fleet.hub.fleet.sweep()
        assert not fleet.hub.fleet.clocks.are_ahead
        assert (inventory.known(), inventory.missing()) == (20, 20)
        assert fleet.hub.counted("inventory_missing") == 20
        assert not read.nodes
        inventory.received(fleet.nodes[0].node_id, b"{}")
        assert (inventory.missing(), len(read.nodes)) == (19, 1)
    fleet.hub.close()


def test_a_heartbeat_reads_one_node(fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    for fleet in fleets:
        with reads(monkeypatch) as read:
            fleet.hub.fleet.inventory.heartbeat(fleet.nodes[-1].node_id, "00" * 32)
        assert (len(read.nodes), len(read.tools)) == (1, 0)


def test_a_renewal_reads_one_node_and_moves_nothing(
    fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fleet in fleets:
        node = fleet.nodes[-1]
        wire = node.manifest(issued_at_ms=NOW_MS + 1, expires_at_ms=NOW_MS + 1 + TTL_MS)
        with reads(monkeypatch) as read:
            fleet.hub.fleet.offer_manifest(node.node_id, wire, "broker")
        assert (len(read.nodes), len(read.tools)) == (1, 0)


@pytest.mark.parametrize("connected", [True, False], ids=["connects again", "is lost"])
def test_a_connection_reads_one_node(
    fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch, *, connected: bool
) -> None:
    for fleet in fleets:
        with reads(monkeypatch) as read:
            fleet.hub.fleet.connection_changed(
                fleet.nodes[-1].node_id, Where.HERE if connected else Where.NOWHERE
            )
        assert (len(read.nodes), len(read.tools)) == (1, 0)
        fleet.hub.fleet.connection_changed(fleet.nodes[-1].node_id, Where.HERE)


def test_a_change_reads_its_nodes_tools_and_where_they_go(
    fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fleet in fleets:
        node = fleet.nodes[7]
        changed = [
            node.manifest(issued_at_ms=NOW_MS + 1, capabilities=[ECHO]),
            node.manifest(issued_at_ms=NOW_MS + 2, capabilities=[METRICS, ECHO]),
        ]
        for wire in changed:
            with reads(monkeypatch) as read:
                fleet.hub.fleet.offer_manifest(node.node_id, wire, "broker")
            assert len(read.nodes) == 1
            assert 1 <= len(read.tools) <= 3 * SEARCH


def test_a_rename_reads_its_nodes_tools_and_where_they_are(
    fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fleet in fleets:
        node = fleet.nodes[7]
        for name in (NodeName(TENANT, "greenhouse pi"), None):
            with reads(monkeypatch) as read:
                fleet.hub.fleet.rename({node.node_id: name})
            assert len(read.nodes) == 1
            assert 2 <= len(read.tools) <= 6 * SEARCH


async def test_a_call_reads_one_node_and_one_tool(
    fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fleet in fleets:
        gateway = fleet.hub.gateway(ScriptedRouter())
        name = f"sysecho.{fleet.nodes[-1].node_id}.echo.invoke"
        for form in (name, name.replace(".", "-")):
            call = call_of(fleet.hub.token(), form, {"message": "ping"})
            with reads(monkeypatch) as read:
                answer = await gateway.call(call)
            assert answer.error is None
            assert (len(read.nodes), len(read.tools)) == (1, 1)


async def test_a_page_reads_as_many_tools_as_it_has(
    fleets: list[Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for fleet in fleets:
        endpoint = fleet.hub.mcp(fleet.hub.gateway(ScriptedRouter()))
        caller, params = request_of(fleet.hub.token(), LIST).caller, dict[str, Any]()
        for _ in range(3):
            with reads(monkeypatch) as read:
                page = await endpoint.methods.table["tools/list"](caller, {**LIST, "params": params}, None)
                text_of(page)
            tools = len(page["tools"].tools)
            assert tools == 2 * len(fleet.nodes) or 100 < tools <= PAGE_SIZE
            assert not read.nodes
            assert tools <= len(read.tools) <= tools + SEARCH
            if "nextCursor" not in page:
                break
            params["cursor"] = page["nextCursor"]
