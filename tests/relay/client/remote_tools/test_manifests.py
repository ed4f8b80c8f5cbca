"""What is used of a tool that its node has signed, and which tools are refused because it has not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relay.client.remote_tools.contracts import DEFAULT_DEADLINE_S
from relay.remote_tools import ClientEnvironment, Permissions, Reason, Risk, RiskSource, ToolUnauthorized
from schemas.kind_packages import read_shipped
from schemas.kinds import RFC_0001, shipped_names
from tests.fakes.clock import FakeClock
from tests.fakes.guarded import ECHO_OF_ANY, EVERYTHING, echoed, over_http, relay_with, view_with
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    METRICS,
    NOW_MS,
    OTHER_NODE_ID,
    TTL_MS,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

pytestmark = pytest.mark.integration

READ = Permissions(allow=("*",), scopes=frozenset({"tools:call:read_only"}))
PING = {"message": "ping"}


@pytest.fixture
def ca() -> SimulatedCa:
    return SimulatedCa()


@pytest.fixture
def node(ca: SimulatedCa) -> SimulatedNode:
    return ca.issue()


@pytest.fixture
def options(ca: SimulatedCa, tmp_path: Path) -> dict[str, Any]:
    root = tmp_path / "root.pem"
    root.write_text(ca.root_pem)
    clock = FakeClock(NOW_MS)
    return {"verify_manifests": root, "environment": ClientEnvironment(now_ms=clock), "permissions": READ}


def echo_of(node: SimulatedNode) -> str:
    return f"sysecho.{node.node_id}.echo.invoke"


def signs(fake: FakeMcpServer, node: SimulatedNode, **members: Any) -> None:
    """Let ``fake`` show a manifest of ``node`` that has ``members``."""
    fake.resources[f"node://{node.node_id}/manifest"] = node.manifest(**members).decode()


async def reason_of(fake: FakeMcpServer, name: str, options: dict[str, Any]) -> str:
    async with over_http(fake, **options) as client:
        error = await client.fails(ToolUnauthorized, name, PING)
    assert error.reason is Reason.MANIFEST
    assert fake.calls == []
    return str(error)


@pytest.mark.holds("SPEC-0004/3.1/risk")
async def test_risk_and_repetition_are_those_that_the_node_signed(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    async with over_http(relay_with(node), **options) as client:
        contracts = {contract.name: contract for contract in await client.tools.list_tools()}
        contract = contracts[echo_of(node)]
        assert (contract.risk, contract.risk_source) == (Risk.READ, RiskSource.MANIFEST)
        assert (contract.idempotent, contract.version) == (True, "1.0.0")
        # What it signed of time is its handler's: an answer over a slow link takes longer.
        assert contract.deadline_s == DEFAULT_DEADLINE_S
        assert contract.required_scopes == {"tools:call:read_only"}
        assert (await client.tools.execute(echo_of(node), PING)).structured == echoed(node.node_id)


@pytest.mark.holds("SPEC-0004/3.1/risk")
async def test_a_manifest_may_contain_each_kind_that_ships(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    rows = (read_shipped(name).kind for name in shipped_names() if name not in RFC_0001)
    capabilities = [
        {
            "cap_id": row.short,
            "kind": row.name,
            "schema_ref": row.schema_ref,
            "verbs": sorted(row.verbs),
            "safety_class": row.safety_class,
            "constraints": ECHO["constraints"],
        }
        for row in rows
    ]
    relay = relay_with(node)
    signs(relay, node, capabilities=[ECHO, *capabilities])
    async with over_http(relay, **options) as client:
        assert (await client.tools.execute(echo_of(node), PING)).structured == echoed(node.node_id)


def of_another(fake: FakeMcpServer, node: SimulatedNode, other: SimulatedNode) -> None:
    """Let ``fake`` show manifest and identity of ``other`` as those of ``node``."""
    fake.resources[f"node://{node.node_id}/manifest"] = other.manifest().decode()
    fake.resources[f"node://{node.node_id}/identity"] = other.leaf_pem


CHANGES: dict[str, Callable[[FakeMcpServer, SimulatedNode], object]] = {
    "unsigned": lambda fake, node: signs(fake, node, signer=key_named("another")),
    "of another root": lambda fake, node: of_another(fake, node, SimulatedCa("another").issue()),
    "of another node": lambda fake, node: of_another(fake, node, SimulatedCa().issue(OTHER_NODE_ID)),
    "expired": lambda fake, node: signs(fake, node, issued_at_ms=NOW_MS - DAY_MS, expires_at_ms=NOW_MS - 1),
    "withheld": lambda fake, _: fake.resources.clear(),
    "garbage": lambda fake, node: fake.resources.update(
        {
            f"node://{node.node_id}/manifest": "{",
            f"node://{node.node_id}/identity": f"{node.leaf_pem}-----BEGIN",
        }
    ),
    "without the capability": lambda fake, node: signs(
        fake, node, capabilities=[{**ECHO, "cap_id": "other"}]
    ),
    "class of another kind": lambda fake, node: signs(
        fake, node, capabilities=[{**ECHO, "safety_class": "reversible"}]
    ),
    "other schema": lambda fake, _: [tool.update(inputSchema={"type": "object"}) for tool in fake.tools],
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
async def test_a_tool_that_nothing_signed_supports_is_refused_and_not_shown_to_a_model(
    node: SimulatedNode, options: dict[str, Any], change: Callable[[FakeMcpServer, SimulatedNode], object]
) -> None:
    fake = relay_with(node)
    change(fake, node)
    await reason_of(fake, echo_of(node), options)
    async with over_http(fake, **options) as client:
        assert await client.tools.list_tools() == []


async def test_a_tool_that_is_not_of_a_node_is_refused(options: dict[str, Any]) -> None:
    text = await reason_of(FakeMcpServer(), "echo", {**options, "permissions": EVERYTHING})
    assert "not that of a node's tool" in text


async def test_a_manifest_is_read_once_for_all_tools_of_its_node(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    fake = relay_with(node)
    async with over_http(fake, **options) as client:
        await client.tools.execute(echo_of(node), PING)
        await client.tools.execute(echo_of(node), PING)
    assert fake.read[f"node://{node.node_id}/manifest"] == 1


async def test_an_expired_manifest_is_read_again_before_the_next_call(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    fake = relay_with(node)
    clock = options["environment"].now_ms
    async with over_http(fake, **options) as client:
        await client.tools.execute(echo_of(node), PING)
        clock.advance(TTL_MS)
        with pytest.raises(ToolUnauthorized):
            await client.tools.execute(echo_of(node), PING)
        signs(fake, node, issued_at_ms=clock())
        await client.tools.execute(echo_of(node), PING)
    assert len(fake.calls) == 2


async def test_a_newer_manifest_is_read_for_a_tool_that_the_known_one_does_not_support(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    fake = relay_with(node)
    signs(fake, node, capabilities=[METRICS])
    async with over_http(fake, **options) as client:
        assert [contract.name for contract in await client.tools.list_tools()] == [
            f"sys.{node.node_id}.sysmetrics.snapshot"
        ]
        signs(fake, node, issued_at_ms=NOW_MS + 1)
        await client.tools.execute(echo_of(node), PING)


async def test_an_older_manifest_than_one_that_was_accepted_is_refused(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    fake = relay_with(node)
    clock = options["environment"].now_ms
    signs(fake, node, expires_at_ms=NOW_MS + 1000)
    async with over_http(fake, **options) as client:
        await client.tools.execute(echo_of(node), PING)
        clock.advance(1000)
        signs(fake, node, issued_at_ms=NOW_MS - 1)
        assert await client.tools.list_tools() == []
        with pytest.raises(ToolUnauthorized, match="rollback"):
            await client.tools.execute(echo_of(node), PING)


# --- the kinds view: its tools are of no node, and each call of one is of some -------------------------


def labelled(fake: FakeMcpServer, label: str, node: SimulatedNode) -> FakeMcpServer:
    fake.resources[f"node://{label}/identity"] = node.leaf_pem
    return fake


def answers_of(*nodes: SimulatedNode) -> dict[str, Any]:
    entries = [{"node_id": n.node_id, "label": None, "ok": True, "result": echoed(n.node_id)} for n in nodes]
    return {"results": entries, "asked": len(nodes), "answered": len(nodes), "failed": 0}


async def test_the_kinds_view_is_listed_and_called_by_label_by_id_and_for_all(
    node: SimulatedNode, ca: SimulatedCa, options: dict[str, Any]
) -> None:
    other = ca.issue(OTHER_NODE_ID)
    fake = labelled(view_with(node, other), "the%20barn", node)
    async with over_http(fake, **options) as client:
        contracts = {contract.name: contract for contract in await client.tools.list_tools()}
        assert {name: each.risk for name, each in contracts.items()} == {
            ECHO_OF_ANY: Risk.READ,
            "find_nodes": Risk.READ,
        }
        fake.results[ECHO_OF_ANY] = echoed(node.node_id)
        for reference in ("the barn", node.node_id):
            await client.tools.execute(ECHO_OF_ANY, {**PING, "node": reference})
        fake.results[ECHO_OF_ANY] = answers_of(node, other)
        await client.tools.execute(ECHO_OF_ANY, {**PING, "nodes": "*"})
        await client.tools.execute("find_nodes", {})
    assert len(fake.calls) == 4
    assert fake.read[f"node://{node.node_id}/manifest"] == 1


async def test_a_node_that_a_call_names_and_that_has_signed_nothing_is_not_called(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    other = SimulatedCa("another").issue(OTHER_NODE_ID)
    fake = labelled(view_with(node, other), "barn", other)
    async with over_http(fake, **options) as client:
        for chosen in (
            {"node": OTHER_NODE_ID},
            {"node": "barn"},
            {"nodes": [node.node_id, "barn"]},
            {"node": "x"},
        ):
            error = await client.fails(ToolUnauthorized, ECHO_OF_ANY, {**PING, **chosen})
            assert (error.reason, error.may_have_run) == (Reason.MANIFEST, False)
        assert {record["event"] for record in client.records} == {"refused"}
    assert fake.calls == []


async def test_an_answer_of_a_node_that_has_signed_nothing_is_not_passed_on(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    other = SimulatedCa("another").issue(OTHER_NODE_ID)
    fake = view_with(node, other)
    async with over_http(fake, **options) as client:
        for answer, chosen in (
            (answers_of(node, other), {"nodes": "*"}),
            (echoed(OTHER_NODE_ID), {"node": node.node_id}),
        ):
            fake.results[ECHO_OF_ANY] = answer
            error = await client.fails(ToolUnauthorized, ECHO_OF_ANY, {**PING, **chosen})
            assert (error.reason, error.may_have_run) == (Reason.MANIFEST, True)
        assert client.records[-1]["reason"] == Reason.MANIFEST


async def test_find_nodes_of_a_relay_of_02_is_verified_too(
    node: SimulatedNode, options: dict[str, Any]
) -> None:
    fake = view_with(node, finds_by=("find_nodes.input@1.0.0", "find_nodes.output@1.0.0"))
    async with over_http(fake, **options) as client:
        assert "find_nodes" in [tool.name for tool in await client.tools.list_tools()]


@pytest.mark.parametrize("members", [{}, ["message"], None], ids=["none", "a list", "null"])
async def test_a_tool_of_the_view_with_other_members_than_its_kind_is_refused_by_itself(
    node: SimulatedNode, options: dict[str, Any], members: object
) -> None:
    fake = view_with(node)
    fake.tools[0]["inputSchema"] = {"type": "object", "properties": members}
    async with over_http(fake, **options) as client:
        assert [tool.name for tool in await client.tools.list_tools()] == ["find_nodes"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        pytest.param({"permissions": Permissions()}, "no name of the 2 is in Permissions.allow", id="names"),
        pytest.param({"permissions": Permissions(allow=("*",))}, "requires", id="scopes"),
    ],
)
async def test_an_empty_list_says_why(
    node: SimulatedNode,
    options: dict[str, Any],
    changed: dict[str, Any],
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with over_http(view_with(node), **options | changed) as client:
        assert await client.tools.list_tools() == []
    (line,) = [each.message for each in caplog.records if each.name == "relay.remote_tools.client"]
    assert line.startswith("no tool may be called: ")
    assert why in line
