"""Verifies the chain of an audit, searches its lines, and keeps the head of the last verification.

The kept head shows that lines were cut off, or a file lost, since the last verification on this machine. A
process that can write the audit can write that too: only a head kept elsewhere protects from it.
Must not trust what it reads: the files may contain anything.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from relay.audit.files import GENESIS, MAX_LINE_BYTES, AuditLines, Line, line_hash, named, opening
from relay.audit.retention import REMOVED_EVENT
from schemas.error_roots import StateError
from schemas.files import read_state, write_atomic
from schemas.strict_json import StrictJsonError, loads

HASH_FORM = re.compile("[0-9a-f]{64}")
FIELDS = (
    *("ts_ms", "correlation_id", "tenant", "iss", "sub", "jti", "tool", "node_id"),
    *("decision", "outcome", "code", "duration_ms"),
    *("event", "source", "reason", "count", "failed", "kid", "join_id", "parent", "first"),
    *("caller_correlation_id", "request_id", "session_id", "caller_id"),
    *("file", "head", "until_ms"),
)
"""The members that a line of a relay can have, besides its link."""
IDS = ("correlation_id", "caller_correlation_id", "remote_correlation_id", "parent", "first")
"""The members by which a line, of a relay or of remote tools, names its call and those that it belongs to."""
_LINES_PER_PROGRESS = 4096
_MAX_HEAD_BYTES = 1024


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON, though Python reads it")


def parsed(data: bytes) -> dict[str, Any] | None:
    """Return the facts in a line; None if it holds none."""
    try:
        facts = json.loads(data, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


@dataclass(frozen=True, slots=True)
class LineFinding:
    """A line, and what was found about it."""

    file: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class RemovedFile:
    """A file that the relay has removed when it was old: what its line says, and that line's time."""

    file: str
    head: str
    until_ms: int
    removed_ms: int


@dataclass(slots=True)
class ChainReport:
    """What a verification of the chain found.

    Attributes:
        head: the hash of the newest line.
        after: the file that the oldest one continues, if older ones were taken away.
        broken: the first line that does not follow the one before it.
        breaks: how many there are.
        torn: pieces of lines that a full disk cut short; they count as lines.
        backwards: how often a line is older than the one before it: a clock was set back.
        unfinished: whether the newest line has no end yet.
        expected: whether the expected hash is that of a line; None if none was given.
        last_verified: the same for the newest hash of the last verification.
        removed: the files that the relay has removed, and that are not here.
        expected_removed_ms: when the expected hash was removed with its file; None if it was not.
        last_removed_ms: the same for the newest hash of the last verification.
    """

    files: list[str] = field(default_factory=list)
    lines: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    head: str = GENESIS
    after: str | None = None
    broken: LineFinding | None = None
    breaks: int = 0
    torn: int = 0
    first_torn: LineFinding | None = None
    backwards: int = 0
    first_backwards: LineFinding | None = None
    unfinished: bool = False
    expected: bool | None = None
    last_verified: bool | None = None
    removed: list[RemovedFile] = field(default_factory=list)
    expected_removed_ms: int | None = None
    last_removed_ms: int | None = None

    @property
    def holds(self) -> bool:
        return self.broken is None and (self.expected is not False or self.expected_removed_ms is not None)

    @property
    def intact(self) -> bool:
        """Whether it holds, and contains the newest line of the last verification."""
        return self.holds and (self.last_verified is not False or self.last_removed_ms is not None)


def verify(
    path: Path,
    expect: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    last: "VerifiedHead | None" = None,
    noted_ms: int | None = None,
) -> ChainReport:
    """Verify the audit from its oldest line on; ``progress`` is called with the number of bytes read.

    A line that was changed, removed, inserted or moved breaks the chain at its place. Lines cut off at the
    end break nothing: that they are missing shows only by ``expect``, a hash that was noted earlier, at
    ``noted_ms`` if that is known, and by ``last``, the newest hash of the last verification. Neither can be
    here if its file was removed as the audit says; then the oldest file must continue from the head there.

    Raises:
        FileNotFoundError: there is no audit.
    """
    lines = AuditLines(path)
    try:
        verification = _Verification(expect, last.head if last else None)
        for count, line in enumerate(lines.read()):
            verification.take(line)
            if count % _LINES_PER_PROGRESS == 0:
                progress(lines.bytes_read)
        verification.compare()
        verification.report.files = lines.files
        verification.report.unfinished = lines.unfinished
        verification.judge_removals(noted_ms, last)
        return verification.report
    finally:
        lines.close()


class _Verification:
    """Compares each line with the one before."""

    def __init__(self, expect: str | None, last: str | None) -> None:
        self.report = ChainReport(
            expected=None if expect is None else False, last_verified=None if last is None else False
        )
        self._expect = expect
        self._last = last
        self._linked = False  # whether a line was read that names another
        self._begins: LineFinding | None = None  # where the oldest file continues one that is not here
        self._continues = ""

    def take(self, line: Line) -> None:
        report = self.report
        facts, names = parsed(line.data), named(line.data)
        if names and not self._linked and names != report.head and facts and "after" in facts:
            # The oldest file here was not the first: the hash that it names cannot be verified.
            report.head, report.after = names, str(facts["after"] or "a file that was moved away")
            self._continues = names
            text = "does not continue from the head under which the file before it was removed"
            self._begins = LineFinding(line.file, line.number, text)
        if facts and facts.get("event") == REMOVED_EVENT and (removed := _removed(facts)) is not None:
            report.removed.append(removed)
        self._linked = self._linked or names is not None
        self.compare()
        if fault := _fault(line, report.head, facts):
            report.broken = report.broken or LineFinding(line.file, line.number, fault)
            report.breaks += 1
        elif facts is None:
            report.first_torn = report.first_torn or LineFinding(line.file, line.number, "cut short")
            report.torn += 1
        report.lines += 1
        report.head = line_hash(report.head, line.data)
        self._note_time(line, facts)

    def judge_removals(self, noted_ms: int | None, last: "VerifiedHead | None") -> None:
        """Compare what is here with what the audit says was removed."""
        report = self.report
        report.removed = [each for each in report.removed if each.file not in report.files]
        before = next((each for each in reversed(report.removed) if each.file == report.after), None)
        if self._begins is not None and before is not None and before.head != self._continues:
            report.broken, report.breaks = self._begins, report.breaks + 1
        if report.expected is False and self._expect is not None:
            report.expected_removed_ms = self._removed_ms(self._expect, noted_ms)
        if report.last_verified is False and last is not None:
            report.last_removed_ms = self._removed_ms(last.head, last.verified_at_ms)

    def _removed_ms(self, head: str, noted_ms: int | None) -> int | None:
        """Return when the line of ``head`` was removed: with a file in which it was last, or was followed."""
        for each in self.report.removed:
            if each.head == head or (noted_ms is not None and noted_ms <= each.until_ms):
                return each.removed_ms
        return None

    def compare(self) -> None:
        if self.report.head == self._expect:
            self.report.expected = True
        if self.report.head == self._last:
            self.report.last_verified = True

    def _note_time(self, line: Line, facts: Mapping[str, Any] | None) -> None:
        report = self.report
        moment = facts.get("ts_ms") if facts else None
        if type(moment) is not int:
            return
        if report.last_ms is not None and moment < report.last_ms:
            report.first_backwards = report.first_backwards or LineFinding(
                line.file, line.number, f"{report.last_ms - moment} ms before the line above it"
            )
            report.backwards += 1
        report.first_ms = moment if report.first_ms is None else report.first_ms
        report.last_ms = moment


def _removed(facts: Mapping[str, Any]) -> RemovedFile | None:
    file, head, until_ms, at_ms = (facts.get(name) for name in ("file", "head", "until_ms", "ts_ms"))
    if isinstance(file, str) and isinstance(head, str) and type(until_ms) is int and type(at_ms) is int:
        return RemovedFile(file, head, until_ms, at_ms)
    return None


def _fault(line: Line, prev: str, facts: Mapping[str, Any] | None) -> str | None:
    """Return what is wrong with a line that should follow the one whose hash is ``prev``."""
    if line.overlong:
        return f"is longer than {MAX_LINE_BYTES} bytes: no relay wrote it"
    start = opening(prev)
    if line.data and line.data.startswith(start[: len(line.data)]):
        return None
    if named(line.data) is None:
        return "is damaged, or no relay wrote it"
    if prev == GENESIS:
        return "is not the first that was written: lines before it were cut off"
    if line.number == 1 and facts and "after" in facts:
        return f"does not follow the file before it: it was begun after {facts['after']}"
    return "does not follow the line before it: one of them was changed, or lines were taken out or put in"


def matching(
    lines: Iterator[Line],
    wanted: Mapping[str, str],
    since_ms: int | None,
    ids: Collection[str] | None = None,
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield the lines with their facts that have the values ``wanted``, one of ``ids``, and are not older."""
    for line in lines:
        facts = parsed(line.data)
        if facts is None:
            continue
        if since_ms is not None and time_of(facts) < since_ms:
            continue
        if ids is not None and not any(name in ids for name in ids_in(facts)):
            continue
        if all(name in facts and as_text(facts[name]) == value for name, value in wanted.items()):
            yield line, facts


def ids_in(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the correlation ids that a line names."""
    for name in IDS:
        if isinstance(value := facts.get(name), str):
            yield value


def time_of(facts: Mapping[str, Any]) -> int:
    """Return when a line of a relay, or a record of remote tools, was written; 0 if it does not say."""
    moment = facts.get("ts_ms", facts.get("time_ms"))
    return moment if isinstance(moment, int) else 0


def as_text(value: Any) -> str:
    """Return ``value`` as a person types it: a string without quotes, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)


class VerifiedHeadError(StateError):
    """The kept head is damaged."""


@dataclass(frozen=True, slots=True)
class VerifiedHead:
    """The hash of the line that was the newest, and when that was."""

    head: str
    verified_at_ms: int


def read_verified_head(path: Path) -> VerifiedHead | None:
    """Return what was kept in ``path``; None if nothing was verified yet.

    Raises:
        VerifiedHeadError: it is damaged.
        OSError: it cannot be read.
    """
    try:
        data = read_state(path, _MAX_HEAD_BYTES)
    except FileNotFoundError:
        return None
    try:
        facts = loads(data, max_bytes=_MAX_HEAD_BYTES)
        return VerifiedHead(str(facts["head"]), int(facts["verified_at_ms"]))
    except (StrictJsonError, ValueError, KeyError, TypeError):
        raise VerifiedHeadError(
            f"{path} is damaged: look whether lines are missing, then remove it"
        ) from None


def keep_verified_head(path: Path, head: str, now_ms: int) -> None:
    """Keep ``head`` in ``path``.

    Raises:
        OSError: it cannot be written.
    """
    if head != GENESIS:  # an audit without a line can lose none
        write_atomic(path, json.dumps(asdict(VerifiedHead(head, now_ms))) + "\n")
