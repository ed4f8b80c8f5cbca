"""Every document by its examples, in two validators, and what the documents say of each other."""

import json
from hashlib import sha256
from pathlib import Path

import jsonschema
import jsonschema_rs
import pytest
import rfc8785

from schemas.errors import Failure
from schemas.kinds import KindRegistry
from schemas.registry import SCHEME, SchemaRegistry
from schemas.violations import ViolationError
from tests.fakes.documents import EXAMPLES, MANIFEST, SAMPLE, document_file, second_opinion
from tests.fakes.frames import ERROR, message
from tests.fakes.signer import NODE_ID

ROOT = Path(__file__).parents[2] / "schemas"
DOCUMENTS = ROOT / "documents"
FILES = [*DOCUMENTS.iterdir(), *(ROOT / "kinds").glob("system.[em]*/documents/*.json")]
REFS = sorted(path.name.removesuffix(".json") for path in FILES)


# Documents of outside issuers contain members that are ignored here; a call of a kind, those of its verb.
OPEN = {
    "token.agent_external@1.0.0",
    "token.key_external@1.0.0",
    "kind_call.input@1.0.0",
    "kind_call.input@1.1.0",
}


def test_every_file_is_served_by_its_reference_and_nothing_else_is(registry: SchemaRegistry) -> None:
    assert sorted(registry.documents) == REFS


@pytest.mark.holds("ENVELOPE/draft-2020-12")
@pytest.mark.parametrize("ref", REFS)
def test_a_document_compiles_under_both_validators(registry: SchemaRegistry, ref: str) -> None:
    document = registry.document(ref)
    jsonschema.Draft202012Validator.check_schema(document)
    jsonschema_rs.meta.validate(document)
    registry.load(ref)
    second_opinion(registry, ref)


@pytest.mark.parametrize("ref", sorted(EXAMPLES))
def test_both_validators_take_a_good_example_and_refuse_a_stray_member_unless_the_document_is_open(
    registry: SchemaRegistry, ref: str
) -> None:
    good = EXAMPLES[ref]
    registry.load(ref).check(good)
    second_opinion(registry, ref).validate(good)
    stray = {**good, "stray": 1}
    assert registry.load(ref).is_valid(stray) == (ref in OPEN)
    assert second_opinion(registry, ref).is_valid(stray) == (ref in OPEN)


@pytest.mark.parametrize("ref", sorted(EXAMPLES))
def test_both_validators_miss_each_required_member(registry: SchemaRegistry, ref: str) -> None:
    good = EXAMPLES[ref]
    for name in registry.document(ref).get("required", []):
        lacking = {member: value for member, value in good.items() if member != name}
        assert not registry.load(ref).is_valid(lacking), name
        assert not second_opinion(registry, ref).is_valid(lacking), name


@pytest.mark.holds("CALLER-TOOLS/sdk/response-is-a-tool")
def test_every_document_has_an_example_but_the_bundle() -> None:
    assert set(REFS) - set(EXAMPLES) == {"system.metrics@1.0.0"}


@pytest.mark.parametrize("ref", REFS)
def test_every_object_that_a_document_describes_is_closed_or_says_why_not(
    registry: SchemaRegistry, ref: str
) -> None:
    open_objects = []

    def walk(schema: object, path: str) -> None:
        if isinstance(schema, dict):
            if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
                open_objects.append(path)
            for name, inner in schema.items():
                walk(inner, f"{path}/{name}")
        elif isinstance(schema, list):
            for index, inner in enumerate(schema):
                walk(inner, f"{path}/{index}")

    walk(registry.document(ref), ref)
    # Judged by a document of their own: the manifest, a tool's arguments, result and samples. A call's
    # other members are checked by their own users.
    assert set(open_objects) <= OPEN | {
        "envelope@1.0.0/properties/params",
        "envelope@1.0.0/properties/meta",
        "tool_io@1.0.0/properties/input",
        "tool_io@1.0.0/properties/metadata",
        "session.announce@1.0.0/properties/payload",
        "session.cmd@1.0.0/properties/payload/properties/arguments",
        "cluster.cmd@1.0.0/properties/arguments",
        "cluster.ask@1.0.0/properties/body",
        "cluster.reply@1.0.0/oneOf/0/properties/reply",
        "cluster.frame@1.0.0/properties/payload",
        "cluster.session_call@1.0.0/properties/arguments",
        "cluster.session_call@1.1.0/properties/arguments",
        "session.cmd_ack@1.0.0/properties/payload/oneOf/0/properties/result",
        "session.cmd_ack@1.1.0/properties/payload/oneOf/0/properties/result",
        "session.telemetry@1.0.0/properties/payload/properties/sample",
        "kind_call.output@1.0.0/properties/results/items/properties/result",
        "kind_call.output@1.1.0/properties/results/items/properties/result",
        "kind_call.output@1.1.0/properties/results/items/properties/values",
        # Judged by the schema that a caller lends, and by the dialect that it is of.
        "session.caller_tool@1.0.0/properties/payload/properties/arguments",
        "session.session_open@1.0.0/properties/payload/properties/tools/items/properties/inputSchema",
        "session_message.input@1.0.0/properties/context/properties/caller_tools/items/properties/inputSchema",
        "session_message.output@1.0.0/properties/events/items/properties/arguments",
        "session_events.output@1.0.0/properties/events/items/properties/arguments",
        "session_message.output@1.1.0/properties/events/items/properties/arguments",
        "session_events.output@1.1.0/properties/events/items/properties/arguments",
    }


@pytest.mark.holds("RFC-0001/2/documents-verbatim")
@pytest.mark.parametrize(
    ("ref", "digest"),
    [
        ("manifest@1.0.0", "7f321395af5e74b23539122914f53a251b9537de16962d4c65a25e823974f88e"),
        ("error@1.0.0", "c2069789158d5a63b1765657883e4c64449f18c5ca42b9287cdc381f0164a8c5"),
        (
            "system.metrics.snapshot.input@1.0.0",
            "977a3f16e8486b38b1f2146fd5ed39105ecb478a147496069aead80af330f37b",
        ),
        (
            "system.metrics.subscribe.input@1.0.0",
            "3f8e79afcb921a6a8c2e3c1502076bb2ed9ab4200cc1d1d300671e800b3fa86c",
        ),
        ("system.metrics.sample@1.0.0", "f99d71b9966f04c387d01145d59586f093f034264c3593e5b183cb229afd76b6"),
        (
            "system.echo.invoke.input@1.0.0",
            "80cbfcc032ef604bfe0271f72b4b40c56ef123c90a7833480928c5e4f476ca82",
        ),
        (
            "system.echo.invoke.output@1.0.0",
            "e9feb11f1f9fc80762f6d23b06621b46374390422471c9bd2cd265ff2877d401",
        ),
    ],
)
def test_a_document_is_what_the_rfcs_print(registry: SchemaRegistry, ref: str, digest: str) -> None:
    """``digest`` is the SHA-256 of the canonical form of what RFC-0001 or RFC-0005 has as JSON."""
    assert sha256(rfc8785.dumps(registry.document(ref))).hexdigest() == digest


@pytest.mark.holds("RFC-0001/2/schema")
def test_both_manifest_ids_hold_the_same_rules(registry: SchemaRegistry) -> None:
    first, second = registry.document("manifest@1.0.0"), registry.document("manifest@1.1.0")
    assert first.pop("$id") == "mcp://schemas/manifest@1.0.0"
    assert second.pop("$id") == "mcp://schemas/manifest@1.1.0"
    assert first == second
    assert first["properties"]["manifest_version"] == {"type": "string", "const": "1.1.0"}


def test_the_metrics_bundle_holds_the_three_single_documents(registry: SchemaRegistry) -> None:
    assert registry.document("system.metrics@1.0.0")["$defs"] == {
        "snapshot_input": registry.document("system.metrics.snapshot.input@1.0.0"),
        "subscribe_input": registry.document("system.metrics.subscribe.input@1.0.0"),
        "sample": registry.document("system.metrics.sample@1.0.0"),
    }


@pytest.mark.holds("RFC-0001/2/kind-closed")
def test_the_manifest_admits_exactly_the_registered_kinds(
    registry: SchemaRegistry, kinds: KindRegistry
) -> None:
    capability = registry.document("manifest@1.1.0")["$defs"]["Capability"]
    assert capability["properties"]["kind"]["enum"] == [kind.name for kind in kinds]


@pytest.mark.holds("RFC-0001/3.2/row-and-clamp")
def test_every_kind_is_clamped_in_the_manifest(registry: SchemaRegistry, kinds: KindRegistry) -> None:
    clamps = registry.document("manifest@1.1.0")["$defs"]["Capability"]["allOf"]
    assert {clamp["if"]["properties"]["kind"]["const"] for clamp in clamps} == {kind.name for kind in kinds}


@pytest.mark.holds("RFC-0001/3.2/row-and-clamp")
def test_the_short_names_are_those_of_rfc_0001_section_3_2(kinds: KindRegistry) -> None:
    short_names = {kind.name: kind.short for kind in kinds}
    assert short_names["system.metrics"] == "sys"
    assert short_names["system.echo"] == "sysecho"


def test_the_error_document_admits_exactly_the_codes_of_the_table(registry: SchemaRegistry) -> None:
    assert set(registry.document("error@1.0.0")["properties"]["code"]["enum"]) == {
        failure.value.code for failure in Failure
    }


@pytest.mark.parametrize(
    ("ref", "value"),
    [
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "ok\n"}, id="a-line-feed-at-the-end"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "caf\xe9"}, id="a-letter-beyond-ascii"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "\x7f"}, id="delete"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "a" * 1025}, id="1025-characters"),
        pytest.param("system.echo.invoke.input@1.0.0", {}, id="no-message"),
        pytest.param("system.echo.invoke.input@1.0.0", {"message": "a", "b": 1}, id="an-invented-argument"),
        pytest.param(
            "system.metrics.subscribe.input@1.0.0", {"interval_ms": 999}, id="an-interval-under-a-second"
        ),
        pytest.param("system.metrics.subscribe.input@1.0.0", {}, id="no-interval"),
        pytest.param("system.metrics.snapshot.input@1.0.0", {"include": ["cpu", "cpu"]}, id="a-part-twice"),
        pytest.param("system.metrics.snapshot.input@1.0.0", {"include": ["gpu"]}, id="an-unknown-part"),
        pytest.param(
            "system.metrics.sample@1.0.0",
            {**SAMPLE, "load": {"one": float("nan"), "five": 0, "fifteen": 0}},
            id="nan",
        ),
        pytest.param("heartbeat@1.0.0", {**EXAMPLES["heartbeat@1.0.0"], "seq": True}, id="a-boolean-number"),
        pytest.param(
            "heartbeat@1.0.0",
            {**EXAMPLES["heartbeat@1.0.0"], "node_id": NODE_ID + "\n"},
            id="an-id-and-a-line",
        ),
        pytest.param("error@1.0.0", {**ERROR, "code": "E_TIMEOUT"}, id="an-unknown-code"),
        pytest.param("error@1.0.0", {**ERROR, "retry_after_ms": -1}, id="a-negative-delay"),
        pytest.param("token.header@1.0.0", {"alg": "none", "kid": "k"}, id="the-algorithm-none"),
        pytest.param("token.header@1.0.0", {"alg": "EdDSA", "kid": "k", "jku": "u"}, id="a-key-url"),
    ],
)
def test_a_value_that_does_not_fit_is_refused(registry: SchemaRegistry, ref: str, value: object) -> None:
    with pytest.raises(ViolationError):
        registry.load(ref).check(value)
    assert not registry.load(ref).is_valid(value)


def test_a_digit_of_another_script_is_no_digit(registry: SchemaRegistry) -> None:
    # ARABIC-INDIC DIGIT ONE, which the pattern of a schema reference would take if \d meant any digit.
    capability = {**MANIFEST["capabilities"][0], "schema_ref": "mcp://schemas/system.metrics@\u0661.0.0"}
    assert not registry.load("manifest@1.1.0").is_valid({**MANIFEST, "capabilities": [capability]})


def test_the_largest_values_are_allowed(registry: SchemaRegistry) -> None:
    registry.load("system.echo.invoke.input@1.0.0").check({"message": "~" * 1024})
    registry.load("system.metrics.subscribe.input@1.0.0").check({"interval_ms": 60_000})


def test_a_violation_says_where_and_which_rule_but_not_what(registry: SchemaRegistry) -> None:
    frame = message("cmd", tool="SECRET")
    with pytest.raises(ViolationError) as caught:
        registry.load("session.cmd@1.0.0").check(frame)
    assert (caught.value.where, caught.value.rule) == ("/payload/tool", "pattern")
    assert str(caught.value) == "/payload/tool violates pattern"
    assert "SECRET" not in repr(caught.value)


def test_a_violation_of_the_whole_value_is_at_the_root(registry: SchemaRegistry) -> None:
    with pytest.raises(ViolationError) as caught:
        registry.load("system.echo.invoke.input@1.0.0").check([])
    assert (caught.value.where, caught.value.rule) == ("/", "type")


def test_a_member_name_in_a_violation_is_made_printable(tmp_path: Path) -> None:
    ref = "open@1.0.0"
    document_file(tmp_path, f"{ref}.json", {"$id": SCHEME + ref, "additionalProperties": {"type": "integer"}})
    with pytest.raises(ViolationError) as caught:
        SchemaRegistry(tmp_path).load(ref).check({"\x1b[31m\n" + "x" * 500: "y"})
    assert caught.value.where.startswith("/\\x1b[31m\\n")
    assert len(caught.value.where) == 128


def test_a_document_is_served_in_its_canonical_bytes(registry: SchemaRegistry) -> None:
    served = registry.documents["error@1.0.0"]
    assert served.startswith(b'{"$id":"mcp://schemas/error@1.0.0","$schema":')
    assert json.loads(served) == json.loads((DOCUMENTS / "error@1.0.0.json").read_text())
