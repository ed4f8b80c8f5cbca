import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from relay.fleet.node_record import NodeRecord, Where
from relay.fleet.selection import Selection
from relay.mcp_api.tool_list import ToolList
from relay.mcp_api.views.kind_tools import MAX_NUMBERS, QUERY, kind_schemas, summed_up
from schemas.addresses import View
from schemas.kinds import Verb
from schemas.registry import SchemaRegistry, outlined
from tests.fakes.followed import FOLLOWED, Followed, Reader
from tests.fakes.hub import READ_ONLY
from tests.fakes.shipped_kinds import SYSTEM_ECHO, SYSTEM_METRICS
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS
from tests.fakes.suite_kinds import kinds_with_the_suites, write_documents
from tests.fakes.view_stage import OTHER_TENANT, ViewStage

ACTUATION = "tools:call:physical_actuation"

FIND = "find_nodes finds nodes."

INVALID = "E_MANIFEST_INVALID"


def listed(stage: ViewStage, *scopes: str, **selected: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of the kinds view by their names, in order."""
    rights = stage.hub.authenticator.identify(stage.hub.token(scopes or (READ_ONLY,))).rights
    tools = ToolList(stage.hub.fleet, stage.hub.relay_tools, stage.hub.options)
    found = tools.listed(rights, Selection(View.KINDS, **selected), (-1, ""), 99)
    return {tool.place[1]: tool.listed() for tool in found}


def names(stage: ViewStage, *scopes: str, **selected: Any) -> list[str]:
    return [entry["name"] for entry in listed(stage, *scopes, **selected).values()]


# --- one node -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reference", ["greenhouse pi", "Greenhouse PI", "id", "prefix"])
@pytest.mark.parametrize("name", ["sysecho.invoke", "sysecho-invoke"])
async def test_a_call_with_a_node_is_the_call_of_its_tool(
    stage: ViewStage, reference: str, name: str
) -> None:
    node_id = stage.node("greenhouse pi")
    shown = {"id": node_id, "prefix": node_id[:24]}.get(reference, reference)
    result = await stage.result(name, message="ping", node=shown)
    assert (result["message"], result["node_id"]) == ("ping", node_id)
    (command,) = stage.router.commands
    assert (command.tool, command.arguments) == (f"sysecho.{node_id}.echo.invoke", {"message": "ping"})
    lines = stage.hub.audited()
    assert [line["tool"] for line in lines] == [command.tool] * 2
    assert {line["correlation_id"] for line in lines} == {command.correlation_id}
    assert all("parent" not in line for line in lines)


async def test_a_key_makes_a_call_with_a_node_once(stage: ViewStage) -> None:
    stage.node("greenhouse")
    key = {"edge_kubelet__idempotency_key": "k"}
    assert await stage.result(node="greenhouse", meta=key) == await stage.result(node="greenhouse", meta=key)
    (command,) = stage.router.commands
    # Of the node's own tool the answer would have another form.
    refused = await stage.error(command.tool, message="ping", meta=key)
    assert "The idempotency key was used" in refused["message"]
    assert len(stage.router.commands) == 1


@pytest.mark.parametrize(
    ("arguments", "message", "fix"),
    [
        pytest.param({}, "node: no node is named.", "Send node; find_nodes finds nodes.", id="none"),
        pytest.param(
            {"node": "barn", "nodes": ["barn"]},
            "node and nodes exclude each other.",
            "Send one of the two.",
            id="both",
        ),
    ],
)
async def test_members_that_do_not_go_together_are_named(
    stage: ViewStage, arguments: dict[str, Any], message: str, fix: str
) -> None:
    stage.node("barn")
    assert await stage.error(**arguments) == {"code": INVALID, "message": message, "suggested_fix": fix}
    (line,) = stage.hub.audited()
    assert (line["tool"], line["decision"], line["code"]) == ("sysecho.invoke", "deny", INVALID)
    assert stage.router.commands == []


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"node": ""}, "Argument `node`"),
        ({"node": 7}, "Argument `node`"),
        ({"node": "x" * 65}, "Argument `node`"),
        ({"nodes": []}, "Argument `nodes`"),
        ({"nodes": ["barn"] * 101}, "Argument `nodes`"),
        ({"nodes": ["barn"] * 10_000}, "Argument `nodes`"),
        ({"nodes": [7]}, "Argument `nodes/0`"),
        ({"node": "barn", "capability": "a b"}, "Argument `capability`"),
        ({"node": "barn", "message": 7}, "Argument `message`"),
        ({"node": "barn", "surplus": 7}, "allowed are message"),
        ({"nodes": ["barn"], "message": 7}, "Argument `message`"),
        ({"nodes": ["barn"], "surplus": 7}, "allowed are message"),
    ],
)
async def test_arguments_that_do_not_fit_are_named_and_reach_no_node(
    stage: ViewStage, arguments: dict[str, Any], where: str
) -> None:
    stage.node("barn")
    error = await stage.error(**arguments)
    assert error["code"] == INVALID
    assert where in error["message"]
    assert stage.router.commands == []


async def test_a_label_that_is_misspelt_is_answered_with_close_ones(stage: ViewStage) -> None:
    stage.node("greenhouse pi")
    stage.node("greenhouse cellar", tenant=OTHER_TENANT)
    error = await stage.error(node="greenhose pi")
    assert error == {
        "code": "E_SAFETY_DENIED",
        "message": "No node is called 'greenhose pi'.",
        "suggested_fix": "'greenhose pi' is no node's id, label or prefix of at least 6 characters; "
        f"close: greenhouse pi. {FIND}",
    }
    assert "greenhose" not in stage.hub.access_lines.getvalue()


async def test_a_node_without_the_kind_says_so(stage: ViewStage) -> None:
    stage.node("barn", capabilities=[METRICS])
    assert await stage.error(node="barn") == {
        "code": "E_VERB_UNSUPPORTED",
        "message": "The node has no capability of this kind.",
        "suggested_fix": FIND,
    }


async def test_a_node_without_a_manifest_fails_as_its_tool_would(stage: ViewStage) -> None:
    node_id = stage.node("barn")
    stage.hub.fleet.connection_changed(node_id, Where.NOWHERE)
    stage.hub.fleet.tombstone(node_id)
    assert (await stage.error(node="barn"))["code"] == "E_MANIFEST_NOT_FOUND"


async def test_of_two_capabilities_of_a_kind_one_is_named(stage: ViewStage) -> None:
    two = [{**ECHO, "cap_id": "front"}, {**ECHO, "cap_id": "back"}]
    node_id = stage.node("barn", capabilities=two)
    error = await stage.error(node="barn")
    assert (
        error["message"] == "capability: the node has several capabilities of this kind, and none is named."
    )
    assert error["suggested_fix"] == "Send as capability one of: back, front."
    assert (await stage.error(node="barn", capability="side"))["message"] == (
        "capability: the node has no such capability of this kind."
    )
    await stage.result(node="barn", capability="back")
    assert [command.tool for command in stage.router.commands] == [f"sysecho.{node_id}.back.invoke"]
    several = await stage.result(nodes=["barn"], capability="front")
    assert several["results"][0]["result"]["node_id"] == node_id


async def test_only_a_capability_that_the_caller_may_use_is_chosen(any_class: ViewStage) -> None:
    two = [{**ECHO, "cap_id": "front", "safety_class": "physical_actuation"}, {**ECHO, "cap_id": "back"}]
    node_id = any_class.node("barn", capabilities=two)
    await any_class.result(node="barn")
    assert [command.tool for command in any_class.router.commands] == [f"sysecho.{node_id}.back.invoke"]
    assert (await any_class.error(node="barn", scopes=(READ_ONLY, ACTUATION)))["code"] == INVALID


# --- what is listed -------------------------------------------------------------------------------------


async def test_a_tool_of_each_kind_that_the_caller_reaches_is_listed(any_class: ViewStage) -> None:
    assert names(any_class) == ["find_nodes"]
    any_class.node("barn", capabilities=[METRICS])
    any_class.node("far", tenant=OTHER_TENANT)
    assert names(any_class) == ["find_nodes", "sys.snapshot"]
    any_class.node("yard", "gateway", capabilities=[{**ECHO, "safety_class": "physical_actuation"}])
    assert names(any_class) == ["find_nodes", "sys.snapshot"]
    assert names(any_class, ACTUATION) == ["sysecho.invoke"]
    assert names(any_class, READ_ONLY, ACTUATION) == ["find_nodes", "sys.snapshot", "sysecho.invoke"]
    assert names(any_class, READ_ONLY, ACTUATION, tags=("gateway",)) == ["find_nodes", "sysecho.invoke"]
    assert names(any_class, READ_ONLY, ACTUATION, kinds=frozenset({"sys"})) == ["find_nodes", "sys.snapshot"]
    of_sessions = ["caller_tool_response", "session_events", "session_message"]
    assert names(any_class, "sessions:message") == of_sessions


async def test_an_entry_has_the_severest_class_that_its_tools_have(any_class: ViewStage) -> None:
    any_class.node("barn")
    for safety_class in ("read_only", "physical_actuation"):
        echo = listed(any_class, READ_ONLY, ACTUATION)["sysecho.invoke"]
        assert echo["annotations"]["x-safety-class"] == safety_class
        any_class.node("yard", capabilities=[{**ECHO, "safety_class": "physical_actuation"}])


# --- several nodes --------------------------------------------------------------------------------------


async def test_several_nodes_are_asked_by_calls_of_their_own(stage: ViewStage) -> None:
    north = [stage.node("barn", "site=north"), stage.node("yard", "site=north", "gateway")]
    stage.node("attic", "site=south")
    result = await stage.result(nodes=["site=north", "barn"])
    assert (result["asked"], result["answered"], result["failed"]) == (2, 2, 0)
    assert "truncated" not in result
    assert {entry["node_id"] for entry in result["results"]} == set(north)
    for entry in result["results"]:
        record = stage.hub.fleet.node_of("acme", entry["node_id"])
        assert record is not None
        assert record.manifest is not None
        answer = {
            "message": "ping",
            "received_at_ms": 1_760_000_000_000,
            "received_at": "2025-10-09T08:53:20.000Z",
            "node_id": entry["node_id"],
        }
        assert entry == {
            "node_id": entry["node_id"],
            "label": stage.hub.fleet.names.label_of(entry["node_id"]),
            "manifest_etag": record.manifest.etag,
            "ok": True,
            "result": answer,
        }


async def test_the_audit_has_one_parent_for_all_members(stage: ViewStage) -> None:
    ids = {stage.node("barn"), stage.node("yard")}
    await stage.result(nodes="*")
    lines = stage.hub.audited()
    parent = lines[0]
    assert (parent["tool"], parent["decision"], parent["node_id"]) == ("sysecho.invoke", "allow", None)
    assert (lines[-1]["outcome"], lines[-1]["correlation_id"]) == ("ok", parent["correlation_id"])
    members = lines[1:-1]
    assert len(members) == 4
    assert {line["node_id"] for line in members} == ids
    assert {line["parent"] for line in members} == {parent["correlation_id"]}
    assert len({line["correlation_id"] for line in members}) == 2


@pytest.mark.parametrize("selector", ["site=north", "tag:gateway", "*"])
async def test_a_tag_means_the_nodes_whose_manifests_are_valid_now(stage: ViewStage, selector: str) -> None:
    valid = stage.node("barn", "site=north", "gateway")
    stage.node("yard", "site=north", "gateway", expires_at_ms=NOW_MS + 1000)
    stage.node("attic", "site=north", "gateway", capabilities=[METRICS])
    stage.hub.clock.advance(1000)
    result = await stage.result(nodes=[selector])
    assert [entry["node_id"] for entry in result["results"]] == [valid]


async def test_a_node_that_is_named_fails_alone_when_its_manifest_is_not_valid(stage: ViewStage) -> None:
    stage.node("barn")
    stage.node("yard", expires_at_ms=NOW_MS + 1000)
    stage.hub.clock.advance(1000)
    result = await stage.result(nodes=["barn", "yard"])
    assert (result["asked"], result["answered"], result["failed"]) == (2, 1, 1)
    good, bad = result["results"]
    assert (good["ok"], bad["ok"], bad["manifest_etag"], bad["label"]) == (True, False, None, "yard")
    assert bad["error"]["code"] == "E_MANIFEST_INVALID"
    assert "result" not in bad


@pytest.mark.parametrize(
    ("selectors", "close"),
    [
        (["barn", "bran"], "close: barn"),
        (["site=nort"], "close: site=north"),
        (["tag:gatewy"], "close: tag:gateway"),
        (["nothing like it"], "characters. find_nodes"),
    ],
)
async def test_a_selector_that_means_no_node_is_an_error_with_close_names(
    stage: ViewStage, selectors: list[str], close: str
) -> None:
    stage.node("barn", "site=north", "gateway")
    error = await stage.error(nodes=selectors)
    assert error["code"] == "E_SAFETY_DENIED"
    assert (
        error["message"]
        == f"No node {'has the tag' if '=' in close or ':' in close[6:] else 'is called'} '{selectors[-1]}'."
    )
    assert close in error["suggested_fix"]
    assert stage.router.commands == []


async def test_nodes_that_do_not_offer_the_kind_now_are_none(stage: ViewStage) -> None:
    stage.node("barn", "gateway", capabilities=[METRICS])
    error = await stage.error(nodes=["tag:gateway"])
    assert error["message"] == "nodes: none of the nodes selected offers this now."


async def test_several_nodes_are_only_read_whatever_the_caller_may(any_class: ViewStage) -> None:
    any_class.node("barn", "gateway")
    any_class.node("gate", "gateway", capabilities=[{**ECHO, "safety_class": "physical_actuation"}])
    result = await any_class.result(nodes=["*"], scopes=(READ_ONLY, ACTUATION))
    assert [entry["label"] for entry in result["results"]] == ["barn"]
    named = await any_class.result(nodes=["barn", "gate"], scopes=(READ_ONLY, ACTUATION))
    assert [entry["ok"] for entry in named["results"]] == [True, False]
    assert named["results"][1]["error"]["code"] == "E_SAFETY_DENIED"
    assert all("gate" not in command.tool for command in any_class.router.commands)


async def test_a_selection_narrows_what_can_be_named_and_what_is_meant(stage: ViewStage) -> None:
    inside = stage.node("barn", "gateway")
    outside = stage.node("yard")
    tagged = Selection(View.KINDS, tags=("gateway",))
    assert [e["node_id"] for e in (await stage.result(nodes="*", selection=tagged))["results"]] == [inside]
    absent = outside[:-1] + ("1" if outside[-1] == "0" else "0")
    left_out, unknown = [await stage.error(node=node_id, selection=tagged) for node_id in (outside, absent)]
    assert left_out["suggested_fix"].replace(outside, absent) == unknown["suggested_fix"]
    assert (left_out["code"], left_out["message"].replace(outside, absent)) == (
        unknown["code"],
        unknown["message"],
    )
    of_metrics = Selection(View.KINDS, kinds=frozenset({"sys"}))
    for how in ({"node": "barn"}, {"nodes": ["barn"]}):
        assert (await stage.error(selection=of_metrics, **how))["code"] == "E_VERB_UNSUPPORTED"


async def test_a_verb_that_streams_takes_one_node(stage: ViewStage) -> None:
    stage.node("barn", capabilities=[FOLLOWED])
    entries = listed(stage)
    subscribe = entries["sys.subscribe"]["inputSchema"]["properties"]
    assert {"node", "capability", "interval_ms"} <= subscribe.keys()
    assert "nodes" not in subscribe
    assert "nodes" in entries["sys.snapshot"]["inputSchema"]["properties"]
    error = await stage.error("sys.subscribe", nodes=["barn"], interval_ms=1000)
    assert error["message"] == "nodes: this tool asks one node."


async def test_a_call_with_for_s_is_answered_once_with_statistics(followed: Followed) -> None:
    followed.hub.make_views()
    reader, agent = Reader(), followed.agent()
    how: dict[str, Any] = {"tool": "sys.subscribe", "node": NODE_ID, "for_s": 1}
    call = asyncio.create_task(followed.subscribe(agent, emit=reader.emit, **how))
    await reader.next()
    for usage in (10, 30):
        followed.sample(cpu={"cores": 1, "usage_pct": usage})
        assert (await reader.next())["progressToken"] == "token-1"
    answer = await asyncio.wait_for(call, 30)
    assert answer.result is not None, answer.error
    assert json.loads(answer.text) == answer.result
    assert answer.result["cpu"] == {"cores": 1, "usage_pct": 30}
    summary = answer.result["followed"]
    numbers = {each["name"]: each for each in summary["numbers"]}
    assert numbers["cpu.usage_pct"] == {"name": "cpu.usage_pct", "min": 5, "mean": 15, "max": 30}
    assert numbers.keys() == {
        "uptime_s",
        "cpu.cores",
        "cpu.usage_pct",
        "load.one",
        "load.five",
        "load.fifteen",
    }
    assert len(summary["times"]) == 3
    assert summary["times"][-1] == answer.result["ts"]
    tool = followed.hub.relay_tools.find("sys-subscribe")
    assert tool is not None
    jsonschema.Draft202012Validator(tool.schemas.output_schema).validate(answer.result)
    assert followed.counted("telemetry_subscriptions") == 0
    outcomes = [line["outcome"] for line in followed.hub.audited() if "outcome" in line]
    assert outcomes == ["ok"]


async def test_a_node_is_followed_for_no_time_by_one_sample_and_without_a_token(followed: Followed) -> None:
    followed.hub.make_views()
    how: dict[str, Any] = {"tool": "sys.subscribe", "node": NODE_ID, "for_s": 0}
    answer = await asyncio.wait_for(followed.subscribe(followed.agent(), **how), 30)
    assert answer.result is not None, answer.error
    assert answer.result["followed"]["times"] == [answer.result["ts"]]
    assert followed.counted("telemetry_subscriptions") == 0


async def test_statistics_are_not_the_answer_to_a_repetition_that_asks_for_none(followed: Followed) -> None:
    followed.hub.make_views()
    how: dict[str, Any] = {"tool": "sys.subscribe", "node": NODE_ID, "key": "one-key"}
    agent = followed.agent()
    first = await followed.subscribe(agent, **how)
    assert (await followed.subscribe(agent, **how)).result == first.result
    refused = await followed.subscribe(agent, **how, for_s=0)
    assert refused.error is not None
    assert "The idempotency key was used" in refused.error["message"]


@pytest.mark.parametrize("for_s", [61, -1, 0.5, "10"])
async def test_a_node_is_followed_for_a_minute_at_most(followed: Followed, for_s: object) -> None:
    followed.hub.make_views()
    answer = await followed.subscribe(followed.agent(), tool="sys.subscribe", node=NODE_ID, for_s=for_s)
    assert answer.error is not None
    assert "for_s" in answer.error["message"]
    assert followed.leases() == []


async def test_a_call_that_asks_the_same_by_many_selectors_reads_each_node_once(
    stage: ViewStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = [f"tag{number}" for number in range(16)]
    for number in range(5):
        stage.node(f"node {number}", *tags, capabilities=[METRICS])
    read: list[str] = []
    node_of = stage.hub.fleet.node_of

    def counted(tenant: str, node_id: str) -> NodeRecord | None:
        read.append(node_id)
        return node_of(tenant, node_id)

    monkeypatch.setattr(stage.hub.fleet, "node_of", counted)
    selectors = [f"tag:{tag}" for tag in tags] + ["*"] * 84
    await stage.error(nodes=selectors)
    await stage.call("sys.snapshot", nodes=selectors)
    assert len(read) < 5 * 8


SNAPSHOT, INVOKE = SYSTEM_METRICS.verbs["snapshot"], SYSTEM_ECHO.verbs["invoke"]

SAMPLE = {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1}

ENTRY = {"node_id": NODE_ID, "label": None, "manifest_etag": "ab" * 32}

ERROR = {"code": "E_NODE_OFFLINE", "message": "m", "suggested_fix": "f"}

MANY: Mapping[str, Any] = {
    "results": [{**ENTRY, "ok": True, "result": SAMPLE}, {**ENTRY, "ok": False, "error": ERROR}],
    "asked": 2,
    "answered": 1,
    "failed": 1,
}
# Some models' APIs refuse these at the root of a tool's schema.
REFUSED_AT_ROOT = {"oneOf", "anyOf", "allOf", "not", "enum", "$ref", "if"}


@pytest.fixture(scope="module")
def suites(tmp_path_factory: pytest.TempPathFactory) -> SchemaRegistry:
    directory = Path(tmp_path_factory.mktemp("schemas")) / "documents"
    write_documents(directory)
    return SchemaRegistry(directory)


@pytest.mark.parametrize("verb", [SNAPSHOT, INVOKE], ids=["snapshot", "echo"])
@pytest.mark.parametrize("takes_many", [True, False], ids=["many", "one"])
def test_a_schema_is_one_object_with_plain_members(
    registry: SchemaRegistry,
    verb: Verb,
    takes_many: bool,  # noqa: FBT001 - of the table
) -> None:
    schemas = kind_schemas(registry, verb, takes_many=takes_many)
    for schema in (schemas.input_schema, schemas.output_schema):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["type"] == "object"
        assert not REFUSED_AT_ROOT & schema.keys()
        assert not {"$id", "$schema"} & schema.keys()
    own = registry.document(verb.input_ref)
    chosen = {"node", "nodes", "capability", *QUERY} if takes_many else {"node", "capability"}
    assert schemas.input_schema["properties"].keys() == own["properties"].keys() | chosen
    assert schemas.input_schema["required"] == own["required"]
    listed = schemas.input_schema["properties"]
    # One type each, but for what the server takes in two forms.
    types = {name: listed[name]["type"] for name in chosen}
    assert types.pop("nodes", None) == (["array", "string"] if takes_many else None)
    assert (types.pop("top", None), types.pop("fields", None)) == (
        ("integer", "array") if takes_many else (None, None)
    )
    assert set(types.values()) == {"string"}


@pytest.mark.parametrize("nodes", ["*", ["*"], "site=north", [], "", 7, ["a", 7]], ids=str)
def test_the_server_takes_the_nodes_that_the_list_allows(registry: SchemaRegistry, nodes: object) -> None:
    schemas = kind_schemas(registry, SNAPSHOT, takes_many=True)
    arguments = {"nodes": nodes}
    as_listed = jsonschema.Draft202012Validator(schemas.input_schema).is_valid(arguments)
    assert schemas.arguments.is_valid(arguments) is as_listed


def test_both_forms_of_an_answer_fit_what_is_listed_and_a_wrong_one_does_not(
    registry: SchemaRegistry,
) -> None:
    schema = jsonschema.Draft202012Validator(kind_schemas(registry, SNAPSHOT, takes_many=True).output_schema)
    for answer in (SAMPLE, MANY, {**MANY, "truncated": True}):
        schema.validate(answer)
    wrong = [
        {**SAMPLE, "uptime_s": "long"},
        {**SAMPLE, "surplus": 1},
        {**MANY, "results": [{**ENTRY, "ok": "yes"}]},
        {**MANY, "asked": "1"},
    ]
    assert not any(map(schema.is_valid, wrong))


def test_a_tool_for_one_node_lists_only_its_own_answer(registry: SchemaRegistry) -> None:
    schema = kind_schemas(registry, SNAPSHOT, takes_many=False).output_schema
    own = registry.document(SNAPSHOT.output_ref)
    of_own = {name: outlined(rules) for name, rules in own["properties"].items()}
    assert schema["properties"] == of_own | {"ts": {"type": "string"}}


def test_definitions_of_a_verb_stay_where_its_references_look(suites: SchemaRegistry) -> None:
    kind = kinds_with_the_suites().by_short("testjson")
    assert kind is not None
    schema = kind_schemas(suites, kind.verbs["invoke"], takes_many=True).input_schema
    good = {
        "name": "n",
        "address": {"street": "s"},
        "contactMethod": "phone",
        "phone": "1",
        "nodes": ["barn"],
    }
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(good)
    assert not validator.is_valid({**good, "address": {"street": 7}})


OWN = {"type": ["boolean", "integer"], "minimum": 10**12}  # a moment, if its name is one


def own_verb(tmp_path: Path, side: str, name: str) -> tuple[SchemaRegistry, Verb]:
    """Return a verb of a kind of one's own, whose input or output has a member of that name."""
    directory = tmp_path / "documents"
    write_documents(directory)
    own = {"$id": "mcp://schemas/own@1.0.0", "type": "object", "properties": {name: OWN}}
    (directory / "own@1.0.0.json").write_text(json.dumps(own), "utf-8")
    refs = {"input": SNAPSHOT.input_ref, "output": SNAPSHOT.output_ref, side: "own@1.0.0"}
    verb = Verb("own", refs["input"], refs["output"], "title", "description", idempotent=True)
    return SchemaRegistry(directory), verb


@pytest.mark.parametrize(
    ("side", "name"), [("input", "top"), ("output", "matched"), ("output", "next"), ("output", "next_ms")]
)
def test_a_verb_with_a_member_of_a_newer_name_keeps_it_and_is_not_queried(
    tmp_path: Path, side: str, name: str
) -> None:
    schemas = kind_schemas(*own_verb(tmp_path, side, name), takes_many=True)
    listed = {"input": schemas.input_schema, "output": schemas.output_schema}[side]
    assert listed["properties"][name]["type"] == OWN["type"]
    assert not schemas.input_schema["properties"].keys() & (QUERY - {name})
    assert schemas.arguments.is_valid({"nodes": "*", "top": True})


@pytest.mark.parametrize(("side", "name"), [("input", "node"), ("output", "results")])
def test_a_verb_with_a_member_of_the_same_name_is_refused(tmp_path: Path, side: str, name: str) -> None:
    with pytest.raises(ValueError, match="have a meaning in the kinds view"):
        kind_schemas(*own_verb(tmp_path, side, name), takes_many=True)


def test_the_error_of_a_node_has_the_members_of_every_error(registry: SchemaRegistry) -> None:
    entry = registry.document("kind_call.output@1.1.0")["properties"]["results"]["items"]
    error = registry.document("error@1.0.0")
    listed = entry["properties"]["error"]
    assert listed["properties"].keys() == error["properties"].keys()
    assert listed["required"] == error["required"]


MOMENTS = {"ts_ms": "ts"}


def test_each_number_has_its_minimum_mean_and_maximum() -> None:
    samples = [
        {"ts_ms": 1000 * at, "name": "barn", "on": True, "cpu": {"usage_pct": usage}, "disk": [{"free": at}]}
        for at, usage in ((1, 10), (2, 20.5), (3, 0))
    ]
    assert summed_up(samples, MOMENTS) == {
        "times": [f"1970-01-01T00:00:0{at}.000Z" for at in (1, 2, 3)],
        "numbers": [
            {"name": "cpu.usage_pct", "min": 0, "mean": 10.167, "max": 20.5},
            {"name": "disk.0.free", "min": 1, "mean": 2, "max": 3},
        ],
    }


def test_a_reading_that_is_missed_leaves_the_numbers_of_the_other_sensors_to_them() -> None:
    def sample(**readings: float) -> Mapping[str, Any]:
        iio = [{"device": name, "channel": "temperature", "value": c} for name, c in readings.items()]
        return {"ts_ms": 1, "iio": iio}

    samples = [
        sample(freezer=-18, oven=180, room=21),
        sample(oven=182, room=22),
        sample(freezer=-20, oven=181),
    ]
    assert summed_up(samples, MOMENTS)["numbers"] == [
        {"name": "iio.0.value", "min": -20, "mean": -19, "max": -18},
        {"name": "iio.1.value", "min": 180, "mean": 181, "max": 182},
    ]


@pytest.mark.parametrize(
    ("first", "last", "shown"),
    [
        pytest.param([1, 2], [3], {}, id="plain numbers"),
        pytest.param([{"v": 1}, {"v": 2}], [{"v": 3}], {}, id="objects without a text"),
        pytest.param(
            [{"of": "a", "v": 1}, {"of": "a", "v": 2}, {"of": "b", "v": 3}],
            [{"of": "a", "v": 2}, {"of": "b", "v": 5}],
            {"found.1.v": (3, 5)},
            id="two of the same texts",
        ),
        pytest.param(
            [{"of": "a", "v": 1}, {"of": "a", "v": 2}],
            [{"of": "a", "v": 3}, {"of": "a", "v": 5}],
            {"found.0.v": (1, 3), "found.1.v": (2, 5)},
            id="the same texts at the same places",
        ),
        pytest.param(
            [{"of": "a", "v": [1, 2]}, {"of": "b", "v": [3, 4]}],
            [{"of": "b", "v": [5, 6]}],
            {"found.0.v.0": (3, 5), "found.0.v.1": (4, 6)},
            id="a list in an item",
        ),
        pytest.param(None, [7], {"found.0": (7, 7)}, id="a list that one sample lacks"),
        pytest.param([7], None, {}, id="a list that the last sample lacks"),
    ],
)
def test_a_place_in_a_list_has_statistics_if_it_is_the_same_item_in_every_sample(
    first: object, last: object, shown: Mapping[str, tuple[float, float]]
) -> None:
    numbers = summed_up([{"found": first}, {"found": last}], MOMENTS)["numbers"]
    assert {each["name"]: (each["min"], each["max"]) for each in numbers} == shown


def test_the_mean_of_what_no_machine_has_is_a_number_all_the_same() -> None:
    """The document allows it, and JSON has no infinity."""
    samples = [{"ts_ms": 1, "load": {"one": 1.7e308}}] * 3
    assert summed_up(samples, MOMENTS)["numbers"][0]["mean"] == pytest.approx(1.7e308)


def test_a_sample_of_thousands_of_numbers_has_statistics_of_the_first() -> None:
    numbers = summed_up([{"ts_ms": 1, "per_core": [1] * 4096}], MOMENTS)["numbers"]
    assert [each["name"] for each in numbers] == [f"per_core.{place}" for place in range(MAX_NUMBERS)]


def test_a_time_that_no_calendar_has_is_left_out() -> None:
    assert summed_up([{"ts_ms": 2**53 - 1}, {"ts_ms": 0}], MOMENTS)["times"] == ["1970-01-01T00:00:00.000Z"]
