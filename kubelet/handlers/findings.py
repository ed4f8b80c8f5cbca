"""What may be wrong with a machine: each check reads one source, and yields its findings.

Must not guess: what cannot be read yields nothing, and what has been normal since the boot is no finding.
What the kernel counts since the boot is a finding for some time after the last change.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kubelet.handlers.linux_network import interfaces, link_changes, resolvers, routes
from kubelet.handlers.linux_sensors import temperatures, throttling, under_voltage_alarms
from kubelet.handlers.machine import LinuxMachine
from kubelet.handlers.systemd import Unit

_HOUR_US = 3_600_000_000
_READ = 120
"""Of each counter: an hour of looks, and as many answers."""
_MOST_COUNTERS = 1024
_RATE_US, _LEAST_US = 150_000_000, 30_000_000
"""A rate is of about the last two looks; what lies closer together makes none."""

_MEASURED = re.compile(r"(\d+) (\d+) (\d+) (\d+) (?P<path>.+)")
_ESCAPED = re.compile(r"\\([0-7]{3})")
"""A blank, a line break or a backslash in a mount point, as the kernel writes it."""
_KILLED = "Killed process"
"""What the kernel logs of each process that it kills for memory, followed by its id and its name."""
_WRITABLE = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "vfat", "exfat", "tmpfs", "jfs"})


class Ask(NamedTuple):
    """The tool that tells more."""

    kind: str
    verb: str = "snapshot"
    unit: str | None = None
    search: str | None = None


def stated(row: NamedTuple) -> dict[str, str]:
    """Return what ``row`` has, without members that are None."""
    return {name: value for name, value in row._asdict().items() if value is not None}


class HealthFinding(NamedTuple):
    """One thing that is wrong. ``evidence`` has the members that the output document names."""

    code: str
    severity: str
    subject: str | None
    evidence: Mapping[str, Any]
    ask: Ask | None = None
    since_ms: int | None = None

    def shown(self) -> dict[str, Any]:
        """Return it as a result has it."""
        return {**self._asdict(), "ask": self.ask and stated(self.ask)}


class Growth:
    """How much each of some counters has grown within the last hour, by what was read in it.

    Attributes:
        seen: of those that count since the boot, the last count and when it had grown, in us since then.
    """

    def __init__(self) -> None:
        self._read: dict[str, deque[tuple[int, int]]] = {}
        self.seen: dict[str, tuple[int, int]] = {}

    def of(self, name: str, count: int, now_us: int, within_us: int = _HOUR_US) -> tuple[int, int]:
        """Return by how much the counter ``name``, which is ``count`` now, has grown, and in what time."""
        read = self._read.setdefault(name, deque(maxlen=_READ))
        if len(self._read) > _MOST_COUNTERS:
            del self._read[next(iter(self._read))]
        if read and count < read[-1][1]:
            read.clear()  # it has begun anew
        read.append((now_us, count))
        while now_us - read[0][0] > _HOUR_US:
            read.popleft()
        began_us, first = next(each for each in read if now_us - each[0] <= within_us)
        return count - first, now_us - began_us

    def last_us(self, name: str, count: int, now_us: int) -> int | None:
        """Return when ``name`` was last seen to grow; that is now, if it is not 0 at the first look."""
        if count > self.seen.get(name, (0, 0))[0]:
            self.seen[name] = count, now_us
        return self.seen[name][1] if name in self.seen else None


class Look(NamedTuple):
    """One look at ``machine``. ``now_us`` is since the boot; ``limits`` are the thresholds by name."""

    machine: LinuxMachine
    growth: Growth
    limits: Mapping[str, float]
    now_us: int
    at_ms: Callable[[int], int]
    cores: int = 1

    def is_recent(self, us: int | None, hours: float) -> bool:
        return us is not None and self.now_us - us <= hours * _HOUR_US

    def above(self, value: float, limit: str, unit: str) -> dict[str, Any] | None:
        """Return the evidence that ``value`` has reached the threshold ``limit``; None if it has not."""
        if value < self.limits[limit]:
            return None
        return {"value": round(value, 1), "limit": self.limits[limit], "unit": unit}


def unit_findings(look: Look, found: Iterable[Unit]) -> Iterator[HealthFinding]:
    """Yield the units that have failed, and those that systemd restarts again and again."""
    for unit in found:
        restarts = unit.restarts or 0
        recent = look.growth.of(unit.name, restarts, look.now_us)[0] if restarts else 0
        # One that waits for its next start is in the loop now, whatever was read before.
        looping = restarts if unit.sub == "auto-restart" else recent
        ask, since = Ask("linux.units", "get", unit.name), look.at_ms(unit.changed_us)
        if unit.state == "failed":
            why = {"result": unit.result} if unit.result else {}
            yield HealthFinding("unit_failed", "error", unit.name, why, ask, since)
        elif evidence := look.above(looping, "restarts", "count"):
            yield HealthFinding("unit_restarting", "error", unit.name, evidence, ask, since)


def memory_findings(look: Look) -> Iterator[HealthFinding]:
    """Yield that memory is short, that processes wait for it, and that some were killed for it."""
    machine, ask = look.machine, Ask("linux.processes")
    lines = (machine.text("/proc/meminfo") or "").splitlines()
    facts = {name: value for name, _, value in (line.partition(":") for line in lines)}
    total, available = (_kib(facts.get(name, "")) for name in ("MemTotal", "MemAvailable"))
    limit = look.limits["memory_low_pct"]
    evidence: dict[str, Any] | None
    if total and available is not None and (left := 100 * available / total) < limit:
        evidence = {"value": round(left, 1), "limit": limit, "unit": "percent"}
        yield HealthFinding("memory_low", "warning", None, evidence, ask)
    stalled = pressure(machine, "memory")
    if stalled is not None and (evidence := look.above(stalled, "stalled_warning_pct", "percent")):
        severity = "error" if stalled >= look.limits["stalled_error_pct"] else "warning"
        yield HealthFinding("memory_pressure", severity, None, evidence, ask)
    vmstat = (line.partition(" ") for line in (machine.text("/proc/vmstat") or "").splitlines())
    counts = {name: int(count) for name, _, count in vmstat if count.isdecimal()}
    swaps = (machine.text("/proc/swaps") or "").splitlines()[1:]
    # What comes back from compressed memory wears no card, and costs microseconds.
    if "pswpin" in counts and not (swaps and all(each.startswith("/dev/zram") for each in swaps)):
        grown, over_us = look.growth.of("pswpin", counts["pswpin"], look.now_us, _RATE_US)
        rate = 1e6 * grown / over_us if over_us >= _LEAST_US else 0.0
        if evidence := look.above(rate, "swap_pages_per_s", "per_second"):
            yield HealthFinding("swap_storm", "warning", None, evidence, ask)
    killed = counts.get("oom_kill", 0)
    at_us = look.growth.last_us("oom_kill", killed, look.now_us)
    if at_us is not None and look.is_recent(at_us, look.limits["killed_for_memory_h"]):
        evidence = {"value": killed, "unit": "count"}
        ask = Ask("linux.journal", "get", search=_KILLED)
        yield HealthFinding("process_killed_for_memory", "warning", None, evidence, ask, look.at_ms(at_us))


def heat_findings(look: Look) -> Iterator[HealthFinding]:
    """Yield what is hot, what is throttled for it, and supplies of too low a voltage."""
    ask, limits = Ask("linux.sensors"), look.limits
    evidence: dict[str, Any] | None
    for each in temperatures(look.machine):
        critical = each.critical_c - limits["below_critical_c"] if each.critical_c else None
        limit = min(limits["hot_c"], critical) if critical else limits["hot_c"]
        if each.c >= limit:
            severity = "error" if critical and each.c >= critical else "warning"
            evidence = {"value": each.c, "limit": limit, "unit": "celsius"}
            yield HealthFinding("hot", severity, f"{each.chip}/{each.label}", evidence, ask)
    if firmware := throttling(look.machine):
        for code, now, seen in (
            ("under_voltage", firmware.under_voltage, firmware.under_voltage_seen),
            ("throttled", firmware.throttled, firmware.throttled_seen),
        ):
            at_us = look.growth.last_us(code, int(seen), look.now_us)
            if now:
                yield HealthFinding(code, "error", None, {}, ask)
            elif at_us is not None and look.is_recent(at_us, 1):
                yield HealthFinding(code, "warning", None, {}, ask, look.at_ms(at_us))
    for subject in under_voltage_alarms(look.machine):
        yield HealthFinding("under_voltage", "error", subject, {}, ask)
    throttled = look.machine.number("/sys/devices/system/cpu/cpu0/thermal_throttle/package_throttle_count")
    if throttled is not None:
        grown, _ = look.growth.of("throttle", throttled, look.now_us)
        if evidence := look.above(grown, "throttle_events", "count"):
            yield HealthFinding("throttled", "warning", None, evidence, ask)


def storage_findings(look: Look) -> Iterator[HealthFinding]:
    """Yield cards that are near the end of their life, and file systems with errors or without writing."""
    machine = look.machine
    for file in machine.matching("/sys/block", "mmcblk*/device/life_time"):
        words = (machine.text(file) or "").split()
        steps = [int(each, 16) for each in words if re.fullmatch(r"0x[0-9a-f]{1,4}", each)]
        used = min(10 * max(steps, default=0), 110)
        if evidence := look.above(used, "storage_worn_pct", "percent"):
            severity = "error" if used > 100 else "warning"  # noqa: PLR2004 - percent
            yield HealthFinding("storage_worn", severity, file.parts[-3], evidence)
    for file in machine.matching("/sys/fs/ext4", "*/errors_count"):
        if count := machine.number(file):
            evidence = {"value": count, "unit": "count"}
            yield HealthFinding("filesystem_errors", "error", file.parent.name, evidence)
    meant = _meant_read_only(machine)
    for mount in mounts(machine):
        on_disk = mount.read_only and mount.device.startswith("/dev/")
        if on_disk and (mount.has_failed or mount.path not in meant):
            yield HealthFinding("filesystem_read_only", "error", mount.path, {})


class FileSystem(NamedTuple):
    """A file system that can be written to, unless its super block is ``read_only``.

    ``has_failed``: the kernel says that an error has made it so, as it does from 6.15 on.
    """

    path: str
    device: str
    read_only: bool
    has_failed: bool


def mounts(machine: LinuxMachine) -> list[FileSystem]:
    """Return each file system once, where it is first mounted."""
    first: dict[str, FileSystem] = {}
    for device, path, kind, source, options in _mounted(machine):
        if kind in _WRITABLE:
            # A sandbox makes mounts read-only; only the super block tells of the file system itself.
            has_failed = not options.isdisjoint(("emergency_ro", "shutdown"))
            first.setdefault(device, FileSystem(path, source, has_failed or "ro" in options, has_failed))
    return list(first.values())


def _mounted(machine: LinuxMachine) -> Iterator[tuple[str, str, str, str, frozenset[str]]]:
    """Yield of each mount its device's number, path, kind, source, and the options of the super block."""
    for line in (machine.text("/proc/self/mountinfo") or "").split("\n"):
        left, _, right = line.partition(" - ")
        # A blank in a name is escaped, and no other character of Unicode that divides words.
        place, what = left.split(" "), right.split(" ")
        if len(place) > 4 and len(what) > 2:  # noqa: PLR2004 - columns of proc(5)
            yield place[2], _unescaped(place[4]), what[0], what[1], frozenset(what[2].split(","))


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda found: chr(int(found[1], 8)), text)


def _meant_read_only(machine: LinuxMachine) -> set[str]:
    """Return the mount points that are read-only by the owner's choice, so that a card is never written.

    Those of fstab, and lower layers of overlays. A layer of a container is below a mount point, and is none.
    """
    lines = (line.split() for line in (machine.text("/etc/fstab") or "").split("\n"))
    named = {words[1] for words in lines if len(words) > 3 and "ro" in words[3].split(",")}  # noqa: PLR2004 - columns of fstab(5)
    lower = {
        path
        for _, _, kind, _, options in _mounted(machine)
        if kind == "overlay"
        for option in options
        if option.startswith("lowerdir")
        for path in option.partition("=")[2].split(":")
    }
    return set(map(_unescaped, named | lower))


def space_findings(look: Look, printed: str, paths: Mapping[str, str]) -> Iterator[HealthFinding]:
    """Yield file systems that are nearly full by what ``stat`` printed of ``paths``, and when."""
    for each in filter(None, map(_MEASURED.fullmatch, printed.split("\n"))):
        path = paths.get(each["path"])
        # Not all have a number of inodes.
        for code, of, left in (("disk_nearly_full", 1, 2), ("inodes_nearly_full", 3, 4)):
            total, free = int(each[of]), int(each[left])
            if path is None or total <= 0:
                continue
            grown, over_us = look.growth.of(f"{code} {path}", total - free, look.now_us)
            used = 100 * (1 - free / total)
            if evidence := look.above(used, "disk_warning_pct", "percent"):
                severity = "error" if used >= look.limits["disk_error_pct"] else "warning"
                if grown > 0 and over_us >= _LEAST_US:
                    evidence["full_in_s"] = int(free / grown * over_us / 1e6)
                yield HealthFinding(code, severity, path, evidence, Ask("system.metrics"))


def load_findings(look: Look) -> Iterator[HealthFinding]:
    """Yield that far more processes want to run than there are cores."""
    columns = (look.machine.text("/proc/loadavg") or "").split()
    if len(columns) > 1:
        evidence = look.above(float(columns[1]) / look.cores, "load_per_core", "per_core")
        if evidence:
            yield HealthFinding("load_high", "warning", None, evidence, Ask("linux.processes"))


def network_findings(look: Look) -> Iterator[HealthFinding]:
    """Yield that there is no way out, that names cannot be resolved, and links that come and go."""
    ask = Ask("linux.network")
    if not any(route.destination == "default" for route in routes(look.machine)):
        yield HealthFinding("no_route", "warning", None, {}, ask)
    if not resolvers(look.machine):
        yield HealthFinding("no_resolver", "warning", None, {}, ask)
    for name in interfaces(look.machine):
        grown, _ = look.growth.of(f"link {name}", link_changes(look.machine, name) or 0, look.now_us)
        if evidence := look.above(grown, "link_changes", "count"):
            yield HealthFinding("link_flapping", "warning", name, evidence, ask)


def pressure(machine: LinuxMachine, what: str) -> float | None:
    """Return the percentage of the last minute in which every process waited for ``what``."""
    for line in (machine.text(f"/proc/pressure/{what}") or "").splitlines():
        if line.startswith("full "):
            values = dict(pair.split("=", 1) for pair in line.split()[1:])
            return float(values.get("avg60", 0))
    return None


def _kib(text: str) -> int | None:
    words = text.split()
    return int(words[0]) if words and words[0].isdecimal() else None
