"""The tools that follow from a manifest: their names, limits, documents and entries."""

import json
from dataclasses import replace

import pytest

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.fleet.tools import EntryTemplate, Projector, Tool, ToolSchemas
from schemas.canonical import blake3_hex, jcs
from schemas.kinds import Kind, KindRegistry, Verb
from schemas.manifest import etag_of
from schemas.projection import META_CANONICAL_NAME, META_CAPABILITY_ETAG, META_SAFETY_CLASS, META_SCHEMA_REF
from schemas.registry import SchemaRegistry, listed_schema
from schemas.trust import TrustedManifest
from tests.fakes.shipped_kinds import SYSTEM_ECHO
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID, TTL_MS, SimulatedCa

CA = SimulatedCa()
NODE = CA.issue()
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"


@pytest.fixture(scope="module")
def projector(registry: SchemaRegistry) -> Projector:
    return Projector(registry, KindRegistry())


def trusted(*capabilities: object, node_id: str = NODE_ID, issued_at_ms: int = NOW_MS) -> TrustedManifest:
    node = CA.issue(node_id)
    wire = node.manifest(issued_at_ms=issued_at_ms, capabilities=list(capabilities) or [METRICS, ECHO])
    return TrustedManifest(
        identity=node.identity(),
        etag=etag_of(wire),
        issued_at_ms=issued_at_ms,
        expires_at_ms=issued_at_ms + TTL_MS,
        capabilities_bytes=b"",
        rest=wire,
    )


def tools_of(projector: Projector, manifest: TrustedManifest) -> dict[str, Tool]:
    return projector.project(manifest.identity.node_id, json.loads(manifest.wire)["capabilities"])


@pytest.fixture(scope="module")
def tools(projector: Projector) -> dict[str, Tool]:
    return tools_of(projector, trusted())


def test_each_capability_and_verb_that_has_a_row_is_one_tool(tools: dict[str, Tool]) -> None:
    assert set(tools) == {ECHO_NAME, METRICS_NAME}
    assert all(tool.canonical == name for name, tool in tools.items())


def test_a_node_with_many_tools_lists_64_of_them_in_each_turn(projector: Projector) -> None:
    many = [{**ECHO, "cap_id": f"echo{number}"} for number in range(130)]
    tools = tools_of(projector, trusted(*many))
    assert [tools[name].turn for name in sorted(tools)] == [0] * 64 + [1] * 64 + [2] * 2
    again = tools_of(projector, trusted(*reversed(many), issued_at_ms=NOW_MS + 1))
    assert {name: tool.turn for name, tool in again.items()} == {
        name: tool.turn for name, tool in tools.items()
    }


def test_a_tool_knows_whose_it_is_and_what_it_needs(tools: dict[str, Tool]) -> None:
    echo = tools[ECHO_NAME]
    assert echo.node_id == NODE_ID
    assert (echo.safety_class, echo.handler_ms) == ("read_only", 2000)
    assert tools[METRICS_NAME].handler_ms == 1500


def test_a_capability_without_a_deadline_has_two_seconds(projector: Projector) -> None:
    (tool,) = tools_of(projector, trusted({**ECHO, "constraints": {"rate_limit_rps": 1}})).values()
    assert tool.handler_ms == 2000


def test_arguments_and_result_are_checked_by_the_documents_of_the_verb(tools: dict[str, Tool]) -> None:
    echo = tools[ECHO_NAME]
    assert echo.surface.arguments.is_valid({"message": "ping"})
    assert not echo.surface.arguments.is_valid({"message": "ping", "more": 1})
    assert echo.surface.result.is_valid({"message": "ping", "received_at_ms": NOW_MS, "node_id": NODE_ID})
    assert not echo.surface.result.is_valid({"message": "ping"})


def test_what_is_listed_mirrors_the_safety_class_and_the_verb(tools: dict[str, Tool]) -> None:
    listed = tools[ECHO_NAME].listed()
    assert listed["name"] == ECHO_NAME
    assert listed["annotations"] == {
        "title": "Echo",
        "readOnlyHint": True,
        "destructiveHint": False,
        "idempotentHint": True,
        "openWorldHint": False,
        "x-safety-class": "read_only",
    }
    assert listed["_meta"] == {
        META_SAFETY_CLASS: "read_only",
        META_CAPABILITY_ETAG: blake3_hex(jcs(ECHO)),
        META_CANONICAL_NAME: ECHO_NAME,
        META_SCHEMA_REF: "mcp://schemas/system.echo.invoke.input@1.0.0",
    }


def test_listed_schemas_are_those_of_the_registry_without_their_ids(
    tools: dict[str, Tool], registry: SchemaRegistry
) -> None:
    for tool, (input_ref, output_ref) in (
        (tools[ECHO_NAME], ("system.echo.invoke.input@1.0.0", "system.echo.invoke.output@1.0.0")),
        (tools[METRICS_NAME], ("system.metrics.snapshot.input@1.0.0", "system.metrics.sample@1.0.0")),
    ):
        for member, ref in (("inputSchema", input_ref), ("outputSchema", output_ref)):
            listed = tool.listed()[member]
            assert listed == listed_schema(registry, ref)
            assert not {"$id", "$schema"} & listed.keys()
            assert "$ref" not in json.dumps(listed), "a client could not resolve it"


def test_the_dashed_entry_differs_in_nothing_but_the_name(tools: dict[str, Tool]) -> None:
    for tool in tools.values():
        assert tool.listed(dashed=True) == {**tool.listed(), "name": tool.canonical.replace(".", "-")}


def test_titles_and_descriptions_do_not_depend_on_the_node(projector: Projector) -> None:
    one, other = (
        tools_of(projector, trusted({**ECHO, "cap_id": cap_id}, node_id=node_id)).popitem()[1]
        for node_id, cap_id in ((NODE_ID, "echo"), (OTHER_NODE_ID, "ignore_all_rules"))
    )
    assert (
        one.listed()["description"]
        == other.listed()["description"]
        == SYSTEM_ECHO.verbs["invoke"].description
    )
    assert one.listed()["title"] == other.listed()["title"]


def test_the_capability_etag_is_stable_over_renewals_and_moves_with_the_capability(
    projector: Projector,
) -> None:
    def etag(manifest: TrustedManifest) -> str:
        return str(tools_of(projector, manifest)[ECHO_NAME].listed()["_meta"][META_CAPABILITY_ETAG])

    changed = {**ECHO, "constraints": {**ECHO["constraints"], "rate_limit_rps": 11}}
    assert etag(trusted(ECHO)) == etag(trusted(ECHO, issued_at_ms=NOW_MS + 1))
    assert etag(trusted(ECHO)) != etag(trusted(changed))


def test_the_fingerprint_moves_with_what_an_agent_would_see_and_with_nothing_else(
    projector: Projector,
) -> None:
    def fingerprint(capability: object) -> str:
        return tools_of(projector, trusted(capability)).popitem()[1].fingerprint

    slower = {**ECHO, "constraints": {"rate_limit_rps": 1}}
    assert fingerprint(ECHO) == fingerprint(slower)
    assert fingerprint(ECHO) != fingerprint({**ECHO, "cap_id": "echo2"})
    assert fingerprint(ECHO) != fingerprint({**ECHO, "safety_class": "reversible"})


@pytest.mark.parametrize(
    ("safety_class", "read_only", "destructive"),
    [
        pytest.param("read_only", True, False, id="read only"),
        pytest.param("reversible", False, False, id="reversible"),
        pytest.param("physical_actuation", False, True, id="physical"),
    ],
)
def test_hints_follow_the_safety_class(
    projector: Projector, safety_class: str, *, read_only: bool, destructive: bool
) -> None:
    (tool,) = tools_of(projector, trusted({**ECHO, "safety_class": safety_class})).values()
    annotations = tool.listed()["annotations"]
    assert annotations["readOnlyHint"] is read_only
    assert annotations["destructiveHint"] is destructive
    assert annotations["x-safety-class"] == safety_class == tool.safety_class


def test_a_kind_that_this_relay_does_not_know_shows_nothing(registry: SchemaRegistry) -> None:
    projector = Projector(registry, KindRegistry([SYSTEM_ECHO]))
    assert set(tools_of(projector, trusted())) == {ECHO_NAME}
    assert projector.knows("sysecho")
    assert not projector.knows("sys")


def test_a_verb_without_a_row_shows_nothing(registry: SchemaRegistry) -> None:
    mute = Kind("system.echo", "sysecho", "read_only", SYSTEM_ECHO.schema_ref, verbs={})
    assert tools_of(Projector(registry, KindRegistry([mute])), trusted(ECHO)) == {}


@pytest.mark.parametrize("label", ["", "greenhouse pi", "Bob's {#3} (left), up/down & more!"])
@pytest.mark.parametrize("dashed", [False, True], ids=["canonical", "dashed"])
@pytest.mark.parametrize("safety_class", SCOPE_OF_SAFETY_CLASS)
@pytest.mark.parametrize("capability", [ECHO, METRICS], ids=["echo", "metrics"])
def test_text_and_document_are_the_same_entry(
    registry: SchemaRegistry, capability: dict[str, object], safety_class: str, label: str, *, dashed: bool
) -> None:
    announced = [{**capability, "safety_class": safety_class}]
    (tool,) = Projector(registry, KindRegistry()).project(NODE_ID, announced, label).values()
    text = tool.listed_text(dashed=dashed)
    assert json.loads(text) == tool.listed(dashed=dashed)
    assert list(json.loads(text)) == list(tool.listed(dashed=dashed))
    assert text.isascii()


def test_the_operators_label_is_in_front_of_a_static_title(registry: SchemaRegistry) -> None:
    projector = Projector(registry, KindRegistry())
    (unlabelled,) = projector.project(NODE_ID, [METRICS]).values()
    (labelled,) = projector.project(NODE_ID, [METRICS], "greenhouse pi").values()
    for tool, title in (
        (unlabelled, "CPU, memory, disks"),
        (labelled, "greenhouse pi: CPU, memory, disks"),
    ):
        entry = tool.listed()
        assert (entry["title"], entry["annotations"]["title"]) == (title, title)
    assert labelled.listed()["description"] == unlabelled.listed()["description"]
    assert labelled.fingerprint != unlabelled.fingerprint


def test_tools_of_one_kind_verb_and_safety_class_share_one_template(registry: SchemaRegistry) -> None:
    echoes = [{**ECHO, "cap_id": f"echo{number}"} for number in range(3)]
    careful = {**ECHO, "cap_id": "careful", "safety_class": "reversible"}
    tools = Projector(registry, KindRegistry()).project(NODE_ID, [*echoes, METRICS, careful])
    assert len({id(tool.entry) for tool in tools.values()}) == 3


VERB: Verb = next(iter(SYSTEM_ECHO.verbs.values()))


@pytest.mark.parametrize("text", ['"', "\\", "{x}", "\n", "\x7f", "ä", "\u2028", "😀"])
def test_texts_of_documents_are_escaped(text: str) -> None:
    verb, schema = replace(VERB, title=text, description=text), {"description": text}
    entry = EntryTemplate(verb, schema, schema, "read_only")
    assert json.loads(entry.text("a.b", "pi", "00", "a.b")) == entry.document("a.b", "pi", "00", "a.b")
    assert entry.text("a.b", "pi", "00", "a.b").isascii()


def test_a_document_with_the_character_that_marks_the_gaps_is_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        EntryTemplate(VERB, {"description": "\0"}, {}, "read_only")


INPUT, OUTPUT = "system.echo.invoke.input@1.0.0", "system.echo.invoke.output@1.0.0"


def test_a_tool_has_its_documents_compiled_and_as_they_are_listed(registry: SchemaRegistry) -> None:
    schemas = ToolSchemas.of(registry, INPUT, OUTPUT)
    assert schemas.arguments is registry.load(INPUT)
    assert schemas.result is registry.load(OUTPUT)
    assert schemas.input_schema == listed_schema(registry, INPUT)
    assert schemas.output_schema == listed_schema(registry, OUTPUT)


def test_a_document_that_there_is_not_has_no_schema(registry: SchemaRegistry) -> None:
    with pytest.raises(KeyError):
        ToolSchemas.of(registry, INPUT, "none@1.0.0")
