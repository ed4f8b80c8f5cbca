"""The audit as a person reads it in a terminal.

Must output printable ASCII only: the file may contain anything.
"""

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import typer

from relay.audit.log import CANARIES_EVENT
from relay.audit.verify import ChainReport, LineFinding
from schemas.text import printable

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_WIDTHS = (24, 16, 20, 24, 46, 26, 9)
_COLOURS = {"allow": "green", "ok": "green", "deny": "red", "error": "red"}
_TARGETS = ("tool", "node_id", "jti", "kid")
_NONE = "-"


def row(facts: Mapping[str, Any] | None, data: bytes, *, colour: bool) -> str:
    """Return a line of the audit as one row; ``data`` is shown if it holds no ``facts``."""
    if facts is None:
        cells = ["", "damaged", printable(data.decode("utf-8", "backslashreplace"), 100)]
        what = "error"
    else:
        cells = _cells(facts)
        what = cells[1]
    padded = [f"{cell:<{width}}" for cell, width in zip(cells, _WIDTHS, strict=False)]
    if colour:
        padded[0] = typer.style(padded[0], dim=True)
        padded[1] = typer.style(padded[1], fg=_COLOURS.get(what, "yellow"))
    return "  ".join([*padded, *cells[len(_WIDTHS) :]]).rstrip()


def _cells(facts: Mapping[str, Any]) -> list[str]:
    """Return time, event, code, source, target, correlation id, milliseconds, and the other end's id."""
    if "event" not in facts:
        who = f"{_text(facts.get('tenant'))}/{_text(facts.get('sub'))}"
    else:
        who = _text(facts.get("source") or facts.get("tenant"))
    target = next((_text(facts[name]) for name in _TARGETS if facts.get(name)), _NONE)
    if "count" in facts:
        target = "once" if facts["count"] == 1 else f"{_text(facts['count'])} times"
    return [
        moment(facts.get("ts_ms", facts.get("time_ms"))),
        _text(facts.get("event") or facts.get("outcome") or facts.get("decision")),
        _text(facts.get("code") or facts.get("reason") or facts.get("outcome")),
        who,
        target,
        _text(facts.get("correlation_id")),
        _text(facts["duration_ms"]) if "duration_ms" in facts else "",
        _text(other)
        if (other := facts.get("caller_correlation_id") or facts.get("remote_correlation_id"))
        else "",
    ]


def is_of_canaries(facts: Mapping[str, Any] | None) -> bool:
    """Return whether a line is of the relay's own echoes; earlier versions wrote calls without token."""
    if facts is None:
        return False
    is_call = "event" not in facts and "iss" in facts
    own = is_call and facts.get("sub") == "relay" and facts["iss"] is None
    return own or facts.get("event") == CANARIES_EVENT


def _text(value: Any) -> str:
    return _NONE if value is None else printable(str(value), 64)


def moment(ts_ms: Any) -> str:
    """Return a time in milliseconds since the epoch as UTC."""
    try:
        shown = _EPOCH + timedelta(milliseconds=ts_ms)
    except (TypeError, ValueError, OverflowError):
        return _text(ts_ms)
    return f"{shown:%Y-%m-%d %H:%M:%S}.{shown.microsecond // 1000:03}Z"


def report_rows(report: ChainReport) -> Iterator[str]:
    """Yield what was found, a row each, the result first."""
    yield _row("audit", "intact" if report.intact else "NOT INTACT")
    if report.broken:
        yield _row("broken", _placed(report.broken, report.breaks))
    yield from _missing_rows(report)
    yield _row("lines", f"{report.lines} in {len(report.files)} files, {report.files[0]} the oldest")
    if report.first_ms is not None:
        yield _row("first", moment(report.first_ms))
        yield _row("last", moment(report.last_ms))
    yield _row("head", report.head)
    if report.removed:
        newest = report.removed[-1]
        count = len({each.file for each in report.removed})
        yield _row("note", f"{count} older files were removed, {newest.file} on {moment(newest.removed_ms)}")
    if report.after and report.after not in {each.file for each in report.removed}:
        yield _row("note", f"begins after {report.after}, which is not here")
    if report.unfinished:
        yield _row("note", "the newest line has no end yet and is not counted")
    if report.first_backwards:
        yield _row("note", f"a clock was set back: {_placed(report.first_backwards, report.backwards)}")
    if report.first_torn:
        yield _row("warning", _placed(report.first_torn, report.torn))


def _missing_rows(report: ChainReport) -> Iterator[str]:
    """Yield what is said of the hashes that are looked for, and are not here."""
    if report.expected_removed_ms is not None:
        yield _row("removed", f"the line with the expected hash, on {moment(report.expected_removed_ms)}")
    elif report.expected is False:
        yield _row(
            "missing", "no line here has the expected hash: lines were cut off or changed after it was noted"
        )
        if report.removed:
            until = moment(report.removed[-1].until_ms)
            yield _row("note", f"lines up to {until} were removed: if it was noted before, name --noted")
    if report.last_removed_ms is not None:
        yield _row(
            "removed", f"the newest line of the last verification, on {moment(report.last_removed_ms)}"
        )
    elif report.last_verified is False:
        text = "the newest line of the last verification is not here: it was cut off, or its file moved away"
        yield _row("missing", text)


def _placed(place: LineFinding, times: int) -> str:
    more = f" ({times} such lines)" if times > 1 else ""
    return f"{place.file} line {place.line}: {place.text}{more}"


def _row(name: str, text: str) -> str:
    return f"{name:<8} {printable(text, 240)}"
