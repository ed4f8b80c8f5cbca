"""What ``relay audit`` does with the audits of several relays: one table, one exit code, one order of time.

Each audit is a chain of its own, and is verified by itself. One that cannot be read must not hide what was
found in the others.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from heapq import merge
from pathlib import Path
from typing import Any, NamedTuple

import typer

from relay.audit.files import AuditLines, Line
from relay.audit.report import moment
from relay.audit.verify import (
    ChainReport,
    ids_in,
    keep_verified_head,
    matching,
    read_verified_head,
    time_of,
    verify,
)
from relay.cli.exits import EXIT_LOST
from relay.cli.options import show_table
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from schemas.error_roots import StateError
from schemas.process.exit_codes import EXIT_NO
from schemas.text import printable

_HEAD_DIGITS = 12
_SUFFIX = ".jsonl"


class Audit(NamedTuple):
    """One of several audits: what it is called, its newest file, and where its verified head is kept."""

    name: str
    path: Path
    verified: Path


@dataclass(frozen=True, slots=True)
class VerifiedAudit:
    """What was found of one audit: a report, or why there is none."""

    audit: Audit
    report: ChainReport | None
    problem: str = ""

    @property
    def exit_code(self) -> int:
        """The exit code of its verification alone."""
        if self.report is None or not self.report.holds:
            return EXIT_NO
        return 0 if self.report.intact else EXIT_LOST

    @property
    def result(self) -> str:
        """What was found, in a few words."""
        if self.report is None:
            return f"NOT READ: {self.problem}"
        if self.report.broken is not None:
            return f"BROKEN: {self.report.broken.file} line {self.report.broken.line}"
        return "intact" if self.report.intact else "LINES LOST since the last verification"

    def facts(self) -> dict[str, Any]:
        """Return it for programs."""
        found = {} if self.report is None else {"intact": self.report.intact, **asdict(self.report)}
        return {"audit": self.audit.name, "result": self.result, **found}


def audits_at(places: Iterable[Path]) -> list[Audit]:
    """Return the audits at ``places``: directories, of a relay's state or with an audit, or newest files."""
    found = []
    for place in places:
        path = place if place.suffix == _SUFFIX else StateFiles(place).audit
        found.append(Audit(str(place), path, path.with_name(f"{path.stem}-verified.json")))
    return found


def verify_several(audits: Sequence[Audit], *, accept_loss: bool, as_json: bool) -> int:
    """Verify each of ``audits``, print one table, and return the exit code: 1 before 4 before 0."""
    found = [_verified(audit, accept_loss=accept_loss) for audit in audits]
    if as_json:
        typer.echo(json.dumps([each.facts() for each in found]))
    else:
        show_table(("AUDIT", "LINES", "FIRST", "LAST", "HEAD", "RESULT"), [_row(each) for each in found])
    codes = {each.exit_code for each in found}
    return EXIT_NO if EXIT_NO in codes else max(codes, default=0)


def _verified(audit: Audit, *, accept_loss: bool) -> VerifiedAudit:
    try:
        last = None if accept_loss else read_verified_head(audit.verified)
        report = verify(audit.path, last=last.head if last else None)
    except (StateError, OSError) as error:
        return VerifiedAudit(audit, None, printable(str(error)))
    if report.intact:
        try:
            keep_verified_head(audit.verified, report.head, now_ms())
        except OSError as error:
            # As in an archive that is read only: the result is printed all the same.
            typer.echo(f"relay: {audit.name}: the head is not kept: {printable(str(error))}", err=True)
    return VerifiedAudit(audit, report)


def _row(found: VerifiedAudit) -> tuple[str, ...]:
    report = found.report
    if report is None:
        return (found.audit.name, "-", "-", "-", "-", found.result)
    times = [moment(ts_ms) if ts_ms is not None else "-" for ts_ms in (report.first_ms, report.last_ms)]
    return (found.audit.name, str(report.lines), *times, report.head[:_HEAD_DIGITS], found.result)


def ids_of_call(audits: Iterable[Audit], given: str) -> set[str]:
    """Return every correlation id by which ``audits`` name the call ``given``, and those it belongs to.

    Raises:
        OSError: one of them cannot be read.
    """
    found = {given}
    for audit in audits:
        with closing(AuditLines(audit.path)) as lines:
            for _, facts in matching(lines.read(), {}, None, {given}):
                found.update(ids_in(facts))
    return found


def matching_in(
    audits: Sequence[Audit],
    wanted: Mapping[str, str],
    since_ms: int | None,
    ids: Collection[str] | None = None,
) -> Iterator[tuple[str, Line, Mapping[str, Any]]]:
    """Yield the lines of all ``audits`` that match, by their time: the audit's name, the line, its facts.

    Raises:
        OSError: one of them cannot be read.
    """
    with ExitStack() as stack:
        streams = []
        for audit in audits:
            lines = stack.enter_context(closing(AuditLines(audit.path)))
            streams.append(_named(audit.name, matching(lines.read(), wanted, since_ms, ids)))
        yield from merge(*streams, key=lambda found: time_of(found[2]))


def _named(
    name: str, found: Iterable[tuple[Line, Mapping[str, Any]]]
) -> Iterator[tuple[str, Line, Mapping[str, Any]]]:
    for line, facts in found:
        yield name, line, facts
