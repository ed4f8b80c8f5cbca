"""Reads units of systemd by the names of their properties, as ``systemctl show`` prints them.

Must not read a column of a table that is made for people: their order and width change between releases.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from kubelet.handlers.base import ToolFault
from kubelet.handlers.machine import LinuxMachine
from kubelet.handlers.redaction import redacted

_NAME = re.compile(r"[A-Za-z0-9:_.@\\][A-Za-z0-9:_.@\\-]{0,254}")
_UNSET = frozenset({"", "[not set]", str(2**64 - 1)})

LISTED = (
    "Id",
    "ActiveState",
    "SubState",
    "Result",
    "NRestarts",
    "StateChangeTimestampMonotonic",
)
DETAILS = (
    *LISTED,
    "LoadState",
    "Description",
    "UnitFileState",
    "ExecMainStatus",
    "MainPID",
    "MemoryCurrent",
    "CPUUsageNSec",
    "TasksCurrent",
    "FragmentPath",
    "DropInPaths",
)


class Unit(NamedTuple):
    """One unit. ``changed_us`` is when it came into its state, in microseconds since the boot; 0 if never."""

    name: str
    state: str
    sub: str
    result: str | None
    restarts: int | None
    changed_us: int
    properties: Mapping[str, str]


def journal_is_readable(machine: LinuxMachine) -> bool:
    """Return whether this process may read the journal of the system."""
    journals = (machine.matching(f"/{place}/log/journal", "*/system.journal") for place in ("var", "run"))
    return any(os.access(each, os.R_OK) for found in journals for each in found)


def is_unit_name(text: str) -> bool:
    """Return whether ``text`` has systemd's own characters alone, and no secret of a known form."""
    return _NAME.fullmatch(text) is not None and redacted(text) == text


def number(properties: Mapping[str, str], name: str) -> int | None:
    """Return a property that is a number; None if systemd does not know it."""
    text = properties.get(name, "")
    return None if text in _UNSET or not text.isdecimal() else int(text)


async def units(machine: LinuxMachine, *patterns: str, properties: tuple[str, ...] = LISTED) -> list[Unit]:
    """Return the loaded units that match ``patterns``, sorted by name; a full name is loaded if need be.

    A unit whose name has other characters than systemd's own, or a secret, is left out.

    Raises:
        ToolFault: systemd does not answer.
    """
    printed = await machine.printed(
        "systemctl", "show", "--all", "--no-pager", f"--property={','.join(properties)}", "--", *patterns
    )
    found = {block["Id"]: _unit(block) for block in _blocks(printed) if is_unit_name(block.get("Id", ""))}
    return [found[name] for name in sorted(found)]


async def unit(machine: LinuxMachine, name: str, check: Callable[[str], None]) -> Unit:
    """Return the unit called ``name``, or that this is another name of.

    ``check`` gets its canonical name, or ``name`` where there is no such unit, and may raise.

    Raises:
        ToolFault: there is none (``no_such_unit``), or systemd does not answer.
    """
    found = await units(machine, name, properties=DETAILS)
    check(found[0].name if found else name)
    if not found or found[0].properties.get("LoadState") == "not-found":
        raise ToolFault("no_such_unit", name)
    return found[0]


def _blocks(text: str) -> Iterator[dict[str, str]]:
    for block in text.split("\n\n"):
        pairs = (line.partition("=") for line in block.split("\n"))
        yield {name: value for name, equals, value in pairs if equals}


def _unit(properties: Mapping[str, str]) -> Unit:
    return Unit(
        properties["Id"],
        properties.get("ActiveState", ""),
        properties.get("SubState", ""),
        properties.get("Result") or None,
        number(properties, "NRestarts"),
        number(properties, "StateChangeTimestampMonotonic") or 0,
        properties,
    )
