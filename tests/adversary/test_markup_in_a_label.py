"""Attacker: a text that becomes a label: an operator pastes it, or a program writes it into the ledger.
Tried: markup, quotes, control characters, bidirectional overrides, line ends, ids and selectors.

What must happen: what is accepted is printable ASCII to which neither JSON nor HTML nor a terminal gives a
meaning, and is no selector and no id. A ledger with anything else is damaged, and nothing of it is shown.
"""

import html
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.fleet.tools import Projector
from relay.state.ledger import LedgerError
from relay.state.name_rules import MAX_LABEL, NameRuleError, check_label, id_prefix_of
from relay.state.names import NameLedger
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.hostile_texts import HOSTILE_TEXTS
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS

PROJECTOR = Projector(SchemaRegistry(), KindRegistry())
ALMOST_LABELS = st.text(st.characters(max_codepoint=0x2100), max_size=MAX_LABEL + 2) | st.text(
    st.sampled_from('ab 01-=*:<>`"\\&#[]()\n\x1b'), max_size=12
)


def refused(text: str) -> str | None:
    """Return why ``text`` is no label; None if it is one."""
    try:
        check_label(text)
    except NameRuleError as error:
        return str(error)
    return None


@given(ALMOST_LABELS)
def test_what_is_accepted_has_no_meaning_to_json_html_selectors_or_terminals(text: str) -> None:
    if (refusal := refused(text)) is not None:
        assert refusal.isascii()
        assert refusal.isprintable()
        return
    assert text.isascii()
    assert text.isprintable()
    assert len(text) <= MAX_LABEL
    assert json.dumps(text) == f'"{text}"'
    assert html.escape(text).replace("&amp;", "&").replace("&#x27;", "'") == text
    assert not set(text) & set("=*:")
    assert text == text.strip()
    prefix = id_prefix_of(text)
    assert prefix is None or not prefix[0].isdigit() or prefix[0] in "89"
    (tool,) = PROJECTOR.project(NODE_ID, [ECHO], text).values()
    assert json.loads(tool.listed_text()) == tool.listed()
    assert tool.listed()["title"] == f"{text}: Echo"


@pytest.mark.parametrize("text", HOSTILE_TEXTS.values(), ids=HOSTILE_TEXTS)
def test_a_hostile_text_is_no_label_wherever_it_comes_from(text: str, tmp_path: Path) -> None:
    ledger = NameLedger(tmp_path / "node_names.jsonl", FakeClock(NOW_MS))
    with pytest.raises(NameRuleError):
        ledger.label(NODE_ID, "acme", text)
    assert not ledger.name_new(NODE_ID, "acme", text, [])
    assert ledger.read().by_node == {}
    entry = {"action": "name", "ts_ms": 1, "node_id": NODE_ID, "tenant": "acme", "label": text, "tags": []}
    (tmp_path / "node_names.jsonl").write_text(json.dumps(entry) + "\n")
    with pytest.raises(LedgerError) as raised:
        ledger.read()
    assert str(raised.value).endswith("is damaged: line 1 is no entry")
