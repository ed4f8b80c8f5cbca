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
from dataclasses import asdict
from datetime import UTC, datetime
from heapq import merge
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from relay.audit.files import AuditLines, Line, numbered, sync_file
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
from relay.cli.options import AsJson, StateDir, listing, seconds, state_files
from relay.cli.remote_server import own_records
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from schemas.error_roots import StateError
from schemas.files import os_error_text
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


def audits_at(places: Iterable[Path]) -> list[Audit]:
    """Return the audits at ``places``: directories, of a relay's state or with an audit, or newest files."""
    found = []
    for place in places:
        path = place if place.suffix == _SUFFIX else StateFiles(place).audit
        found.append(Audit(str(place), path, path.with_name(f"{path.stem}-verified.json")))
    return found


def verify_several(audits: Sequence[Audit], *, accept_loss: bool, as_json: bool) -> int:
    """Verify each of ``audits``, print one table, and return the exit code: 1 before 4 before 0."""
    codes, facts = set(), []
    for audit in audits:
        report, result = _verified(audit, accept_loss=accept_loss)
        codes.add(_exit_code(report))
        found = {} if report is None else {"intact": report.intact, **asdict(report)}
        facts.append({"audit": audit.name, "result": result, **found})
    listing(facts, ("AUDIT", "LINES", "FIRST", "LAST", "HEAD", "RESULT"), _row, as_json=as_json)
    return EXIT_NO if EXIT_NO in codes else max(codes, default=0)


def _verified(audit: Audit, *, accept_loss: bool) -> tuple[ChainReport | None, str]:
    """Return what was found of one audit, also in a few words."""
    try:
        last = None if accept_loss else read_verified_head(audit.verified)
        report = verify(audit.path, last=last)
    except (StateError, OSError) as error:
        text = os_error_text(error) if isinstance(error, OSError) else str(error)
        return None, f"NOT READ: {printable(text)}"
    if report.broken is not None:
        return report, f"BROKEN: {report.broken.file} line {report.broken.line}"
    if not report.intact:
        return report, "LINES LOST since the last verification"
    _keep_head(audit, report, f"{audit.name}: the head is not kept")
    return report, "intact"


def _exit_code(report: ChainReport | None) -> int:
    if report is None or not report.holds:
        return EXIT_NO
    return 0 if report.intact else EXIT_LOST


def _keep_head(audit: Audit, report: ChainReport, failure: str) -> None:
    """Keep the newest line for the next verification; in an archive that is read only, the result counts."""
    try:
        with suppress(FileNotFoundError):  # full files are synced
            sync_file(audit.path)  # else a power cut that takes the line would look as if it had been cut off
        keep_verified_head(audit.verified, report.head, now_ms())
    except OSError as error:
        typer.echo(f"relay: {failure}: {printable(os_error_text(error))}", err=True)


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    first, last = (
        "-" if found.get(name) is None else moment(found[name]) for name in ("first_ms", "last_ms")
    )
    head = found.get("head", "-")[:_HEAD_DIGITS]
    return (found["audit"], str(found.get("lines", "-")), first, last, head, found["result"])


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
            found = matching(lines.read(), wanted, since_ms, ids)
            streams.append(((name, line, facts) for name, (line, facts) in zip(repeat(audit.name), found)))
        yield from merge(*streams, key=lambda found: time_of(found[2]))


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
    noted: Annotated[
        str | None,
        typer.Option(metavar="DURATION|TIME", help="When it was noted, if its file may have been removed."),
    ] = None,
    accept_loss: Annotated[
        bool,
        typer.Option("--accept-loss", help="Accept that lines of the last run are missing."),
    ] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Verify the hashes. Exit 0 if all is intact, 1 if not, 4 if the line that was newest last time is lost.

    Of several, each is verified by itself; the exit code is that of the worst.
    """
    if noted is not None and expect is None:
        fail("--noted says when the hash of --expect was noted: name that too", EXIT_USAGE)
    if places:
        if expect is not None:
            fail("--expect is a line of one audit: leave out the others", EXIT_USAGE)
        code = verify_several(audits_at(places), accept_loss=accept_loss, as_json=as_json)
        if code:
            raise SystemExit(code)
        return
    if expect is not None and HASH_FORM.fullmatch(expect) is None:
        fail("--expect is the 64 hexadecimal digits of a line's hash", EXIT_USAGE)
    noted_ms = None if noted is None else _moment_ms(noted)
    _verify_own(state_files(state_dir), expect, noted_ms, accept_loss=accept_loss, as_json=as_json)


def _verify_own(
    files: StateFiles, expect: str | None, noted_ms: int | None, *, accept_loss: bool, as_json: bool
) -> None:
    last = None if accept_loss else read_verified_head(files.audit_verified)
    progress = _Progress(files.audit, time.monotonic)
    try:
        report = verify(files.audit, expect, progress, last=last, noted_ms=noted_ms)
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
    if code := _exit_code(report):
        raise SystemExit(code)
    own = Audit("", files.audit, files.audit_verified)
    _keep_head(own, report, "the head is not kept for the next time")


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
            typer.echo(json.dumps({**facts, "audit": name}))
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
