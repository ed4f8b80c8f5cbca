"""An entry of ``tools/list``: the text that is put together is the JSON of the document."""

import json
from dataclasses import replace

import pytest

from relay.auth.permissions import SCOPE_OF_SAFETY_CLASS
from relay.fleet.tool_entry import EntryTemplate
from relay.fleet.tools import Projector
from schemas.kinds import KindRegistry, Verb
from schemas.registry import SchemaRegistry
from tests.fakes.shipped_kinds import SYSTEM_ECHO
from tests.fakes.signer import ECHO, METRICS, NODE_ID


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
