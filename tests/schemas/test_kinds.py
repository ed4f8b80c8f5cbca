"""The kinds that ship: each a directory of one form, known to every process or only where it is named."""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from schemas.kind_packages import KindPackageError, read_kind, read_shipped
from schemas.kinds import (
    DOCUMENTS,
    MANIFEST_REF,
    RFC_0001,
    ROW,
    SHIPPED,
    Kind,
    KindRegistry,
    amended,
    rfc_kinds,
    shipped_names,
)
from schemas.registry import SCHEME, Contract, SchemaRegistry, contract_of, read_contract
from tests.fakes.shipped_kinds import KINDS, SYSTEM_ECHO, SYSTEM_METRICS, announced, examples
from tests.fakes.signer import ECHO, NODE_ID

BOARD = "linux.board"
"""A kind that only tests have: with everything that the form can say of one that reads a board."""


def kind(name: str, short: str) -> Kind:
    return Kind(name=name, short=short, safety_class="read_only", schema_ref="", verbs={})


def test_a_kind_is_found_by_name_and_by_short_token(kinds: KindRegistry) -> None:
    assert kinds.get("system.echo") is kinds.by_short("sysecho")
    assert kinds.get("system.metrics") is kinds.by_short("sys")
    assert (kinds.get("system.echo"), kinds.get("system.metrics")) == (SYSTEM_ECHO, SYSTEM_METRICS)


@pytest.mark.parametrize("name", ["", "sys", "system", "System.echo", "system.gpio"])
def test_an_unregistered_name_is_no_kind(kinds: KindRegistry, name: str) -> None:
    assert kinds.get(name) is None


@pytest.mark.parametrize("short", ["", "system.echo", "SYS", "syse"])
def test_an_unregistered_short_token_is_no_kind(kinds: KindRegistry, short: str) -> None:
    assert kinds.by_short(short) is None


def test_the_kinds_come_in_the_order_of_registration(kinds: KindRegistry) -> None:
    assert list(kinds) == list(KINDS)
    assert list(KindRegistry([SYSTEM_ECHO, SYSTEM_METRICS])) == [SYSTEM_ECHO, SYSTEM_METRICS]
    assert list(KindRegistry([])) == []


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param((kind("a.b", "a"), kind("a.b", "b")), id="the-same-name"),
        pytest.param((kind("a.b", "a"), kind("a.c", "a")), id="the-same-short-token"),
    ],
)
def test_two_kinds_that_cannot_be_told_apart_are_refused(pair: tuple[Kind, Kind]) -> None:
    with pytest.raises(ValueError, match="share a name or a short token"):
        KindRegistry(pair)


@pytest.mark.parametrize("name", shipped_names())
def test_a_kind_that_ships_keeps_the_rules_of_all(name: str) -> None:
    """Row, documents and examples by the rules of a package; of RFC-0001's own all but the dialect."""
    shipped = read_kind(SHIPPED / name, name)
    assert read_shipped(name) == shipped
    cited = {SCHEME + ref for ref in shipped.documents}
    files = {f"{SCHEME}{file.stem}" for file in (SHIPPED / name / DOCUMENTS).iterdir()}
    assert files == cited, "a document that no verb has"
    assert {entry.name for entry in (SHIPPED / name).iterdir()} == {ROW, DOCUMENTS}
    assert set(shipped.kind.notes) <= set(shipped.documents)
    assert set(examples(name)) >= {ref for each in shipped.kind.verbs.values() for ref in (each.input_ref,)}
    registry = contract_of([] if name in RFC_0001 else [shipped]).registry
    registry.load("capability@1.0.0").check(announced(shipped.kind))


def test_kinds_that_ship_can_be_named_together() -> None:
    contract = read_contract(tuple(name for name in shipped_names() if name not in RFC_0001))
    assert sorted(each.name for each in contract.kinds) == shipped_names()
    capabilities = [announced(each) for each in contract.kinds]
    assert len({each["cap_id"] for each in capabilities}) == len(capabilities)


def test_the_kinds_of_the_served_manifest_are_rfc_0001s_and_clamped_as_their_rows_say(
    registry: SchemaRegistry,
) -> None:
    capability = registry.document(MANIFEST_REF)["$defs"]["Capability"]
    assert tuple(capability["properties"]["kind"]["enum"]) == RFC_0001
    admitted = {"$defs": {"Capability": {**capability, "allOf": []}}}
    of_rows = {**registry.document(MANIFEST_REF), **amended(admitted, KINDS)}["$defs"]["Capability"]["allOf"]
    for ours, served in zip(of_rows, capability["allOf"], strict=True):
        assert ours["if"] == served["if"]
        clamp, limits = served["then"]["properties"], ours["then"]["properties"].pop("constraints")
        # Where the document clamps no constraint, the row says what it admits of every kind.
        assert clamp.pop("constraints", {"properties": limits["properties"]}) == limits
        assert ours["then"]["properties"] == clamp


def test_nothing_but_rfc_0001s_kinds_is_known_unless_it_is_named() -> None:
    """So a node of this version is accepted by relays of 0.1 and 0.2, whose manifests have no other."""
    contract = read_contract(())
    assert tuple(each.name for each in contract.kinds) == tuple(each.name for each in rfc_kinds()) == RFC_0001
    others = {ref for name in shipped_names() if name not in RFC_0001 for ref in read_shipped(name).documents}
    assert not others & set(contract.registry.documents)


def board_rules() -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Return row and documents of a kind with two pages, a text of others, and samples to follow."""
    node = {"type": "string", "maxLength": 26, "pattern": "^[0-9a-hjkmnp-tv-z]{26}$"}
    line = {"type": "string", "maxLength": 256, "pattern": r"^[\x20-\x7E]*$"}
    cursor = {"type": "string", "maxLength": 64, "pattern": "^[A-Za-z0-9_-]+$"}
    interval = {"type": "integer", "minimum": 1000, "maximum": 60_000}
    entry = {
        "type": "object",
        "additionalProperties": False,
        "required": ["unit", "text"],
        "properties": {"unit": line, "text": line},
    }
    entries = {"type": "array", "maxItems": 64, "items": entry}
    answer = {
        "ts_ms": {"type": "integer", "minimum": 0},
        "node_id": node,
        "entries": entries,
        "later": cursor,
    }
    members: dict[str, tuple[dict[str, Any], list[str]]] = {
        "get.input": ({"after": cursor}, []),
        "snapshot.input": ({}, []),
        "subscribe.input": ({"interval_ms": interval}, ["interval_ms"]),
        "output": (answer, ["ts_ms", "node_id", "entries"]),
    }
    documents = {
        f"{BOARD}.{name}@1.0.0": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"{SCHEME}{BOARD}.{name}@1.0.0",
            "type": "object",
            "additionalProperties": False,
            "required": required,
            "properties": properties,
        }
        for name, (properties, required) in members.items()
    }
    verb = {
        "output": f"{BOARD}.output@1.0.0",
        "title": "Lines",
        "description": "Read lines of a board.",
        "idempotent": True,
        "foreign_texts": [{"path": ["entries", "unit"], "usual": "^[a-z][a-z0-9.@-]*$", "limit": 64}],
        "free_texts": [["entries", "text"]],
        "example": {"arguments": {}, "result": {"ts_ms": 1, "node_id": NODE_ID, "entries": []}},
    }
    follow = {"streams": True, "example": {**verb["example"], "arguments": {"interval_ms": 1000}}}  # type: ignore[dict-item]
    row = {
        "kind": BOARD,
        "kind_short": "lnxboard",
        "safety_class": "read_only",
        "schema_ref": f"{SCHEME}{BOARD}@1.0.0",
        "limits": {"rate_limit_rps": 10, "deadline_ms_default": 5000},
        "capability": {
            "cap_id": "board",
            "constraints": {"rate_limit_rps": 2, "max_concurrency": 1, "deadline_ms_default": 2000},
        },
        "verbs": {
            name: {**verb, "input": f"{BOARD}.{name}.input@1.0.0", **(follow if name == "subscribe" else {})}
            for name in ("get", "snapshot", "subscribe")
        },
    }
    bundle = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": row["schema_ref"],
        "$defs": {f"d{number}": deepcopy(document) for number, document in enumerate(documents.values())},
    }
    return row, {**documents, f"{BOARD}@1.0.0": bundle}


def read_board(directory: Path, row: Any, documents: dict[str, Any]) -> Contract:
    (directory / DOCUMENTS).mkdir()
    (directory / ROW).write_text(json.dumps(row), "utf-8")
    for ref, document in documents.items():
        (directory / DOCUMENTS / f"{ref}.json").write_text(json.dumps(document), "utf-8")
    return contract_of([read_kind(directory, BOARD)])


def test_a_further_kind_is_admitted_by_an_amendment_where_it_is_named_alone(
    tmp_path: Path,
) -> None:
    contract = read_board(tmp_path, *board_rules())
    [board] = (each.kind for each in contract.named)
    verb = board.verbs["get"]
    assert verb.shown({"entries": [{"unit": "a b", "text": "a b"}]}) == {
        "entries": [{"unit": r"a\x20b", "text": "a b"}]
    }
    for length, shown in ((256, 256), (257, 64)):
        assert verb.shown({"entries": [{"unit": "a" * length}]}) == {"entries": [{"unit": "a" * shown}]}
    assert (board.verbs["subscribe"].streams, verb.foreign_texts[0].limit) == (True, 64)
    assert contract.registry.documents[f"{BOARD}@1.0.0"]
    shipped = SchemaRegistry()
    assert contract.registry.documents[MANIFEST_REF] == shipped.documents[MANIFEST_REF]
    contract.registry.load("capability@1.0.0").check(announced(board))
    assert not shipped.load("capability@1.0.0").is_valid(announced(board))
    assert contract.registry.load("capability@1.0.0").is_valid(ECHO)


def on_row(*path: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda row, _documents: put(row, path, value)


def on_document(ref: str, *path: str, value: Any) -> Callable[[Any, Any], None]:
    return lambda _row, documents: put(documents[f"{BOARD}{ref}@1.0.0"], path, value)


def put(document: Any, path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        document = document[name]
    document[path[-1]] = value


FOREIGN = {"path": ["entries", "unit"], "usual": "^a$", "limit": 64}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (on_row("capability", "cap_id", value="No Id"), "/capability/cap_id must"),
        (on_row("capability", "constraints", value={"rate_limit_rps": 1}), "/capability/constraints"),
        (on_row("verbs", "get", "foreign_texts", value=[{**FOREIGN, "limit": 257}]), "above its maxLength"),
        (on_row("verbs", "get", "foreign_texts", value=[{**FOREIGN, "usual": "a"}]), "foreign_texts/0/usual"),
        (on_row("verbs", "get", "foreign_texts", value=[{**FOREIGN, "usual": "^((a+)+)+$"}]), "cannot have"),
        (on_row("verbs", "get", "foreign_texts", value=[{**FOREIGN, "usual": "^[z-a]$"}]), "cannot have"),
        (on_row("verbs", "get", "foreign_texts", value=[{**FOREIGN, "path": ["later"]}]), "no string with"),
        (on_row("verbs", "get", "example", "arguments", value={"after": 1}), "arguments that do not fit"),
        (on_row("verbs", "get", "example", "result", value={}), "result that do not fit"),
        (on_row("schema_ref", value=f"{SCHEME}{BOARD}@2.0.0"), "/schema_ref must be"),
        (on_document("", "$defs", value={}), "documents of all verbs"),
        (on_document("", "$defs", "d0", "required", value=["after"]), "documents of all verbs"),
        (on_document("", "$defs", "d9", value={"$id": "other"}), "documents of all verbs"),
        (on_document("", "properties", value={}), "documents of all verbs"),
        (on_document(".get.input", "properties", "after", value={"type": "string"}), "maxLength"),
    ],
)
def test_a_further_kind_is_held_to_the_rules(
    tmp_path: Path, change: Callable[[Any, Any], None], reason: str
) -> None:
    row, documents = board_rules()
    change(row, documents)
    with pytest.raises(KindPackageError, match=re.escape(reason)):
        read_board(tmp_path, row, documents)


@pytest.mark.holds("RFC-0001/8/cites-verbatim")
def test_a_capability_cites_its_kind() -> None:
    assert announced(SYSTEM_METRICS)["schema_ref"] == SYSTEM_METRICS.schema_ref
    assert SYSTEM_METRICS.schema_ref == "mcp://schemas/system.metrics@1.0.0"
    assert announced(SYSTEM_ECHO)["schema_ref"] == "mcp://schemas/system.echo.invoke.input@1.0.0"
    assert MANIFEST_REF == "manifest@1.1.0"


@pytest.mark.holds("RFC-0005/2/tool-string", "RFC-0005/4/verbatim")
def test_echo_is_the_tool_of_rfc_0005() -> None:
    assert list(SYSTEM_ECHO.verbs) == ["invoke"]
    assert SYSTEM_ECHO.verbs["invoke"].input_ref == "system.echo.invoke.input@1.0.0"
    assert SYSTEM_ECHO.verbs["invoke"].output_ref == "system.echo.invoke.output@1.0.0"
    assert SYSTEM_ECHO.safety_class == "read_only"
    assert SYSTEM_ECHO.verbs["invoke"].verbatim == ("message",)


def test_the_verbs_of_a_kind_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SYSTEM_ECHO.verbs["format_disk"] = SYSTEM_ECHO.verbs["invoke"]  # type: ignore[index]
