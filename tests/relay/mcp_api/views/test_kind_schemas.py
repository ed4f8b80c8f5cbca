import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from relay.mcp_api.views.kind_schemas import QUERY, kind_schemas
from schemas.kinds import Verb
from schemas.registry import SchemaRegistry
from tests.fakes.shipped_kinds import SYSTEM_ECHO, SYSTEM_METRICS
from tests.fakes.signer import NODE_ID, NOW_MS
from tests.fakes.suite_kinds import kinds_with_the_suites, write_documents

SNAPSHOT, ECHO = SYSTEM_METRICS.verbs["snapshot"], SYSTEM_ECHO.verbs["invoke"]
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


@pytest.mark.parametrize("verb", [SNAPSHOT, ECHO], ids=["snapshot", "echo"])
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


@pytest.mark.parametrize("answer", [SAMPLE, MANY, {**MANY, "truncated": True}], ids=["one", "many", "cut"])
def test_both_forms_of_an_answer_fit_what_is_listed(
    registry: SchemaRegistry, answer: Mapping[str, Any]
) -> None:
    schema = kind_schemas(registry, SNAPSHOT, takes_many=True).output_schema
    jsonschema.Draft202012Validator(schema).validate(answer)


@pytest.mark.parametrize(
    "answer",
    [
        {**SAMPLE, "uptime_s": "long"},
        {**SAMPLE, "surplus": 1},
        {**MANY, "results": [{**ENTRY, "ok": True, "result": {**SAMPLE, "uptime_s": "long"}}]},
        {**MANY, "results": [{**ENTRY, "ok": True, "surplus": 1}]},
        {**MANY, "asked": 1001},
    ],
)
def test_what_is_listed_still_tells_a_wrong_answer(
    registry: SchemaRegistry, answer: Mapping[str, Any]
) -> None:
    schema = kind_schemas(registry, SNAPSHOT, takes_many=True).output_schema
    assert not jsonschema.Draft202012Validator(schema).is_valid(answer)


def test_a_tool_for_one_node_lists_only_its_own_answer(registry: SchemaRegistry) -> None:
    schema = kind_schemas(registry, SNAPSHOT, takes_many=False).output_schema
    own = registry.document(SNAPSHOT.output_ref)
    assert schema["properties"] == own["properties"] | {"ts": {"type": "string"}}


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


@pytest.mark.parametrize(("side", "name"), [("input", "top"), ("output", "matched"), ("output", "next")])
def test_a_verb_with_a_member_of_a_newer_name_keeps_it_and_is_not_queried(
    tmp_path: Path, side: str, name: str
) -> None:
    directory = tmp_path / "documents"
    write_documents(directory)
    own = {"$id": "mcp://schemas/own@1.0.0", "type": "object", "properties": {name: {"type": "boolean"}}}
    (directory / "own@1.0.0.json").write_text(json.dumps(own), "utf-8")
    refs = {"input": SNAPSHOT.input_ref, "output": SNAPSHOT.output_ref, side: "own@1.0.0"}
    verb = Verb("own", refs["input"], refs["output"], "title", "description", idempotent=True)
    schemas = kind_schemas(SchemaRegistry(directory), verb, takes_many=True)
    listed = {"input": schemas.input_schema, "output": schemas.output_schema}[side]
    assert listed["properties"][name] == {"type": "boolean"}
    assert not schemas.input_schema["properties"].keys() & (QUERY - {name})
    assert schemas.arguments.is_valid({"nodes": "*", "top": True})


@pytest.mark.parametrize(("side", "name"), [("input", "node"), ("output", "results")])
def test_a_verb_with_a_member_of_the_same_name_is_refused(tmp_path: Path, side: str, name: str) -> None:
    directory = tmp_path / "documents"
    write_documents(directory)
    own = {"$id": "mcp://schemas/own@1.0.0", "type": "object", "properties": {name: {}}}
    (directory / "own@1.0.0.json").write_text(json.dumps(own), "utf-8")
    refs = {"input": SNAPSHOT.input_ref, "output": SNAPSHOT.output_ref, side: "own@1.0.0"}
    verb = Verb("clash", refs["input"], refs["output"], "title", "description", idempotent=True)
    with pytest.raises(ValueError, match="have a meaning in the kinds view"):
        kind_schemas(SchemaRegistry(directory), verb, takes_many=True)


def test_the_error_of_a_node_has_the_members_of_every_error(registry: SchemaRegistry) -> None:
    entry = registry.document("kind_call.output@1.1.0")["properties"]["results"]["items"]
    error = registry.document("error@1.0.0")
    listed = entry["properties"]["error"]
    assert listed["properties"].keys() == error["properties"].keys()
    assert listed["required"] == error["required"]
