import re
from typing import Any

import pytest

from schemas.document_store import SCHEME
from schemas.kinds import KINDS, MANIFEST_REF, SYSTEM_ECHO, SYSTEM_METRICS, Kind, KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.signer import ECHO, METRICS


def kind(name: str, short: str) -> Kind:
    return Kind(name=name, short=short, safety_class="read_only", schema_ref="", verbs={})


def test_a_kind_is_found_by_name_and_by_short_token(kinds: KindRegistry) -> None:
    assert kinds.get("system.echo") is kinds.by_short("sysecho") is SYSTEM_ECHO
    assert kinds.get("system.metrics") is kinds.by_short("sys") is SYSTEM_METRICS


@pytest.mark.parametrize("name", ["", "sys", "system", "System.echo", "system.gpio"])
def test_an_unregistered_name_is_no_kind(kinds: KindRegistry, name: str) -> None:
    assert kinds.get(name) is None


@pytest.mark.parametrize("short", ["", "system.echo", "SYS", "syse"])
def test_an_unregistered_short_token_is_no_kind(kinds: KindRegistry, short: str) -> None:
    assert kinds.by_short(short) is None


def test_the_kinds_come_in_the_order_of_registration(kinds: KindRegistry) -> None:
    assert list(kinds) == list(KINDS)
    assert list(KindRegistry([SYSTEM_ECHO, SYSTEM_METRICS])) == [SYSTEM_ECHO, SYSTEM_METRICS]


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


def test_a_registry_may_be_empty() -> None:
    assert list(KindRegistry([])) == []


def test_every_document_that_a_kind_cites_is_registered(
    kinds: KindRegistry, registry: SchemaRegistry
) -> None:
    for each in kinds:
        assert each.schema_ref.removeprefix(SCHEME) in registry.documents
        for verb in each.verbs.values():
            assert {verb.input_ref, verb.output_ref} <= set(registry.documents)


def test_every_kind_keeps_to_the_manifests_vocabulary(kinds: KindRegistry, registry: SchemaRegistry) -> None:
    capability = registry.document(MANIFEST_REF)["$defs"]["Capability"]["properties"]
    for each in kinds:
        assert re.fullmatch(r"[a-z][a-z0-9_]{0,7}", each.short)
        assert re.fullmatch(capability["schema_ref"]["pattern"], each.schema_ref)
        assert each.safety_class in capability["safety_class"]["enum"]
        assert set(each.verbs) <= set(capability["verbs"]["items"]["enum"])
        assert [verb.name for verb in each.verbs.values()] == list(each.verbs)


def test_every_verb_has_a_text_for_the_agent_in_printable_ascii(kinds: KindRegistry) -> None:
    for each in kinds:
        for verb in each.verbs.values():
            for text in (verb.title, verb.description):
                assert re.fullmatch(r"[\x20-\x7E]+", text)


def test_echo_is_the_tool_of_rfc_0005() -> None:
    assert list(SYSTEM_ECHO.verbs) == ["invoke"]
    assert SYSTEM_ECHO.verbs["invoke"].input_ref == "system.echo.invoke.input@1.0.0"
    assert SYSTEM_ECHO.verbs["invoke"].output_ref == "system.echo.invoke.output@1.0.0"
    assert SYSTEM_ECHO.safety_class == "read_only"
    assert SYSTEM_ECHO.verbs["invoke"].verbatim == ("message",)


def test_what_a_row_says_of_a_result_is_in_the_documents(
    kinds: KindRegistry, registry: SchemaRegistry
) -> None:
    for verb in (verb for each in kinds for verb in each.verbs.values()):
        sent, answered = (registry.document(ref)["properties"] for ref in (verb.input_ref, verb.output_ref))
        assert set(verb.verbatim) <= set(sent) & set(answered)
        for foreign in verb.foreign_texts:
            found = {"properties": answered}
            for member in foreign.path:
                found = found.get("items", found)["properties"][member]
            assert found["type"] == "string"
            assert foreign.limit <= found["maxLength"]  # what is cut to it still fits


@pytest.mark.parametrize("capability", [ECHO, METRICS], ids=["echo", "metrics"])
def test_a_capability_cites_its_kind(kinds: KindRegistry, capability: dict[str, Any]) -> None:
    cited = kinds.get(capability["kind"])
    assert cited is not None
    assert capability["schema_ref"] == cited.schema_ref
    assert capability["safety_class"] == cited.safety_class


def test_the_verbs_of_a_kind_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        SYSTEM_ECHO.verbs["format_disk"] = SYSTEM_ECHO.verbs["invoke"]  # type: ignore[index]
