"""What the registry hands out by reference and by tool, and the validators that registries share."""

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from schemas.kinds import KindRegistry
from schemas.registry import SCHEME, TOOL_PREFIX, DocumentStore, SchemaRegistry, listed_schema, referred
from schemas.violations import ViolationError
from tests.fakes.documents import EXAMPLES, TOOL_ID, document_file
from tests.fakes.shipped_kinds import KINDS, SYSTEM_ECHO
from tests.fakes.signer import NODE_ID

if TYPE_CHECKING:
    from schemas.registry import Validator


REF = "a@1.0.0"


def number(ref: str = REF, **rules: object) -> dict[str, object]:
    return {"$id": SCHEME + ref, "type": "number", **rules}


@pytest.mark.parametrize(
    "ref", ["", "manifest", "manifest@9.9.9", "../documents/manifest@1.1.0", "mcp://schemas/manifest@1.1.0"]
)
def test_an_unknown_reference_is_a_key_error_and_never_a_path(registry: SchemaRegistry, ref: str) -> None:
    with pytest.raises(KeyError):
        registry.load(ref)
    with pytest.raises(KeyError):
        registry.document(ref)


def test_what_is_handed_out_cannot_be_used_to_change_the_registry(registry: SchemaRegistry) -> None:
    taken = registry.document("error@1.0.0")
    taken["properties"].clear()
    assert registry.document("error@1.0.0")["properties"]
    with pytest.raises(TypeError):
        registry.documents["error@1.0.0"] = b"{}"  # type: ignore[index]


@pytest.mark.holds("ENVELOPE/registry-cache")
def test_a_document_is_compiled_once(registry: SchemaRegistry) -> None:
    assert registry.load("error@1.0.0") is registry.load("error@1.0.0")
    assert registry.load("error@1.0.0") is not registry.load("heartbeat@1.0.0")


def test_a_text_that_is_none_fits_nothing_and_is_not_repeated(registry: SchemaRegistry) -> None:
    validator = registry.load("system.echo.invoke.input@1.0.0")
    assert not validator.is_valid({"message": "a secret \ud800"})
    with pytest.raises(ViolationError) as caught:
        validator.check({"message": "a secret \ud800"})
    assert "secret" not in str(caught.value)


@pytest.mark.holds("ENVELOPE/registry-cache")
def test_equal_documents_of_two_registries_share_one_validator_and_a_changed_one_has_its_own(
    tmp_path: Path,
) -> None:
    compiled: dict[str, Validator] = {}
    document_file(tmp_path, "a@1.0.0.json", number("a@1.0.0", maximum=1))
    before = SchemaRegistry(tmp_path, compiled=compiled)
    first = before.load("a@1.0.0")
    # Other spaces and another order: the same document.
    text = json.dumps(dict(reversed(number("a@1.0.0", maximum=1).items())), indent=8)
    document_file(tmp_path, "a@1.0.0.json", text)
    assert SchemaRegistry(tmp_path, compiled=compiled).load("a@1.0.0") is first
    assert len(compiled) == 1
    document_file(tmp_path, "a@1.0.0.json", number("a@1.0.0", maximum=2))
    changed = SchemaRegistry(tmp_path, compiled=compiled).load("a@1.0.0")
    assert (first.is_valid(2), changed.is_valid(2)) == (False, True)
    assert before.load("a@1.0.0") is first


@pytest.mark.holds("ENVELOPE/registry-cache")
def test_the_key_of_a_validator_is_the_sha_256_of_the_canonical_document(tmp_path: Path) -> None:
    compiled: dict[str, Validator] = {}
    document_file(tmp_path, "a@1.0.0.json", number("a@1.0.0"))
    SchemaRegistry(tmp_path, compiled=compiled).load("a@1.0.0")
    assert list(compiled) == [sha256(b'{"$id":"mcp://schemas/a@1.0.0","type":"number"}').hexdigest()]


def test_registries_share_nothing_unless_they_are_told_to(registry: SchemaRegistry) -> None:
    assert SchemaRegistry().load("error@1.0.0") is not registry.load("error@1.0.0")


@pytest.mark.holds("ENVELOPE/registry-cache")
@pytest.mark.parametrize(
    "middle",
    [
        pytest.param({"$ref": "mcp://schemas/c@1.0.0"}, id="directly"),
        pytest.param({"$ref": "mcp://schemas/c@1.0.0#"}, id="with-a-fragment"),
        pytest.param({"allOf": [{"not": {"not": {"$ref": "mcp://schemas/c@1.0.0"}}}]}, id="deep-inside"),
        pytest.param({"$dynamicRef": "mcp://schemas/c@1.0.0"}, id="dynamically"),
    ],
)
def test_a_document_whose_referenced_document_differs_shares_no_validator(
    tmp_path: Path, middle: dict[str, Any]
) -> None:
    compiled: dict[str, Validator] = {}
    validators = []
    for limit in (1, 2):
        # Two steps away, and in a circle.
        document_file(tmp_path, "a@1.0.0.json", {"$id": SCHEME + "a@1.0.0", "$ref": SCHEME + "b@1.0.0"})
        document_file(tmp_path, "b@1.0.0.json", {"$id": SCHEME + "b@1.0.0", **middle})
        properties = {"next": {"$ref": SCHEME + "a@1.0.0"}, "self": {"$ref": "#"}}
        document_file(tmp_path, "c@1.0.0.json", number("c@1.0.0", maximum=limit, properties=properties))
        document_file(tmp_path, "d@1.0.0.json", number("d@1.0.0"))
        documents = SchemaRegistry(tmp_path, compiled=compiled)
        validators.append(documents.load("a@1.0.0"))
        documents.load("d@1.0.0")
    assert [validator.is_valid(2) for validator in validators] == [False, True]
    # `a` twice; `d`, which refers to nothing, once.
    assert len(compiled) == 3


def test_a_property_that_is_called_like_a_reference_is_none(tmp_path: Path) -> None:
    properties = {"$ref": {"type": "string"}}
    document_file(tmp_path, "a@1.0.0.json", {"$id": SCHEME + "a@1.0.0", "properties": properties})
    assert not SchemaRegistry(tmp_path).load("a@1.0.0").is_valid({"$ref": 1})


def test_a_validator_cannot_be_changed_by_who_holds_it(registry: SchemaRegistry) -> None:
    shared = registry.load_envelope()
    for name in ("is_valid", "check", "_compiled", "more"):
        with pytest.raises((AttributeError, TypeError)):
            setattr(shared, name, lambda _: True)
    assert not registry.load_envelope().is_valid({})


@pytest.mark.holds("ENVELOPE/registry")
def test_the_envelope_is_the_document_of_that_name(registry: SchemaRegistry) -> None:
    assert registry.load_envelope() is registry.load("envelope@1.0.0")


@pytest.mark.holds("ENVELOPE/registry")
def test_the_documents_of_a_tool_are_those_of_its_kind_and_verb(
    registry: SchemaRegistry, kinds: KindRegistry
) -> None:
    for kind in kinds:
        for verb in kind.verbs.values():
            tool = registry.load_tool_io(f"mcp.tool:{kind.short}.{NODE_ID}.any_cap.{verb.name}")
            assert tool.input is registry.load(verb.input_ref)
            assert tool.output is registry.load(verb.output_ref)


def test_the_validators_of_a_tool_judge_what_that_tool_takes_and_gives(registry: SchemaRegistry) -> None:
    echo = registry.load_tool_io(TOOL_ID)
    echo.input.check(EXAMPLES["system.echo.invoke.input@1.0.0"])
    echo.output.check(EXAMPLES["system.echo.invoke.output@1.0.0"])
    assert not echo.input.is_valid(EXAMPLES["system.echo.invoke.output@1.0.0"])
    assert not echo.output.is_valid(EXAMPLES["system.echo.invoke.input@1.0.0"])


def test_the_pair_of_validators_cannot_be_changed_by_who_holds_it(registry: SchemaRegistry) -> None:
    tool = registry.load_tool_io(TOOL_ID)
    with pytest.raises(AttributeError):
        tool.input = registry.load_envelope()  # type: ignore[misc]


@pytest.mark.holds("ENVELOPE/registry")
@pytest.mark.parametrize(
    "tool_id",
    [
        pytest.param("", id="nothing"),
        pytest.param("mcp.tool:", id="no-name"),
        pytest.param(TOOL_ID.removeprefix(TOOL_PREFIX), id="no-prefix"),
        pytest.param(TOOL_PREFIX + TOOL_ID, id="the-prefix-twice"),
        pytest.param(TOOL_ID.upper(), id="upper-case"),
        pytest.param(TOOL_PREFIX + TOOL_ID.removeprefix(TOOL_PREFIX).replace(".", "-"), id="the-dashed-name"),
        pytest.param(TOOL_ID + "\n", id="a-line-feed-at-the-end"),
        pytest.param(f" {TOOL_ID}", id="a-space-before"),
        pytest.param(f"mcp.tool:nokind.{NODE_ID}.echo.invoke", id="an-unknown-kind"),
        pytest.param(f"mcp.tool:system.echo.{NODE_ID}.echo.invoke", id="the-long-name-of-a-kind"),
        pytest.param(f"mcp.tool:sysecho.{NODE_ID}.echo.snapshot", id="the-verb-of-another-kind"),
        pytest.param(f"mcp.tool:sys.{NODE_ID}.sysmetrics.stream", id="a-verb-without-a-row"),
        pytest.param(f"mcp.tool:sysecho.{NODE_ID}.echo.__class__", id="a-name-of-the-machinery"),
        pytest.param("mcp.tool:system.echo.invoke.input@1.0.0", id="a-document"),
        pytest.param("mcp.tool:../documents/error@1.0.0", id="a-path"),
        pytest.param("mcp.tool:" + "a" * 100_000, id="very-long"),
    ],
)
def test_what_is_no_tool_has_no_documents(registry: SchemaRegistry, tool_id: str) -> None:
    with pytest.raises(KeyError) as caught:
        registry.load_tool_io(tool_id)
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


def test_a_tool_of_a_kind_that_only_this_process_knows_has_its_documents(tmp_path: Path) -> None:
    verb = replace(SYSTEM_ECHO.verbs["invoke"], name="ring", input_ref="in@1.0.0", output_ref="out@1.0.0")
    own = KindRegistry([replace(SYSTEM_ECHO, name="own.bell", short="bell", verbs={"ring": verb})])
    for ref, kind in (("in@1.0.0", "integer"), ("out@1.0.0", "string")):
        document_file(tmp_path, f"{ref}.json", {"$id": SCHEME + ref, "type": kind})
    documents = SchemaRegistry(tmp_path, own)
    bell = documents.load_tool_io(f"mcp.tool:bell.{NODE_ID}.door.ring")
    assert (bell.input.is_valid(1), bell.output.is_valid("ding")) == (True, True)
    with pytest.raises(KeyError):
        documents.load_tool_io(TOOL_ID)


def test_a_tool_whose_documents_are_not_here_has_none(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        SchemaRegistry(tmp_path).load_tool_io(TOOL_ID)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param({}, id="no-id"),
        pytest.param({"$id": REF}, id="an-id-without-our-scheme"),
        pytest.param({"$id": f"https://a.example/{REF}"}, id="an-id-of-another-scheme"),
        pytest.param({"$id": SCHEME + "b@1.0.0"}, id="the-id-of-another-document"),
        pytest.param({"$id": 1}, id="an-id-that-is-no-text"),
        pytest.param([], id="not-an-object"),
        pytest.param("{", id="not-json"),
    ],
)
def test_a_bad_document_is_refused_and_the_others_are_not(tmp_path: Path, document: object) -> None:
    document_file(tmp_path, f"{REF}.json", document)
    document_file(tmp_path, "good@1.0.0.json", number("good@1.0.0"))
    documents = DocumentStore([tmp_path], {})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"\$id must be mcp://schemas/a@1\.0\.0|Expecting"):
            documents[REF]
    assert json.loads(documents["good@1.0.0"]) == number("good@1.0.0")


@pytest.mark.parametrize(
    "target",
    [SCHEME + "b@1.0.0", SCHEME + "b@1.0.0#/$defs/x", "b@1.0.0", REF, "https://a.example/b"],
)
def test_a_reference_to_what_is_no_document_here_is_refused(tmp_path: Path, target: str) -> None:
    document_file(tmp_path, f"{REF}.json", number(items={"$ref": target}))
    with pytest.raises(ValueError, match=r"a@1\.0\.0\.json: refers to .*, which is no document here"):
        DocumentStore([tmp_path], {})[REF]


def test_other_files_in_the_directory_are_no_documents(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", number())
    document_file(tmp_path, "README.md", "not a document")
    documents = DocumentStore([tmp_path], {})
    assert (list(documents), len(documents)) == ([REF], 1)
    with pytest.raises(KeyError):
        documents["README.md"]


def test_a_document_is_given_in_its_canonical_bytes_each_time(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", json.dumps(dict(reversed(number().items())), indent=8))
    documents = DocumentStore([tmp_path], {})
    canonical = b'{"$id":"mcp://schemas/a@1.0.0","type":"number"}'
    assert [documents[REF], documents[REF]] == [canonical, canonical]


def test_what_changes_below_a_running_process_is_not_seen(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", number(maximum=1))
    documents = DocumentStore([tmp_path], {})
    document_file(tmp_path, f"{REF}.json", number(maximum=2))
    assert json.loads(documents[REF])["maximum"] == 1


def test_what_is_brought_is_a_document_like_those_of_the_directory(tmp_path: Path) -> None:
    document_file(tmp_path, f"{REF}.json", number())
    brought = number("b@1.0.0", items={"$ref": SCHEME + REF})
    others = {"b@1.0.0": brought, "bad@1.0.0": number("b@1.0.0")}
    documents = DocumentStore([tmp_path], {ref: json.dumps(each).encode() for ref, each in others.items()})
    assert json.loads(documents["b@1.0.0"]) == brought
    with pytest.raises(ValueError, match=r"its \$id must be"):
        documents["bad@1.0.0"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param({}, set(), id="nothing"),
        pytest.param({"items": {"$ref": "#/$defs/x"}}, {REF}, id="itself"),
        pytest.param(
            {"allOf": [{"$ref": SCHEME + "b@1.0.0#/x"}, {"not": {"$dynamicRef": SCHEME + "c@1.0.0"}}]},
            {"b@1.0.0", "c@1.0.0"},
            id="others",
        ),
        pytest.param({"properties": {"$ref": {"type": "string"}}}, set(), id="a-property-of-that-name"),
    ],
)
def test_what_a_document_refers_to(rules: dict[str, Any], expected: set[str]) -> None:
    assert referred(REF, number(**rules)) == expected


VERBS = [verb for kind in KINDS for verb in kind.verbs.values()]
REFS = sorted({ref for verb in VERBS for ref in (verb.input_ref, verb.output_ref)})


def rules(schema: Any) -> Any:
    """Return ``schema`` without what does not validate."""
    if isinstance(schema, dict):
        named = {"properties", "$defs"}
        return {
            key: {name: rules(each) for name, each in value.items()} if key in named else rules(value)
            for key, value in schema.items()
            if key not in {"description", "title", "$comment", "$id", "$schema"}
        }
    return [rules(each) for each in schema] if isinstance(schema, list) else schema


def descriptions(schema: Any) -> list[str]:
    if isinstance(schema, list):
        return [text for each in schema for text in descriptions(each)]
    if not isinstance(schema, dict):
        return []
    own = schema.get("description")
    inner = [text for each in schema.values() for text in descriptions(each)]
    return [own, *inner] if isinstance(own, str) else inner


@pytest.mark.parametrize("ref", REFS)
def test_the_rules_are_those_of_the_contract(registry: SchemaRegistry, ref: str) -> None:
    assert rules(listed_schema(registry, ref)) == rules(registry.document(ref))


@pytest.mark.parametrize("ref", REFS)
def test_every_description_is_one_that_was_written_for_models(registry: SchemaRegistry, ref: str) -> None:
    shown = descriptions(listed_schema(registry, ref))
    assert set(shown) == set((registry.notes(ref) or {}).values())
    assert all(text.isascii() for text in shown)
    assert not [text for text in shown if "MUST" in text or "gateway" in text]


def test_the_documents_that_are_served_keep_their_descriptions(registry: SchemaRegistry) -> None:
    served = json.loads(registry.documents["system.echo.invoke.output@1.0.0"])
    assert "MUST equal" in served["properties"]["node_id"]["description"]
