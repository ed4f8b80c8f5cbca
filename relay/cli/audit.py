"""``relay audit``: shows what was decided, and verifies that it was not changed since.

Reads while a relay is running, and needs no lock. Must not show a value before it is made printable: the file
may have been tampered with.
"""

import json
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from relay.audit.files import AuditLines, Line, numbered
from relay.audit.report import is_of_canaries, moment, report_rows, row
from relay.audit.verify import (
    FIELDS,
    HASH_FORM,
    ChainReport,
    ids_in,
    keep_verified_head,
    matching,
    parsed,
    read_verified_head,
    time_of,
    verify,
)
from relay.cli.exits import EXIT_LOST, fail
from relay.cli.options import AsJson, StateDir, seconds, show_table, state_files
from relay.cli.remote_server import own_records
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from schemas.error_roots import StateError
from schemas.process.cli_manual import example, group
from schemas.process.command_errors import EXIT_NO, EXIT_USAGE
from schemas.text import printable
from schemas.ulids import GIVEN_ID

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


app = group("What was decided, and whether it was changed since.")

_POLL_S = 0.25
_QUIET_S = 1.0
_FURTHER = 8
"""How many times further back is read where too few of the last lines are shown."""


@app.command("verify", epilog=example("relay audit verify", "relay audit verify relay-1/ relay-2/"))
def audit_verify(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="AUDIT", help="Those of several relays: directories or files. Default: this relay's."
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(metavar="HASH", help="A head noted earlier: its line must still be there."),
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Accept that lines of the last run are missing."),
    ] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Walk the chain. Exit 0 if it is intact, 1 if not, 4 if the newest line of the last time is lost.

    Of several, each is verified by itself; the exit code is that of the worst.
    """
    if places:
        if expect is not None:
            fail("--expect is a line of one audit: leave out the others", EXIT_USAGE)
        code = verify_several(audits_at(places), accept_loss=accept_loss, as_json=as_json)
        if code:
            raise SystemExit(code)
        return
    if expect is not None and HASH_FORM.fullmatch(expect) is None:
        fail("--expect is the 64 hexadecimal digits of a line's hash", EXIT_USAGE)
    _verify_own(state_files(state_dir), expect, accept_loss=accept_loss, as_json=as_json)


def _verify_own(files: StateFiles, expect: str | None, *, accept_loss: bool, as_json: bool) -> None:
    last = None if accept_loss else read_verified_head(files.audit_verified)
    progress = _Progress(files.audit, time.monotonic)
    try:
        report = verify(files.audit, expect, progress, last=last.head if last else None)
    except FileNotFoundError as error:
        if last is None:
            raise
        # Without this, a log that was removed whole would differ from one that never was only by its text.
        fail(f"{error}, but one was verified before: its files were removed or moved away", EXIT_LOST)
    progress.clear()
    if as_json:
        typer.echo(json.dumps({"intact": report.intact, **asdict(report)}))
    else:
        for row in report_rows(report):
            typer.echo(row)
    if not report.holds:
        raise SystemExit(EXIT_NO)
    if not report.intact:
        raise SystemExit(EXIT_LOST)
    try:
        keep_verified_head(files.audit_verified, report.head, now_ms())
    except OSError as error:
        # As in an archive that is read only: the result has been printed all the same.
        typer.echo(f"relay: the head is not kept for the next time: {printable(str(error))}", err=True)


@app.command("tail", epilog=example("relay audit tail --follow"))
def audit_tail(
    count: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many lines.")] = 20,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Print new lines until Ctrl-C.")] = False,
    canaries: Annotated[
        bool, typer.Option("--canaries", help="Show those of the relay's own echoes too.")
    ] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the newest lines, without those of the relay's own echoes (canaries)."""

    def shown(line: Line) -> bool:
        return canaries or not is_of_canaries(parsed(line.data))

    lines, newest = _newest(state_files(state_dir).audit, count, shown)
    show = _shower(as_json=as_json)
    with closing(lines), suppress(KeyboardInterrupt):
        for line in chain(newest, filter(shown, _followed(lines)) if follow else ()):
            show(line, parsed(line.data))


@app.command(
    "grep",
    epilog=example(
        "relay audit grep tenant=acme code=E_SAFETY_DENIED --since 2h",
        "relay audit grep --correlation order-17 --in relay/ --in calls.jsonl",
    ),
)
def audit_grep(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="FIELD=VALUE", help="What a line must contain, e.g. tenant=acme code=ok."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DURATION|TIME", help="15m, 2h, 30d, or 2026-11-21T08:00 (UTC).")
    ] = None,
    correlation: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Only the lines of this call, also in what `relay call` has recorded. The id is the relay's "
            "or the caller's.",
        ),
    ] = None,
    places: Annotated[
        list[Path] | None,
        typer.Option(
            "--in", metavar="AUDIT", help="A relay's directory or file, or a client's file; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show the lines that contain all of it. Exit 1 if none does.

    Those of several relays are shown in the order of their times, which their clocks have given.
    """
    wanted = dict(_pair(text) for text in fields or [])
    since_ms = None if since is None else _moment_ms(since)
    if not places:
        places = [state_files(state_dir).root]
        if correlation is not None and (records := own_records()) is not None:
            places.append(records)
    audits = audits_at(places)
    if correlation is not None and GIVEN_ID.fullmatch(correlation) is None:
        fail(f"{printable(correlation)} is no correlation id: 1 to 64 letters, digits and ._-", EXIT_USAGE)
    ids = None if correlation is None else ids_of_call(audits, correlation)
    several, found = len(audits) > 1, False
    width = max(len(printable(audit.name)) for audit in audits)
    show = _shower(as_json=as_json)
    for name, line, facts in matching_in(audits, wanted, since_ms, ids):
        found = True
        if not several:
            show(line, facts)
        elif as_json:
            typer.echo(json.dumps({"audit": name, **facts}))
        else:
            typer.echo(f"{printable(name):<{width}}  ", nl=False)
            show(line, facts)
    if not found:
        if unknown := [name for name in wanted if name not in FIELDS]:
            fail(f"no line has a field {printable(unknown[0])}; there are {', '.join(FIELDS)}", EXIT_NO)
        raise SystemExit(EXIT_NO)


def _newest(path: Path, count: int, shown: Callable[[Line], bool]) -> tuple[AuditLines, Iterable[Line]]:
    """Return what yields the lines that are written later, and the last ``count`` that are ``shown``."""
    reach = count
    while True:
        lines = AuditLines(path)
        lines.skip_to_last(reach)
        newest, read = deque[Line](maxlen=count), 0
        for line in lines.read():
            read += 1
            if shown(line):
                newest.append(line)
        if len(newest) == count or read < reach:
            return lines, newest
        lines.close()
        reach *= _FURTHER


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        fail(f"{printable(text)} is not FIELD=VALUE: write tenant=acme or code=ok", EXIT_USAGE)
    return name, value


def _moment_ms(text: str) -> int:
    if text[-1:] in {"s", "m", "h", "d"}:
        return now_ms() - seconds(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        fail(f"{printable(text)} is no time: write 15m, 2h, 30d or 2026-11-21T08:00", EXIT_USAGE)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)


def _shower(*, as_json: bool) -> Callable[[Line, Mapping[str, Any] | None], None]:
    """Return a function that prints a line: a row for people, or JSON for programs."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")

    def show_row(line: Line, facts: Mapping[str, Any] | None) -> None:
        typer.echo(row(facts, line.data, colour=colour))

    def show_json(line: Line, facts: Mapping[str, Any] | None) -> None:
        if facts is None:
            typer.echo(f"relay: {printable(line.file)} holds a line that is no JSON; left out", err=True)
            return
        # As the relay wrote it; a line of another program must not print control characters either.
        text = line.data.decode("ascii", "replace")
        typer.echo(text if text.isascii() and text.isprintable() else json.dumps(facts))

    return show_json if as_json else show_row


def _followed(lines: AuditLines) -> Iterator[Line]:
    while True:
        yield from lines.read()
        time.sleep(_POLL_S)


class _Progress:
    """Shows the progress of a verification that takes more than a second, on a terminal."""

    def __init__(self, path: Path, monotonic: Callable[[], float]) -> None:
        files = [path, *(file for _, file in numbered(path))]
        self._total = sum(file.stat().st_size for file in files if file.exists())
        self._monotonic = monotonic
        self._started = monotonic()
        self._shown = False

    def __call__(self, bytes_read: int) -> None:
        if sys.stderr.isatty() and self._monotonic() - self._started > _QUIET_S:
            typer.echo(f"\r{min(99, 100 * bytes_read // max(1, self._total)):3} %", err=True, nl=False)
            self._shown = True

    def clear(self) -> None:
        if self._shown:
            typer.echo("\r     \r", err=True, nl=False)
