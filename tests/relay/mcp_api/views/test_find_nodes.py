from pathlib import Path
from typing import Any

import pytest

from relay.fleet.node_record import Where
from relay.fleet.selection import Selection
from relay.limits.rate_limits import Allowance
from relay.mcp_api.views.find_nodes import PAGE_SIZE, Measurements
from schemas.payloads import OpenFinding
from schemas.registry import read_contract
from schemas.times import iso
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NOW_MS
from tests.fakes.view_stage import OTHER_TENANT, ViewStage

SAMPLE: dict[str, Any] = {
    "ts_ms": 1_760_000_000_000,
    "uptime_s": 7,
    "cpu": {"cores": 4, "usage_pct": 12.5, "per_core_pct": [1, 2]},
    "mem": {"total_bytes": 2, "available_bytes": 1},
    "disk": [],
}


async def labels(stage: ViewStage, **arguments: Any) -> list[Any]:
    found = await stage.result("find_nodes", **arguments)
    return [node["label"] for node in found["nodes"]]


async def test_a_node_is_shown_with_what_is_known_of_it(stage: ViewStage) -> None:
    node_id = stage.node("greenhouse pi", "site=north", "gateway", capabilities=[ECHO, METRICS])
    result = await stage.result("find_nodes")
    assert result == {
        "nodes": [
            {
                "node_id": node_id,
                "label": "greenhouse pi",
                "tags": ["gateway", "site=north"],
                "online": True,
                "since_ms": NOW_MS,
                "since": iso(NOW_MS),
                "kinds": ["system.echo", "system.metrics"],
            }
        ],
        "total": 1,
        "page": 1,
        "pages": 1,
    }


HEALTH = read_contract(("linux.health",))


async def test_the_worst_finding_of_each_node_is_shown_and_nodes_are_found_by_it(tmp_path: Path) -> None:
    hub = Hub(tmp_path, HEALTH.registry, kinds=HEALTH.kinds)
    stage = ViewStage(hub)
    kind = HEALTH.kinds.get("linux.health")
    assert kind is not None
    well, hot, worse, mute = (
        stage.node(name, capabilities=[ECHO] if name == "mute" else [kind.capability])
        for name in ("well", "hot", "worse", "mute")
    )
    warm: OpenFinding = {"code": "hot", "severity": "warning", "count": 1, "since_ms": NOW_MS}
    failed: OpenFinding = {"code": "unit_failed", "severity": "error", "count": 2, "since_ms": None}
    for node_id, findings in ((well, []), (hot, [warm]), (worse, [warm, failed]), (mute, [warm])):
        hub.fleet.found(node_id, findings)
    nodes = {node["label"]: node.get("finding") for node in (await stage.result("find_nodes"))["nodes"]}
    assert nodes == {
        "well": None,
        "hot": {"code": "hot", "severity": "warning", "since_ms": NOW_MS, "since": iso(NOW_MS), "open": 1},
        "worse": {"code": "unit_failed", "severity": "error", "since_ms": None, "open": 3},
        "mute": None,  # it announces no such kind
    }
    for finding, found in (("any", ["hot", "worse"]), ("error", ["worse"]), ("hot", ["hot", "worse"])):
        assert await labels(stage, finding=finding) == found
    assert await labels(stage, finding="load_high") == []
    rejected = await stage.error("find_nodes", finding="everything")
    assert rejected["code"] == "E_MANIFEST_INVALID"
    stage.kinds = ("system.*",)
    assert await labels(stage, finding="any") == []
    assert not any("finding" in node for node in (await stage.result("find_nodes"))["nodes"])
    stage.kinds = ()
    hub.fleet.connection_changed(hot, Where.NOWHERE)
    assert await labels(stage, finding="any") == ["worse"]
    hub.close()


async def test_since_is_when_the_connection_changed(stage: ViewStage) -> None:
    node_id = stage.node("barn")
    stage.hub.clock.advance(1000)
    stage.hub.fleet.connection_changed(node_id, Where.HERE)  # a session that is resumed
    (node,) = (await stage.result("find_nodes"))["nodes"]
    assert (node["online"], node["since_ms"]) == (True, NOW_MS)
    stage.hub.fleet.connection_changed(node_id, Where.NOWHERE)
    (node,) = (await stage.result("find_nodes"))["nodes"]
    assert (node["online"], node["since_ms"]) == (False, NOW_MS + 1000)


async def test_a_node_that_only_announced_was_never_seen_to_connect(stage: ViewStage) -> None:
    stage.hub.announce(stage.hub.ca.issue())
    (node,) = (await stage.result("find_nodes"))["nodes"]
    assert (node["label"], node["tags"], node["online"]) == (None, [], False)
    assert "since_ms" not in node


async def test_what_a_node_measured_is_shown_to_a_token_for_it_alone(stage: ViewStage) -> None:
    stage.node("barn", capabilities=[ECHO, METRICS])
    stage.router.answer = lambda command: {"ok": True, "result": {**SAMPLE, "node_id": command.node_id}}
    await stage.result("sys.snapshot", node="barn")
    for kinds, is_shown in (((), True), (("system.echo",), False), (("*", "!system.metrics"), False)):
        stage.kinds = kinds
        (node,) = (await stage.result("find_nodes"))["nodes"]
        assert ("measured" in node) is is_shown


async def test_what_a_node_measured_stays_in_the_tenant_that_it_was_in(stage: ViewStage) -> None:
    node_id = stage.node("barn", capabilities=[ECHO, METRICS])
    stage.router.answer = lambda command: {"ok": True, "result": {**SAMPLE, "node_id": command.node_id}}
    await stage.result("sys.snapshot", node="barn")
    stage.hub.clock.advance(1000)
    leaf = stage.hub.ca.issue(node_id, tenant="globex", now_ms=stage.hub.clock())
    stage.hub.connect(leaf, capabilities=[ECHO, METRICS], issued_at_ms=stage.hub.clock())
    (node,) = (await stage.result("find_nodes", tenant="globex"))["nodes"]
    assert "measured" not in node


async def test_an_idempotency_key_gives_no_answer_beyond_a_narrower_token_or_url(stage: ViewStage) -> None:
    for label in ("barn", "vault"):
        stage.node(label)
    keyed = {"edge-kubelet/idempotency-key": "a-key-of-this-agent"}
    barn = Selection(nodes=("barn",))
    for call in ({"name": "find_nodes"}, {"nodes": "*"}):
        first = await stage.result(meta=keyed, **call)
        assert await stage.result(meta=keyed, **call) == first
        for narrower, selection in ((("barn",), Selection()), ((), barn)):
            stage.nodes = narrower
            refused = await stage.error(meta=keyed, selection=selection, **call)
            assert "The idempotency key was used" in refused["message"]
        stage.nodes = ()


async def test_what_a_node_measured_last_is_shown_beside_it(stage: ViewStage) -> None:
    node_id = stage.node("barn", capabilities=[METRICS])
    stage.router.answer = lambda command: {"ok": True, "result": {**SAMPLE, "node_id": command.node_id}}
    await stage.result("sys.snapshot", node="barn")
    (node,) = (await stage.result("find_nodes"))["nodes"]
    assert node["node_id"] == node_id
    assert node["measured"] == {
        "ts_ms": SAMPLE["ts_ms"],
        "ts": "2025-10-09T08:53:20.000Z",
        "uptime_s": 7,
        "cpu": {"usage_pct": 12.5},
        "mem": {"total_bytes": 2, "available_bytes": 1},
    }


async def test_nodes_are_found_by_words_kind_tags_and_connection(stage: ViewStage) -> None:
    stage.node("greenhouse pi", "site=north", capabilities=[METRICS])
    stage.node("greenhouse cellar", "site=south", "gateway")
    barn = stage.node("barn", "site=north", "gateway")
    stage.node("far greenhouse", tenant=OTHER_TENANT)
    stage.hub.fleet.connection_changed(barn, Where.NOWHERE)
    assert await labels(stage) == ["barn", "greenhouse cellar", "greenhouse pi"]
    assert await labels(stage, query="GREENHOUSE") == ["greenhouse cellar", "greenhouse pi"]
    assert await labels(stage, query="pi house") == ["greenhouse pi"]
    assert await labels(stage, query="north") == ["barn", "greenhouse pi"]
    assert await labels(stage, query=barn[:22].upper()) == ["barn"]
    assert await labels(stage, kind="system.metrics") == ["greenhouse pi"]
    assert await labels(stage, kind="sys") == ["greenhouse pi"]
    either = ["site=north", "site=south"]
    assert await labels(stage, tags=either) == ["barn", "greenhouse cellar", "greenhouse pi"]
    assert await labels(stage, tags=["site=nowhere"]) == []
    assert await labels(stage, tags=["site=north", "gateway"]) == ["barn"]
    assert await labels(stage, online=True) == ["greenhouse cellar", "greenhouse pi"]
    assert await labels(stage, online=False, query="greenhouse") == []


async def test_a_kind_that_there_is_not_is_an_error_that_names_those_that_there_are(stage: ViewStage) -> None:
    error = await stage.error("find_nodes", kind="system.camera")
    assert error == {
        "code": "E_MANIFEST_INVALID",
        "message": "kind: there is no such kind.",
        "suggested_fix": "Send one of: system.echo, system.metrics.",
    }


@pytest.mark.parametrize(
    "arguments", [{"page": 0}, {"tags": []}, {"tags": ["Site"]}, {"query": "x" * 129}, {"surplus": 1}]
)
async def test_arguments_that_do_not_fit_are_refused(stage: ViewStage, arguments: dict[str, Any]) -> None:
    assert (await stage.error("find_nodes", **arguments))["code"] == "E_MANIFEST_INVALID"


async def test_a_whole_number_with_a_fraction_of_zero_is_a_page(stage: ViewStage) -> None:
    # JSON Schema takes it for an integer; Python does not.
    assert await stage.result("find_nodes", page=1.0) == await stage.result("find_nodes", page=1)


async def test_pages_have_every_node_once(stage: ViewStage) -> None:
    names = {stage.node(f"node {number:03}") for number in range(PAGE_SIZE + 2)}
    first, second, beyond = [await stage.result("find_nodes", page=page) for page in (1, 2, 3)]
    assert [len(page["nodes"]) for page in (first, second, beyond)] == [PAGE_SIZE, 2, 0]
    assert {node["node_id"] for page in (first, second) for node in page["nodes"]} == names
    assert {(page["total"], page["pages"]) for page in (first, second, beyond)} == {(PAGE_SIZE + 2, 2)}


async def test_the_url_narrows_what_is_found(stage: ViewStage) -> None:
    stage.node("barn", "gateway", capabilities=[METRICS])
    stage.node("yard", "gateway")
    stage.node("attic")
    assert await labels(stage, selection=Selection(tags=("gateway",))) == ["barn", "yard"]
    assert await labels(stage, selection=Selection(kinds=frozenset({"sys"}))) == ["barn"]
    assert await labels(stage, selection=Selection(nodes=("attic",)), query="barn") == []
    error = await stage.error("find_nodes", selection=Selection(kinds=frozenset({"sys"})), kind="system.echo")
    assert error["suggested_fix"] == "Send one of: system.metrics."
    error = await stage.error("find_nodes", selection=Selection(nodes=("atic",)))
    assert "close: attic" in error["suggested_fix"]


async def test_only_a_caller_that_may_read_finds_nodes(stage: ViewStage) -> None:
    error = await stage.error("find_nodes", scopes=("sessions:message",))
    assert error["code"] == "E_SAFETY_DENIED"


async def test_a_retired_node_is_not_found(stage: ViewStage) -> None:
    node_id = stage.node("barn")
    stage.hub.fleet.retire(frozenset({node_id}), ())
    assert await labels(stage) == []


SEARCHES = pytest.mark.parametrize(
    ("name", "arguments"), [("find_nodes", {}), ("sysecho.invoke", {"nodes": ["*"]})]
)


@SEARCHES
async def test_an_agent_of_one_call_at_a_time_can_search(
    hub: Hub, name: str, arguments: dict[str, Any]
) -> None:
    stage = ViewStage(hub, per_agent=Allowance(100, 100, 1))
    stage.node("barn")
    assert len((await stage.result(name, **arguments))["nodes" if name == "find_nodes" else "results"]) == 1


@SEARCHES
async def test_what_goes_through_the_fleet_is_charged_by_its_size(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str, arguments: dict[str, Any]
) -> None:
    stage = ViewStage(hub, per_agent=Allowance(0.001, 3, 64))
    monkeypatch.setattr("relay.mcp_api.views.find_nodes.NODES_LIKE_A_CALL", 1)
    monkeypatch.setattr("relay.mcp_api.views.node_choice.NODES_LIKE_A_CALL", 1)
    for label in ("barn", "yard", "gate"):
        stage.node(label)
    error = await stage.error(name, **arguments)
    assert error["code"] == "E_RATE_LIMITED"
    assert error["retry_after_ms"] > 0
    assert stage.router.commands == []


async def test_a_label_beyond_ascii_is_found_and_shown_in_its_letters(stage: ViewStage) -> None:
    stage.node("Gewächshaus")
    assert await labels(stage, query="gewachs") == ["Gewächshaus"]


BRIEF: dict[str, Any] = {"ts_ms": 1, "uptime_s": 2, "node_id": "n"}


def tenant_of(_node_id: str) -> str:
    return "acme"


def test_the_newest_measurement_is_kept_briefly() -> None:
    measurements = Measurements(tenant_of)
    cpu = {"cores": 4, "usage_pct": 1.0, "per_core_pct": [1.0] * 4096}
    measurements.keep("a", {**BRIEF, "cpu": cpu, "disk": [{"mount": "/"}] * 64})
    assert measurements.last("a") == {"ts_ms": 1, "uptime_s": 2, "cpu": {"usage_pct": 1.0}}
    measurements.keep("a", {**BRIEF, "ts_ms": 3, "load": {"one": 0.5, "five": 1, "fifteen": 1}})
    assert measurements.last("a") == {"ts_ms": 3, "uptime_s": 2, "load": {"one": 0.5}}
    assert measurements.last("b") is None


def test_a_sample_of_other_parts_displaces_nothing() -> None:
    measurements = Measurements(tenant_of)
    measurements.keep("a", {**BRIEF, "load": {"one": 0.5}})
    measurements.keep("a", {**BRIEF, "ts_ms": 9, "disk": []})
    assert measurements.last("a") == {"ts_ms": 1, "uptime_s": 2, "load": {"one": 0.5}}


def test_of_too_many_nodes_those_measured_last_are_kept() -> None:
    measurements = Measurements(tenant_of, max_nodes=2)
    for node_id in ("a", "b", "a", "c"):
        measurements.keep(node_id, {**BRIEF, "load": {"one": 0.5}})
    assert [measurements.last(node_id) is not None for node_id in ("a", "b", "c")] == [True, False, True]
