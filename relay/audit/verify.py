"""What the audit tells afterwards: whether its chain holds, and the lines that somebody asks for.

Must not believe what it reads: whoever can write the files can write anything into them.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relay.audit.chain import GENESIS, MAX_LINE_BYTES, line_hash, named, opening
from relay.audit.line_reader import AuditLines, Line

HASH_FORM = re.compile("[0-9a-f]{64}")
FIELDS = (
    *("ts_ms", "correlation_id", "tenant", "iss", "sub", "jti", "tool", "node_id"),
    *("decision", "outcome", "code", "duration_ms"),
    *("event", "source", "reason", "count", "kid", "join_id"),
)
"""What a line of a relay can hold, besides its link."""

_LINES_A_REPORT = 4096


def parsed(data: bytes) -> dict[str, Any] | None:
    """Return the facts in a line, or nothing if it holds none."""
    try:
        facts = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return facts if isinstance(facts, dict) else None


@dataclass(frozen=True, slots=True)
class Place:
    """A line, and what there is to say about it."""

    file: str
    line: int
    text: str


@dataclass(slots=True)
class ChainReport:
    """What a walk along the chain found.

    Attributes:
        head: the hash of the newest line.
        after: the file that the oldest one continues, if older ones were taken away.
        broken: the first line that does not belong where it stands.
        breaks: how many there are.
        torn: pieces of lines that a full disk cut short; they count as lines.
        backwards: how often a line is older than the one before it: a clock was set back.
        unfinished: whether the newest line has no end yet.
        expected: whether the hash that was asked for is that of a line; nothing if none was.
        last_verified: the same of the hash that was the newest at the last verification.
    """

    files: list[str] = field(default_factory=list)
    lines: int = 0
    first_ms: int | None = None
    last_ms: int | None = None
    head: str = GENESIS
    after: str | None = None
    broken: Place | None = None
    breaks: int = 0
    torn: int = 0
    first_torn: Place | None = None
    backwards: int = 0
    first_backwards: Place | None = None
    unfinished: bool = False
    expected: bool | None = None
    last_verified: bool | None = None

    @property
    def holds(self) -> bool:
        """Whether the chain holds, and the line that was asked for stands in it."""
        return self.broken is None and self.expected is not False

    @property
    def intact(self) -> bool:
        """Whether it holds, and the line that was verified last stands in it too."""
        return self.holds and self.last_verified is not False


def verify(
    path: Path,
    expect: str | None = None,
    progress: Callable[[int], None] = lambda _: None,
    *,
    last: str | None = None,
) -> ChainReport:
    """Walk the audit from the oldest line that is there; ``progress`` is told how many bytes were read.

    A line that was changed, taken out, put in or moved breaks the chain where it stood. Lines cut off at the
    end break nothing: that they are missing shows only by ``expect``, a hash that was noted earlier, and
    by ``last``, the newest hash of the last verification.

    Raises:
        FileNotFoundError: there is no audit.
    """
    lines = AuditLines(path)
    try:
        walk = _Walk(expect, last)
        for count, line in enumerate(lines.read()):
            walk.take(line)
            if count % _LINES_A_REPORT == 0:
                progress(lines.bytes_read)
        walk.compare()
        walk.report.files = lines.files
        walk.report.unfinished = lines.unfinished
        return walk.report
    finally:
        lines.close()


class _Walk:
    """Holds each line against the one before."""

    def __init__(self, expect: str | None, last: str | None) -> None:
        self.report = ChainReport(
            expected=None if expect is None else False, last_verified=None if last is None else False
        )
        self._expect = expect
        self._last = last
        self._linked = False  # whether a line was met that names another

    def take(self, line: Line) -> None:
        report = self.report
        facts, names = parsed(line.data), named(line.data)
        if names and not self._linked and names != report.head and facts and "after" in facts:
            # The oldest file that is there was not the first: what it follows is taken on its word.
            report.head, report.after = names, str(facts["after"] or "a file that was moved away")
        self._linked = self._linked or names is not None
        self.compare()
        if fault := _fault(line, report.head, facts):
            report.broken = report.broken or Place(line.file, line.number, fault)
            report.breaks += 1
        elif facts is None:
            report.first_torn = report.first_torn or Place(line.file, line.number, "cut short")
            report.torn += 1
        report.lines += 1
        report.head = line_hash(report.head, line.data)
        self._note_time(line, facts)

    def compare(self) -> None:
        """See whether the newest hash is one that was asked for."""
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
            report.first_backwards = report.first_backwards or Place(
                line.file, line.number, f"{report.last_ms - moment} ms before the line above it"
            )
            report.backwards += 1
        report.first_ms = moment if report.first_ms is None else report.first_ms
        report.last_ms = moment


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
    lines: Iterator[Line], wanted: Mapping[str, str], since_ms: int | None
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Yield the lines, and the facts in them, whose values read as ``wanted`` and that are not older."""
    for line in lines:
        facts = parsed(line.data)
        if facts is None:
            continue
        moment = facts.get("ts_ms")
        if since_ms is not None and not (isinstance(moment, int) and moment >= since_ms):
            continue
        if all(name in facts and as_text(facts[name]) == value for name, value in wanted.items()):
            yield line, facts


def as_text(value: Any) -> str:
    """Return ``value`` as a person types it: a string without quotes, anything else as JSON has it."""
    return value if isinstance(value, str) else json.dumps(value)
