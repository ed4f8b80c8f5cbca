"""Attacker: a text that becomes a label: an operator pastes it, or a program writes it into the ledger.
Tried: markup, quotes, control characters, bidirectional overrides, line ends, ids, selectors,
letters of another script that look like Latin, letters from right to left, letters that cannot be seen.

What must happen: what is accepted is printable ASCII, and letters of a script that no other of the word
looks like, to which neither JSON nor HTML nor a terminal gives a meaning, and is no selector and no id. What
is kept of it is ASCII. A ledger with anything else is damaged, and nothing of it is shown.
"""

import html
import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.fleet.tools import Projector
from relay.state.ledger import LedgerError
from relay.state.names import NameLedger
from schemas.kinds import KindRegistry
from schemas.labels import MAX_LABEL, NameRuleError, id_prefix_of, kept_form, label_of, shown_form, typed_form
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.hostile_texts import HOSTILE_TEXTS
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS

PROJECTOR = Projector(SchemaRegistry(), KindRegistry())
ALMOST_LABELS = (
    st.text(st.characters(max_codepoint=0x2100), max_size=MAX_LABEL + 2)
    | st.text(st.sampled_from('ab 01-=*:<>`"\\&#[]()\n\x1b'), max_size=12)
    | st.text(st.sampled_from("äßбяΩω温室ポ온 a0-_\u0301\u202e\u200b"), max_size=12)
    | st.text(st.sampled_from("กำเั้ะา\u0e4d0 कर\u094d\u093eंअ़\u0903\u200d"), max_size=12)
    | st.text(st.sampled_from("ab-01_ n"), max_size=12).map("xn--{}".format)
)


def refused(text: str) -> str | None:
    """Return why ``text`` is no label; None if it is one."""
    try:
        label_of(text)
    except NameRuleError as error:
        return str(error)
    return None


@given(ALMOST_LABELS)
def test_what_is_accepted_has_no_meaning_to_json_html_selectors_or_terminals(written: str) -> None:
    if (refusal := refused(written)) is not None:
        assert refusal.isascii()
        assert refusal.isprintable()
        return
    text = label_of(written)
    assert label_of(text) == text
    assert text.isprintable()
    assert len(text) <= MAX_LABEL
    for char in text:
        is_mark = unicodedata.category(char) in {"Mn", "Mc"}
        assert char.isascii() or char.isalpha() or is_mark
        assert char.isascii() or unicodedata.bidirectional(char) in ({"L", "NSM"} if is_mark else {"L"})
        assert char == "ำ" or unicodedata.is_normalized("NFKC", char)
    kept = kept_form(text)
    assert kept.isascii()
    assert shown_form(kept) == text
    assert json.dumps(kept) == f'"{kept}"'
    assert label_of(typed_form(text)).isprintable()
    assert html.escape(text).replace("&amp;", "&").replace("&#x27;", "'") == text
    assert not set(text) & set("=*:")
    assert text == text.strip()
    prefix = id_prefix_of(text)
    assert prefix is None or not prefix[0].isdigit() or prefix[0] in "89"
    (tool,) = PROJECTOR.project(NODE_ID, [ECHO], text).values()
    assert json.loads(tool.listed_text()) == tool.listed()
    assert tool.listed()["title"] == f"{text}: Echo"


@pytest.mark.parametrize(
    "text",
    [
        *("G\u0430teway", "r\u03bfot", "\u0391dmin"),  # one letter of Cyrillic or Greek among Latin ones
        *("\u05e9\u05dc\u05d5\u05dd", "\u0645\u0646", "ä\u200f", "ä\u202eb"),  # from right to left
        *("ä\u200bb", "ä\u3164", "ä\u00ad", "ä\u2060b", "\u1160ä", "ä\ufe0f"),  # cannot be seen
        *("\uff41b", "\ufb01n", "\u01c3", "a\u0334\u0335", "\U0001f600", "\U0001d41a", "\ue000", "ä\u2028b"),
        *(
            "ä<b>",
            "ä:b",
            "ä=b",
            "ä\uff1cb",
            "ä\u2019b",
            "ä\\b",
            "ä\nb",
            "ä_b",
            " ä",
            "ä  я",
            "я ",
            "-ä",
            "ä" * 49,
        ),
        "я" * 48,  # its kept form is too long
        *("0äääää", "ä" * 26),  # what is typed for it can be read as an id
    ],
    ids=ascii,
)
def test_a_label_that_deceives_is_refused(text: str) -> None:
    with pytest.raises(NameRuleError, match="is no label"):
        label_of(text)


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
