"""What a person sees of the audit: aligned, and nothing that a terminal would obey."""

import json
from typing import Any

import pytest

from relay.audit.report import moment, report_rows, row
from relay.audit.verify import ChainReport, LineFinding
from tests.fakes.signer import NODE_ID, NOW_MS

CALL = {
    "ts_ms": NOW_MS,
    "correlation_id": "01ARZ3NDEKTSV4RRFFQ69G5FAV",
    "tenant": "acme",
    "sub": "agent-1",
    "tool": f"sysecho.{NODE_ID}.echo.invoke",
    "node_id": NODE_ID,
}
DECISION: dict[str, Any] = {**CALL, "decision": "allow", "code": "ok"}
OUTCOME: dict[str, Any] = {**CALL, "outcome": "error", "code": "E_DEADLINE_EXCEEDED", "duration_ms": 12.5}
UNKNOWN_CALLER: dict[str, Any] = {
    **CALL,
    "tenant": None,
    "sub": None,
    "decision": "deny",
    "code": "E_SAFETY_DENIED",
}
EVENT: dict[str, Any] = {
    "ts_ms": NOW_MS,
    "event": "token_refused",
    "source": "192.0.2.1",
    "reason": "expired",
    "count": 3,
}


def shown(facts: dict[str, Any], *, colour: bool = False) -> str:
    return row(facts, b"", colour=colour)


def test_a_row_holds_what_happened_to_whom_and_where() -> None:
    assert shown(DECISION).split() == [
        *("2025-10-09", "08:53:20.000Z", "allow", "ok", "acme/agent-1"),
        *(f"sysecho.{NODE_ID}.echo.invoke", "01ARZ3NDEKTSV4RRFFQ69G5FAV"),
    ]
    assert shown(OUTCOME).split()[2:4] == ["error", "E_DEADLINE_EXCEEDED"]
    assert shown(OUTCOME).split()[-1] == "12.5"
    assert shown(UNKNOWN_CALLER).split()[2:5] == ["deny", "E_SAFETY_DENIED", "-/-"]
    assert shown(EVENT).split()[2:] == ["token_refused", "expired", "192.0.2.1", "3", "times", "-"]
    assert "once" in shown({**EVENT, "count": 1})
    enrolled = {"ts_ms": NOW_MS, "event": "enrolled", "kid": "ab" * 32, "node_id": NODE_ID, "tenant": "acme"}
    assert shown(enrolled).split()[2:] == ["enrolled", "-", "acme", NODE_ID, "-"]
    revoked = {"ts_ms": NOW_MS, "event": "leaf_revoked", "kid": "ab" * 32}
    assert shown(revoked).split()[2:] == ["leaf_revoked", "-", "-", "ab" * 32, "-"]


def test_columns_stand_below_one_another() -> None:
    rows = [shown(facts) for facts in (DECISION, OUTCOME, UNKNOWN_CALLER, EVENT)]
    for words in (["allow", "error", "deny", "token_refused"], ["acme/", "acme/", "-/-", "192.0.2.1"]):
        assert len({text.index(word) for text, word in zip(rows, words, strict=True)}) == 1


def test_colour_is_only_where_it_was_asked_for() -> None:
    assert "\x1b" not in shown(DECISION)
    assert "\x1b[32m" in shown(DECISION, colour=True)
    assert "\x1b[31m" in shown(OUTCOME, colour=True)
    assert "\x1b[33m" in shown(EVENT, colour=True)


HOSTILE = "\x1b[2J\n\u202e\x00\x7f\x9b31m"


@pytest.mark.parametrize("facts", [DECISION, OUTCOME, EVENT])
def test_no_value_reaches_the_terminal_as_it_is(facts: dict[str, Any]) -> None:
    for name in facts:
        for value in (HOSTILE, HOSTILE * 10_000, [HOSTILE], {HOSTILE: 1}, 10**4000, None, True):
            text = shown({**facts, name: value})
            assert text.isascii()
            assert text.isprintable()
            assert len(text) < 1000


@pytest.mark.parametrize("data", [HOSTILE.encode(), b"\xff\xfe\x1b[2J", b"x" * 70_000, b""])
def test_what_is_no_line_is_shown_as_damage(data: bytes) -> None:
    text = row(None, data, colour=False)
    assert text.split()[0] == "damaged"
    assert text.isascii()
    assert text.isprintable()
    assert len(text) < 200


@pytest.mark.parametrize(
    ("ts_ms", "text"),
    [
        (0, "1970-01-01 00:00:00.000Z"),
        (NOW_MS + 7, "2025-10-09 08:53:20.007Z"),
        (10**18, "1000000000000000000"),
        (-(10**18), "-1000000000000000000"),
        (json.loads("NaN"), "nan"),
        ("yesterday\x1b", "yesterday\\x1b"),
        (None, "-"),
    ],
)
def test_a_time_that_is_none_is_shown_as_it_is(ts_ms: Any, text: str) -> None:
    assert moment(ts_ms) == text


def rows_of(**members: Any) -> dict[str, str]:
    """The report on a walk, by the names of its rows."""
    report = ChainReport(files=["audit-000002.jsonl", "audit.jsonl"], lines=7, **members)
    rows = list(report_rows(report))
    assert all(text.isascii() and text.isprintable() for text in rows)
    assert rows[0].startswith("audit")
    return {text[:8].strip(): text[9:] for text in rows}


def test_the_report_begins_with_the_answer() -> None:
    intact = rows_of(first_ms=NOW_MS, last_ms=NOW_MS, head="ab" * 32)
    assert intact == {
        "audit": "intact",
        "lines": "7 in 2 files, audit-000002.jsonl the oldest",
        "first": "2025-10-09 08:53:20.000Z",
        "last": "2025-10-09 08:53:20.000Z",
        "head": "ab" * 32,
    }


def test_the_report_names_what_is_wrong_and_where() -> None:
    place = LineFinding("audit.jsonl", 17, f"does not follow {HOSTILE}")
    broken = rows_of(broken=place, breaks=3)
    assert broken["audit"] == "NOT INTACT"
    assert broken["broken"].startswith("audit.jsonl line 17: does not follow \\x1b[2J\\n")
    assert broken["broken"].endswith("(3 such lines)")
    assert rows_of(expected=False)["audit"] == "NOT INTACT"
    assert "cut off" in rows_of(expected=False)["missing"]
    assert rows_of(expected=True)["audit"] == "intact"


def test_what_is_only_odd_is_a_note_and_what_a_full_disk_did_a_warning() -> None:
    place = LineFinding("audit.jsonl", 17, "cut short")
    assert rows_of(torn=1, first_torn=place)["warning"] == "audit.jsonl line 17: cut short"
    assert "a clock was set back" in rows_of(backwards=1, first_backwards=place)["note"]
    assert "audit-000001.jsonl" in rows_of(after="audit-000001.jsonl")["note"]
    assert "no end yet" in rows_of(unfinished=True)["note"]
