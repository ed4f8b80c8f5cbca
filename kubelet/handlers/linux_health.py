"""``linux.health``: what is wrong with this machine now, with the evidence for it.

Each source is looked at once for an answer, and the programs run at the same time: one that hangs costs its
own findings. Must not guess: what cannot be looked at is stated to be unavailable.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from kubelet.handlers.base import FindingSource, HandlerFactory, ToolFault
from kubelet.handlers.findings import (
    Ask,
    Growth,
    HealthFinding,
    Look,
    heat_findings,
    load_findings,
    memory_findings,
    mounts,
    network_findings,
    space_findings,
    stated,
    storage_findings,
    unit_findings,
)
from kubelet.handlers.linux_packages import WaitingUpdates, reboot_reasons
from kubelet.handlers.machine import BlockingCalls, LinuxHandler, lacks_systemd
from kubelet.handlers.systemd import DETAILS, Unit, journal_is_readable, units
from schemas.error_roots import StateError
from schemas.files import read_state, write_atomic
from schemas.identity import first_certificate_in, validity_of
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.payloads import OpenFinding
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MOST = 200
INTERVAL_S = 60.0
_SEVERITIES = ("error", "warning", "info")
_MOST_COUNTED = 9999
_HOUR_US = 3_600_000_000
_DAY_MS = 86_400_000
_TIME_SERVICES = (
    "systemd-timesyncd.service",
    "chrony.service",
    "chronyd.service",
    "ntpsec.service",
    "ntp.service",
    "ntpd.service",
    "openntpd.service",
)
"""What sets the clock of a usual distribution: the service that runs, or else the first that is installed."""

_LISTS = MappingProxyType(
    {
        "unit_failed": "units",
        "unit_restarting": "units",
        "disk_nearly_full": "mounts",
        "inodes_nearly_full": "mounts",
        "filesystem_read_only": "mounts",
        "filesystem_errors": "disks",
        "storage_worn": "disks",
        "hot": "sensors",
        "under_voltage": "sensors",
        "link_flapping": "interfaces",
    }
)
"""The list of the ceiling that the subject of a finding is held to, by code; others have no subject."""


class Unavailable(NamedTuple):
    """What could not be looked at, why, and the group whose members can."""

    what: str
    why: str
    group: str | None = None


class HealthFound(NamedTuple):
    """The findings that the board's owner lets be seen, the worst first, and how many there are besides."""

    findings: list[HealthFinding]
    withheld: int
    unavailable: list[Unavailable]


class HealthHandler(LinuxHandler, FindingSource):
    """Answers with the findings of all checks, the worst first."""

    def prepare(self) -> None:
        self._growth = Growth()
        self._boot: BootRecord | None = None
        self._failed: set[str] = set()
        self._files, self._sensors, self._journal = BlockingCalls(1), BlockingCalls(1), BlockingCalls(1)

    @property
    def lacks(self) -> str | None:
        """That nothing is known of units and of the clock."""
        missing = lacks_systemd(self.machine)
        return missing and f"{missing}: it tells nothing of units and of the clock"

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - takes none
        """Return what is wrong now, and what could not be looked at."""
        found = await self.found()
        return {
            "findings": [each.shown() for each in found.findings[:MOST]],
            "total": len(found.findings),
            "withheld": found.withheld,
            "unavailable": [stated(each) for each in found.unavailable],
        }

    async def found(self) -> HealthFound:
        """Return what is wrong now, and what could not be looked at."""
        look = self._look()
        found = [*memory_findings(look), *load_findings(look)]
        unavailable = list(self._not_looked_at())
        sources = {
            "units": self._units(look),
            "storage": self._space(look),
            "clock": self._clock(),
            "files": self._of_files(look),
            "sensors": self._sensors.run(lambda: list(heat_findings(look))),
            "kernel_messages": self._kernel_messages(unavailable),
        }
        answers = await asyncio.gather(*sources.values(), return_exceptions=True)
        for what, answer in zip(sources, answers, strict=True):
            self._tell(what, answer)
            if isinstance(answer, ToolFault):
                unavailable.append(Unavailable(what, _why(what, answer)))
            elif isinstance(answer, Exception):
                unavailable.append(Unavailable(what, "no_answer"))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                found += answer
        found.sort(key=lambda each: (_SEVERITIES.index(each.severity), each.code, each.subject or ""))
        shown = [self._with_allowed_ask(each) for each in found if self._shows(each)]
        return HealthFound(shown, len(found) - len(shown), unavailable)

    def _tell(self, what: str, answer: object) -> None:
        """Log, once until it can be read again, that a disk or a driver has failed, or what reads it."""
        if not isinstance(answer, Exception) or isinstance(answer, ToolFault):
            self._failed.discard(what)
        elif what not in self._failed:
            self._failed.add(what)
            if isinstance(answer, OSError):
                self.log.warning("what is wrong is not known", what=what, reason=printable(str(answer)))
            else:
                self.log.error("what is wrong is not known", what=what, exc_info=answer)

    def _shows(self, finding: HealthFinding) -> bool:
        what = _LISTS.get(finding.code)
        return what is None or finding.subject is None or self.allows(what, finding.subject)

    def _with_allowed_ask(self, finding: HealthFinding) -> HealthFinding:
        """Return ``finding``, without an ``ask`` that the ceiling of its kind would refuse."""
        ask = finding.ask
        if ask is None or ask.unit is None or self.ceiling.allows(ask.kind, "units", ask.unit):
            return finding
        return finding._replace(ask=None)

    async def run(self) -> None:
        """Keep the record of this boot, and look every minute: what comes and goes is known, and reported."""
        self._begin()
        try:
            while True:
                self.on_findings(by_code((await self.found()).findings))
                self._keep_seen()
                await asyncio.sleep(INTERVAL_S)
        finally:
            self._end()

    def _look(self) -> Look:
        now_us = self.machine.monotonic_us()
        return Look(self.machine, self._growth, self._limits, now_us, self.at_ms, os.cpu_count() or 1)

    @property
    def _limits(self) -> Mapping[str, float]:
        """The thresholds that hold now: a reload may have changed them."""
        return self.ceiling.of("linux.health").thresholds

    def _begin(self) -> None:
        boot_id = self.machine.text("/proc/sys/kernel/random/boot_id")
        if self.own.state_dir is not None and boot_id:
            boot = BootRecord(self.own.state_dir, boot_id)
            try:
                boot.begin()
            except (OSError, StateError) as error:
                self.log.warning("how the last boot ended is not known", reason=printable(str(error)))
            else:
                self._boot = boot
                self._growth.seen = dict(boot.seen)

    def _keep_seen(self) -> None:
        if self._boot is not None and self._boot.seen != self._growth.seen:
            try:
                self._boot.keep(self._growth.seen)
            except OSError as error:
                self.log.warning("what the kernel counts will be news again", reason=printable(str(error)))

    def _end(self) -> None:
        if self._boot is not None:
            try:
                self._boot.end()
            except OSError as error:
                self.log.warning("the next boot will be called unclean", reason=printable(str(error)))

    def _last_boot(self, look: Look) -> Iterator[HealthFinding]:
        """Yield that the machine went down without stopping the daemon, in the first hours after it."""
        hours = look.limits["unclean_boot_h"]
        if self._boot is not None and self._boot.unclean and look.is_recent(0, hours):
            ask = Ask("linux.journal", "get")
            yield HealthFinding("last_boot_unclean", "warning", None, {}, ask, look.at_ms(0))

    def _certificate(self) -> Iterator[HealthFinding]:
        """Yield that this node's certificate was not renewed when it should have been."""
        if self.own.state_dir is None:
            return
        try:
            der = first_certificate_in(IdentityFiles(self.own.state_dir).leaf_pem())
            start, end = validity_of(der)
        except (OSError, ValueError, IdentityFilesError):
            return
        left_ms, limit = end - self.now_ms(), self._limits["certificate_left_pct"]
        if end > start and 100 * left_ms / (end - start) < limit:
            evidence = {"value": max(0, left_ms // 1000), "unit": "seconds"}
            severity = "error" if left_ms <= _DAY_MS else "warning"
            yield HealthFinding("certificate_ends", severity, None, evidence)

    def _updates(self) -> Iterator[HealthFinding]:
        """Yield that updates wait for long, by what linux.packages keeps."""
        pending = self._waiting_updates()
        if pending is None:
            return
        for since_ms, count, limit, severity in (
            (pending.security_since_ms, pending.security, "security_updates_days", "warning"),
            (pending.since_ms, pending.pending, "updates_days", "info"),
        ):
            if since_ms is not None and count and self.now_ms() - since_ms >= self._limits[limit] * _DAY_MS:
                evidence = {"value": count, "unit": "count"}
                yield HealthFinding(
                    "updates_pending", severity, None, evidence, Ask("linux.packages"), since_ms
                )
                return

    def _waiting_updates(self) -> WaitingUpdates | None:
        """Return what linux.packages keeps, while this node has that kind, which keeps it up to date."""
        if self.own.state_dir is None or "linux.packages" not in self.announced:
            return None
        return WaitingUpdates.read(self.own.state_dir)

    def _reboot(self) -> Iterator[HealthFinding]:
        reasons = reboot_reasons(self.machine, os.uname().release)
        if reasons is not None:
            evidence = {"value": len(reasons), "unit": "count"}
            yield HealthFinding("reboot_needed", "info", None, evidence, Ask("linux.packages"))

    def _not_looked_at(self) -> Iterator[Unavailable]:
        machine = self.machine
        if not machine.path("/proc/pressure/memory").exists():
            yield Unavailable("pressure", "not_supported")
        if machine.matching("/sys/block", "sd*") or machine.matching("/sys/block", "nvme*"):
            yield Unavailable("smart", "needs_group", "disk")
        if self._boot is None:
            yield Unavailable("last_boot", "not_permitted")
        if self._waiting_updates() is None:
            yield Unavailable("updates", "kind_not_enabled")

    async def _of_files(self, look: Look) -> Iterable[HealthFinding]:
        """Read what is, or may be, on a card: one that fails takes its time to say so."""
        return await self._files.run(
            lambda: [
                *storage_findings(look),
                *network_findings(look),
                *self._reboot(),
                *self._last_boot(look),
                *self._certificate(),
                *self._updates(),
            ]
        )

    async def _kernel_messages(self, unavailable: list[Unavailable]) -> Iterable[HealthFinding]:
        """Add to ``unavailable`` that the journal may not be read: it may lie on a disk of its own."""
        if not await self._journal.run(lambda: journal_is_readable(self.machine)):
            unavailable.append(Unavailable("kernel_messages", "needs_group", "systemd-journal"))
        return ()

    async def _units(self, look: Look) -> Iterable[HealthFinding]:
        return list(unit_findings(look, await units(self.machine, "*")))

    async def _clock(self) -> Iterable[HealthFinding]:
        """Ask systemd: the system call is among those that the unit's sandbox refuses."""
        printed = await self.machine.printed("timedatectl", "show", "--property=NTPSynchronized", "--value")
        if printed.strip() != "no":
            return []
        listed = await units(self.machine, *_TIME_SERVICES, properties=DETAILS)
        known = [each for each in listed if each.name in _TIME_SERVICES and self._may_be_asked_for(each)]
        service = next((each for each in known if each.state == "active"), known[0] if known else None)
        evidence = {} if service is None else {"result": service.state}
        ask = service and Ask("linux.units", "get", service.name)
        return [HealthFinding("clock_not_synchronised", "warning", None, evidence, ask)]

    def _may_be_asked_for(self, unit: Unit) -> bool:
        """Return whether ``unit`` is there, and the owner shows it in findings and in detail."""
        is_there = unit.properties.get("LoadState") == "loaded"
        return (
            is_there
            and self.allows("units", unit.name)
            and self.ceiling.allows("linux.units", "units", unit.name)
        )

    async def _space(self, look: Look) -> Iterable[HealthFinding]:
        """Measure file systems in a program, which can be stopped where one of them does not answer."""
        machine = self.machine
        paths = {
            str(machine.path(mount.path)): mount.path for mount in mounts(machine) if not mount.read_only
        }
        if not paths:
            return []
        command = ("stat", "--file-system", "--format=%b %a %c %d %n", "--", *paths)
        # It ends with 1 if it may not see one of them, and has measured all others.
        printed = await machine.printed(*command, codes=(0, 1))
        return list(space_findings(look, printed, paths))


def by_code(findings: Iterable[HealthFinding]) -> list[OpenFinding]:
    """Return ``findings``, the worst first, as they are reported: one for each code."""
    found: dict[str, OpenFinding] = {}
    for each in findings:
        known = found.setdefault(
            each.code, {"code": each.code, "severity": each.severity, "count": 0, "since_ms": each.since_ms}
        )
        known["count"] = min(known["count"] + 1, _MOST_COUNTED)
        since = [ms for ms in (known["since_ms"], each.since_ms) if ms is not None]
        known["since_ms"] = min(since, default=None)
    return list(found.values())


def _why(what: str, fault: ToolFault) -> str:
    if fault.code == "no_answer":
        return fault.code
    return "not_supported" if what == "storage" else "no_systemd"


HANDLER: HandlerFactory = HealthHandler


_FILE = "boot.json"
_MAX_BYTES = 1024


class BootRecord:
    """Whether the last boot was unclean: the machine went down, and the daemon had not been stopped before.

    A file in ``directory`` says, from its start to its stop, that the daemon runs, and in which boot. If it
    still says so in ``boot_id``, another one, the power was cut or the kernel stopped. A daemon that was
    killed within a boot is not judged.

    Attributes:
        unclean: whether the boot before this one ended uncleanly; None where that is not known.
        seen: what was counted in this boot, as ``Growth`` has it: it is no news for a daemon that restarts.
    """

    def __init__(self, directory: Path, boot_id: str) -> None:
        self._file = directory / _FILE
        self._boot_id = boot_id
        self.unclean: bool | None = None
        self.seen: Mapping[str, tuple[int, int]] = {}

    def begin(self) -> None:
        """Read how the boot before ended, and note that the daemon runs.

        Raises:
            OSError, StateError: the record cannot be read or written.
        """
        self.unclean = self._read()
        self._write(runs=True)

    def keep(self, seen: Mapping[str, tuple[int, int]]) -> None:
        """Note what was counted.

        Raises:
            OSError: it cannot be written.
        """
        self.seen = dict(seen)
        self._write(runs=True)

    def end(self) -> None:
        """Note that the daemon was stopped.

        Raises:
            OSError: it cannot be written.
        """
        self._write(runs=False)

    def _read(self) -> bool | None:
        try:
            kept = loads(read_state(self._file), max_bytes=_MAX_BYTES)
            same_boot = kept["boot_id"] == self._boot_id
            unclean = kept["unclean"] if same_boot else kept["runs"]
            seen = kept.get("seen", {}) if same_boot else {}
            self.seen = {str(name): (int(count), int(us)) for name, (count, us) in seen.items()}
        except FileNotFoundError:
            return None
        except (StrictJsonError, StateError, KeyError, TypeError, ValueError, AttributeError):
            return None  # it is replaced
        return unclean if isinstance(unclean, bool) else None

    def _write(self, *, runs: bool) -> None:
        record = {"boot_id": self._boot_id, "runs": runs, "unclean": self.unclean, "seen": self.seen}
        write_atomic(self._file, json.dumps(record) + "\n")
