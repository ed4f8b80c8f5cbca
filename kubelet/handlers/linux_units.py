"""``linux.units``: the units of systemd, and one of them in detail.

Must not start, stop or change one.
"""

from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from kubelet.handlers.base import HandlerFactory, ToolFault
from kubelet.handlers.linux_journal import last_lines
from kubelet.handlers.machine import LinuxHandler, lacks_systemd, page
from kubelet.handlers.redaction import redacted
from kubelet.handlers.systemd import Unit, number, unit, units

USUAL_LINES = 50
_MOST_FILES = 33


class UnitsHandler(LinuxHandler):
    """Answers with what systemd knows."""

    @property
    def missing(self) -> str | None:
        """That systemd does not run."""
        return lacks_systemd(self.machine)

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a page of the loaded units that match."""
        state, suffix = arguments.get("state"), f".{arguments.get('type', '')}"
        pattern = arguments.get("pattern", "*")
        # systemd's own patterns have more than * and ?, so names are compared here.
        found = await units(self.machine, "*")
        allowed = [each for each in found if self.allows("units", each.name)]
        matching = [
            each
            for each in allowed
            if state in (None, each.state)
            and (suffix == "." or each.name.endswith(suffix))
            and fnmatchcase(each.name, pattern)
        ]
        shown, following = page(matching, arguments.get("start", 0), arguments.get("limit", USUAL_LINES))
        return {
            "total": len(matching),
            "withheld": len(found) - len(allowed),
            "units": [self._listed(each) for each in shown],
            "next": following,
        }

    async def get(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return one unit, with the last lines of its log where the node shows logs, and this one.

        The relay leaves them out for an agent whose token is not for logs.

        Raises:
            ToolFault: ``no_such_unit``, or systemd does not answer.
            OutsideCeilingError: the board's owner does not allow it, whether there is one or not.
        """
        found = await unit(self.machine, arguments["unit"], partial(self.check_allowed, "units"))
        facts = found.properties
        files = f"{facts.get('FragmentPath', '')} {facts.get('DropInPaths', '')}"
        cpu_ns = number(facts, "CPUUsageNSec")
        log = {}
        if "linux.journal" in self.announced and self.ceiling.allows("linux.journal", "units", found.name):
            is_limited = self.ceiling.of("linux.journal").restricts("units")
            with suppress(ToolFault):  # the unit is known all the same
                log = {"log": await last_lines(self.machine, found.name, is_limited=is_limited)}
        return {
            **self._listed(found),
            **log,
            "description": facts.get("Description", ""),
            "loaded": facts.get("LoadState", ""),
            "enabled": facts.get("UnitFileState") or None,
            "exit_status": number(facts, "ExecMainStatus"),
            "main_pid": number(facts, "MainPID") or None,
            "memory_bytes": number(facts, "MemoryCurrent"),
            "cpu_ms": None if cpu_ns is None else cpu_ns // 1_000_000,
            "tasks": number(facts, "TasksCurrent"),
            "files": [{"path": path} for path in redacted(files).split()][:_MOST_FILES],
        }

    def _listed(self, each: Unit) -> dict[str, Any]:
        return {
            "unit": each.name,
            "state": each.state,
            "sub": each.sub,
            "result": each.result,
            "restarts": each.restarts,
            "since_ms": self.at_ms(each.changed_us) if each.changed_us else None,
        }


HANDLER: HandlerFactory = UnitsHandler
