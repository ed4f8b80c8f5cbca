"""``linux.journal``: lines of the journal, the newest first.

Must not let a text leave the node that has not been redacted.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

from kubelet.handlers.base import HandlerFactory, ToolFault
from kubelet.handlers.machine import (
    LONGEST_OUTPUT,
    MOST_BYTES,
    LinuxHandler,
    LinuxMachine,
    Printed,
    fitting,
    lacks_systemd,
)
from kubelet.handlers.redaction import redacted
from kubelet.handlers.systemd import is_unit_name, journal_is_readable, unit
from schemas.text import free_text

USUAL_LINES = 50
LONGEST_TEXT = 4096
SEARCH_S = 4.0
LAST_LINES, LAST_S = 10, 1.0
"""Of the log of a unit, beside what systemd says of it, which may take its time too."""
_FIELDS = "MESSAGE,PRIORITY,_PID,_SYSTEMD_UNIT,UNIT,SYSLOG_IDENTIFIER"
_WHOLE_TEXTS = "--all"
"""Without it a text of more than 4096 bytes is left out."""
_JOURNALCTL = (
    "journalctl", "--quiet", "--no-pager", "--reverse", "--output=json", _WHOLE_TEXTS,
    f"--output-fields={_FIELDS}",
)  # fmt: skip
_MANAGER = "1"
_UNIT_FIELDS = ("_SYSTEMD_UNIT", "UNIT")
_MOST_UNITS = 4096
_NO_UNIT = ""
"""What a line of the kernel is of: a pattern of the owner allows it only if it allows everything."""
_PRIORITY = re.compile(r"[0-7]")
_CURSOR = re.compile(r"[A-Za-z0-9=;_-]{1,512}")


class JournalHandler(LinuxHandler):
    """Answers with what ``journalctl`` prints."""

    @property
    def missing(self) -> str | None:
        """That systemd does not run."""
        return lacks_systemd(self.machine)

    @property
    def lacks(self) -> str | None:
        """That this process may not read the journal."""
        if journal_is_readable(self.machine):
            return None
        return "no journal can be read: that takes the group systemd-journal"

    async def get(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the newest lines that match, at most as many as are asked for and fit into one answer.

        Raises:
            ToolFault: a fault of the row.
            OutsideCeilingError: the board's owner does not allow the unit, whether there is one or not.
        """
        number = arguments.get("lines", USUAL_LINES)
        command = [*_JOURNALCTL, f"--lines={number + 1}"]
        is_limited, withheld = self.ceiling.of("linux.journal").restricts("units"), 0
        if "unit" in arguments:
            named = await unit(self.machine, arguments["unit"], partial(self.check_allowed, "units"))
            matches = _of_units([named.name]) if is_limited else [f"--unit={named.name}"]
        else:
            matches, withheld = await self._allowed() if is_limited else ([], 0)
        since_ms = arguments.get("since_ms", 0)
        # journalctl fails where the one is after the other.
        is_empty = since_ms > arguments.get("until_ms", since_ms)
        if is_empty or (is_limited and not matches):
            return {"lines": [], "withheld": withheld, "complete": True, "next": None}
        if "priority" in arguments:
            command.append(f"--priority={arguments['priority']}")
        if "boot" in arguments:
            command.append(f"--boot={arguments['boot']}")
        # journalctl refuses it beside a cursor; what is older is left out of the answer then.
        if "since_ms" in arguments and "cursor" not in arguments:
            command.append(f"--since=@{since_ms / 1000:.3f}")
        if "until_ms" in arguments:
            command.append(f"--until=@{arguments['until_ms'] / 1000:.3f}")
        if "search" in arguments:
            command += [f"--grep={re.escape(arguments['search'])}", "--case-sensitive=true"]
        after = [f"--after-cursor={arguments['cursor']}"] if "cursor" in arguments else []
        may_fail = not {"search", "boot"}.isdisjoint(arguments)
        printed = await _read(self.machine, [*command, *after, *matches], SEARCH_S, may_fail=may_fail)
        if printed.code and after:
            # With a malformed cursor it ends with 1 too: by itself one is seen for what it is.
            await _read(self.machine, [*_JOURNALCTL, "--lines=1", *after], SEARCH_S)
        # On a thread: megabytes are parsed, and all that is shown is searched for secrets.
        answer = await self.calls.run(lambda: _answer(printed, number, since_ms))
        return {"withheld": withheld, **answer}

    async def _allowed(self) -> tuple[list[str], int]:
        """Return what limits journalctl to the lines of allowed units, and how many units there are besides.

        journalctl itself leaves out the others' lines: whether a search finds something in them must not be
        seen, neither in a number nor in a page.
        """
        printed = await asyncio.gather(
            *(self.machine.printed("journalctl", f"--field={each}", "--quiet") for each in _UNIT_FIELDS)
        )
        names = sorted(filter(is_unit_name, {name for text in printed for name in text.split("\n")}))
        allowed = [name for name in names if self.allows("units", name)][:_MOST_UNITS]
        matches = _of_units(allowed)
        if self.allows("units", _NO_UNIT):
            matches += ["+"] if matches else []
            matches.append("_TRANSPORT=kernel")
        return matches, len(names) - len(allowed)


def _of_units(names: Sequence[str]) -> list[str]:
    """Return the matches of journalctl for lines of ``names`` alone: ``--unit`` adds those within a slice.

    Of what a line says of itself only journald's own fields count, and UNIT where the manager wrote it.
    """
    own = [f"_SYSTEMD_UNIT={name}" for name in names]
    return [*own, "+", f"_PID={_MANAGER}", *(f"UNIT={name}" for name in names)] if names else []


async def last_lines(machine: LinuxMachine, unit_name: str, *, is_limited: bool) -> list[dict[str, Any]]:
    """Return the last lines of a unit's log, the newest first, for an answer about the unit.

    ``is_limited``: without those of other units, which its owner may not allow.

    Raises:
        ToolFault: the journal cannot be read.
    """
    matches = _of_units([unit_name]) if is_limited else [f"--unit={unit_name}"]
    command = [*_JOURNALCTL, f"--lines={LAST_LINES}", *matches]
    printed = await _read(machine, command, LAST_S)
    entries = await asyncio.to_thread(_entries, printed.text)
    lines = map(_line, entries[:LAST_LINES])
    return [{member: line[member] for member in ("at_ms", "priority", "text")} for line in lines]


async def _read(
    machine: LinuxMachine, command: Sequence[str], within_s: float, *, may_fail: bool = False
) -> Printed:
    """Return what journalctl prints in time. ``may_fail``: with nothing found it ends with 1, as grep does.

    Raises:
        ToolFault: ``program_missing``, ``program_failed`` or ``journal_unreadable``.
    """
    try:
        printed = await machine.run(command, LONGEST_OUTPUT, within_s)
        if "\n" not in printed.text and len(printed.text.encode()) >= LONGEST_OUTPUT:
            # Nothing would be known of this line, nor of all that is older: not even a cursor.
            shorter = [each for each in command if each != _WHOLE_TEXTS]
            printed = await machine.run(shorter, LONGEST_OUTPUT, within_s)
    except (OSError, RuntimeError) as error:  # the latter as in ``LinuxMachine.printed``
        raise ToolFault("program_missing", str(error)) from error
    # It ends with 1 too where it may read nothing.
    is_readable = not printed.code or journal_is_readable(machine)
    if printed.code and not (printed.code == 1 and may_fail and is_readable):
        code = "program_failed" if is_readable else "journal_unreadable"
        raise ToolFault(code, f"journalctl ends with {printed.code}")
    return printed


def _answer(printed: Printed, number: int, since_ms: int) -> dict[str, Any]:
    found = _entries(printed.text)
    entries = list(takewhile(lambda each: _at_ms(each) >= since_ms, found))
    is_last = len(entries) < len(found)  # what follows is older than what is asked for
    complete = is_last or printed.code is not None
    lines = fitting(map(_line, _searched(entries[:number])))
    cursor = entries[len(lines) - 1].get("__CURSOR") if lines else None
    # Counted by what was printed: one of these may be no entry.
    is_cut = printed.text.count("\n") > number or not complete
    more = len(entries) > len(lines) or (is_cut and not is_last)
    continued = cursor if more and isinstance(cursor, str) and _CURSOR.fullmatch(cursor) else None
    return {"lines": lines, "complete": complete, "next": continued}


def _searched(entries: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the first of ``entries`` that have together no more to search for secrets than one answer shows.

    A long text that is a secret costs a search, and has next to nothing in the answer.
    """
    left = MOST_BYTES
    for entry in entries:
        left -= min(len(_message(entry)), LONGEST_TEXT)
        if left < 0:
            return
        yield entry


def _entries(text: str) -> list[dict[str, Any]]:
    """Return the entries of ``text``; a line that was cut by the limit is left out."""
    found = []
    for line in text.split("\n"):  # a text may have other characters that end a line
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(entry, dict) and "__REALTIME_TIMESTAMP" in entry:
            found.append(entry)
    return found


def _line(entry: Mapping[str, Any]) -> dict[str, Any]:
    priority = _text(entry.get("PRIORITY"))
    return {
        "at_ms": _at_ms(entry),
        "unit": _unit(entry),
        "program": _text(entry.get("SYSLOG_IDENTIFIER")) or None,
        "priority": int(priority) if _PRIORITY.fullmatch(priority) else None,
        "text": free_text(redacted(_message(entry), LONGEST_TEXT), LONGEST_TEXT),
    }


def _unit(entry: Mapping[str, Any]) -> str | None:
    """Return the unit that wrote a line; of one by the manager, the unit that it is about.

    Any program may write UNIT. Fields that begin with an underscore are journald's own.
    """
    about = _text(entry.get("UNIT")) if entry.get("_PID") == _MANAGER else ""
    return about or _text(entry.get("_SYSTEMD_UNIT")) or None


def _message(entry: Mapping[str, Any]) -> str:
    """Return the text of a line; journalctl prints null where it leaves that out."""
    message = entry.get("MESSAGE", "")
    return "[cut]" if message is None else _text(message)


def _at_ms(entry: Mapping[str, Any]) -> int:
    return int(_text(entry["__REALTIME_TIMESTAMP"])) // 1000


def _text(value: object) -> str:
    """Return a field as text: journalctl prints bytes that are no UTF-8, and several values, as a list."""
    if isinstance(value, list):
        if value and all(isinstance(each, int) and 0 <= each <= 255 for each in value):  # noqa: PLR2004 - bytes
            return bytes(value).decode("utf-8", "replace")
        return _text(value[0]) if value else ""
    return value if isinstance(value, str) else ""


HANDLER: HandlerFactory = JournalHandler
