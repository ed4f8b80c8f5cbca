"""``linux.packages``: the system that a node runs, and its updates by what is known on it.

Must not fetch anything, nor change what the package manager keeps.
"""

import asyncio
import json
import os
import re
import shlex
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from kubelet.handlers.base import HandlerFactory, ToolFault
from kubelet.handlers.machine import LinuxHandler, LinuxMachine, page
from kubelet.handlers.redaction import redacted
from schemas.error_roots import StateError
from schemas.files import read_state, write_atomic
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

UPDATES_PER_PAGE = 100
MANAGER_S = 300.0
"""A package manager reads all of its lists, which can take a board a minute of CPU time."""
INTERVAL_S = 600.0
FIRST_S = 4.0
"""How long an answer right after the start waits for the first look."""
_MOST_REASONS = 32
_PENDING, _MAX_PENDING = "updates.json", 1024
_VERSION = re.compile(r"[A-Za-z0-9._:+~^-]{1,64}")


class Update(NamedTuple):
    """A newer version of a package. ``security`` is None where the package manager does not say."""

    name: str
    installed: str | None
    available: str
    security: bool | None


class WaitingUpdates(NamedTuple):
    """How many updates wait, how many of them for security, and since when: kept across restarts."""

    pending: int
    security: int
    since_ms: int | None
    security_since_ms: int | None

    @classmethod
    def read(cls, directory: Path) -> "WaitingUpdates | None":
        """Return what ``directory`` has; None if nothing, or what cannot be used."""
        try:
            kept = loads(read_state(directory / _PENDING), max_bytes=_MAX_PENDING)
            return cls(**kept) if all(each is None or type(each) is int for each in kept.values()) else None
        except (OSError, StateError, StrictJsonError, TypeError, AttributeError):
            return None

    def after(self, found: Collection[Update], now_ms: int) -> "WaitingUpdates":
        """Return what is to be kept after ``found`` are known to wait."""
        pending, security = len(found), sum(bool(each.security) for each in found)
        return WaitingUpdates(
            pending,
            security,
            # By a clock that was once ahead they would not be said to wait before that time.
            min(self.since_ms or now_ms, now_ms) if pending else None,
            min(self.security_since_ms or now_ms, now_ms) if security else None,
        )

    def write(self, directory: Path) -> None:
        """Keep it in ``directory``.

        Raises:
            OSError: it cannot be written.
        """
        write_atomic(directory / _PENDING, json.dumps(self._asdict()) + "\n")


class _Manager(NamedTuple):
    """How to ask a package manager what waits, by what it has already fetched."""

    name: str
    program: str
    command: tuple[str, ...]
    update: re.Pattern[str]
    """One update in what it prints; an ``origin`` tells those for security, and is only apt's."""
    lists: tuple[str, ...]
    """What changes when the lists are fetched, as globs."""
    installed: str
    """What changes when a package is installed."""
    codes: tuple[int, ...] = (0,)
    end: str | None = None
    """What follows the last update."""


_MANAGERS = (
    _Manager(
        "apt",
        "/usr/bin/apt-get",
        ("apt-get", "--simulate", "--quiet", "dist-upgrade"),
        # Inst NAME [OLD] (NEW ORIGIN [ARCHITECTURE])
        re.compile(
            r"^Inst (?P<name>\S+)(?: \[(?P<installed>\S+)\])? \((?P<available>\S+) (?P<origin>[^)\n]*)\)",
            re.MULTILINE,
        ),
        ("/var/lib/apt/lists",),
        "/var/lib/dpkg/status",
    ),
    _Manager(
        "dnf",
        "/usr/bin/dnf",
        ("dnf", "--cacheonly", "--quiet", "repoquery", "--upgrades", "--queryformat=%{name} %{evr}\n"),
        re.compile(r"^(?P<name>\S+) (?P<available>\S+)$", re.MULTILINE),
        ("/var/cache/dnf", "/var/cache/libdnf5", "/var/cache/libdnf5/*"),
        "/var/lib/rpm",
    ),
    # After dnf: where that is installed, yum is another name for it.
    _Manager(
        "yum",
        "/usr/bin/yum",
        ("env", "LC_ALL=C", "yum", "--cacheonly", "--quiet", "check-update"),
        # NAME.ARCHITECTURE NEW REPOSITORY, of which a long name is alone on its line
        re.compile(r"^(?P<name>\S+)\.\w+\s+(?P<available>\S+)[^\S\n]+\S+$", re.MULTILINE),
        ("/var/cache/yum", "/var/cache/yum/*/*/*"),
        "/var/lib/rpm",
        codes=(0, 100),
        end="\nObsoleting Packages",
    ),
    _Manager(
        "zypper",
        "/usr/bin/zypper",
        ("zypper", "--non-interactive", "--no-refresh", "--xmlout", "list-updates", "--type", "package"),
        re.compile(
            r'<update (?=[^>]*\bkind="package")(?=[^>]*\bname="(?P<name>[^"]+)")'
            r'(?=[^>]*\bedition="(?P<available>[^"]+)")(?:(?=[^>]*\bedition-old="(?P<installed>[^"]+)")|)'
        ),
        ("/var/cache/zypp/raw", "/var/cache/zypp/raw/*"),
        "/var/lib/rpm",
    ),
    _Manager(
        "apk",
        "/sbin/apk",
        ("apk", "--no-network", "version", "--limit", "<"),
        # NAME-OLD < NEW
        re.compile(r"^(?P<name>\S+)-(?P<installed>\d\S*-r\d+)\s+<\s+(?P<available>\S+)", re.MULTILINE),
        ("/var/cache/apk",),
        "/lib/apk/db/installed",
    ),
)


def reboot_reasons(machine: LinuxMachine, kernel: str) -> list[str] | None:
    """Return why a reboot is needed, as far as it is known; None if it is not.

    ``kernel`` is the release that runs.
    """
    reasons = []
    if machine.path("/run/reboot-required").exists():
        packages = redacted(machine.text("/run/reboot-required.pkgs") or "")
        reasons += packages.split()[:_MOST_REASONS] or ["update"]
    modules = [each.name for each in machine.matching("/lib/modules", "*")]
    if modules and kernel not in modules:
        # An update has replaced the modules of the kernel that runs.
        reasons.append(f"kernel-{max(modules, key=_by_numbers)}")
    return list(dict.fromkeys(reasons))[:_MOST_REASONS] or None


def _by_numbers(release: str) -> list[str | int]:
    """Return what sorts 6.1.0-28 behind 6.1.0-9."""
    parts = re.split("([0-9]+)", release)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]


def _updates(manager: _Manager, printed: str) -> Iterator[Update]:
    """Yield the updates in what ``manager`` printed."""
    end = len(printed) if manager.end is None or (found := printed.find(manager.end)) < 0 else found
    # Of several newer versions of one package the last is the newest.
    newest = {each["name"]: each.groupdict() for each in manager.update.finditer(printed, 0, end)}
    for said in newest.values():
        origin = said.get("origin")
        security = None if origin is None else "security" in origin.lower()
        installed = said.get("installed")
        yield Update(
            said["name"],
            installed if installed and _VERSION.fullmatch(installed) else None,
            said["available"],
            security,
        )


class PackagesHandler(LinuxHandler):
    """Answers with what is installed, and what is known to be newer.

    The package manager is run in the background, and only after something has changed.
    """

    def prepare(self) -> None:
        self._manager = next((each for each in _MANAGERS if self.machine.path(each.program).exists()), None)
        self._seen: tuple[int | None, ...] = ()
        self._updates: list[Update] | None = None
        self._looked = asyncio.Event()

    async def run(self) -> None:
        """Look for updates whenever lists or packages have changed."""
        while True:
            if self._manager is not None:
                changed = (
                    self._fetched_ms(self._manager),
                    self._changed_ms(self.machine.path(self._manager.installed)),
                )
                if changed != self._seen:
                    self._seen = changed
                    await self._look(self._manager)
            self._looked.set()
            await asyncio.sleep(INTERVAL_S)

    async def _look(self, manager: _Manager) -> None:
        try:
            printed = await self.machine.printed(
                "nice", "-n", "19", *manager.command, within_s=MANAGER_S, codes=manager.codes
            )
        except ToolFault as fault:
            self.log.warning("updates are not known", reason=fault.code, detail=printable(fault.detail))
            self._updates = None
            return
        found = [each for each in _updates(manager, printed) if _VERSION.fullmatch(each.available)]
        self._updates = sorted(found, key=lambda each: (not each.security, each.name))
        if (directory := self.own.state_dir) is not None:
            before = WaitingUpdates.read(directory) or WaitingUpdates(0, 0, None, None)
            try:
                before.after(found, self.now_ms()).write(directory)
            except OSError as error:
                self.log.warning("since when updates wait is not kept", reason=printable(str(error)))

    @property
    def lacks(self) -> str | None:
        """That no package manager is known."""
        if self._manager:
            return None
        return f"there is none of {', '.join(each.name for each in _MANAGERS)}: updates are not known"

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the system, a page of its updates, and whether it needs a reboot."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._looked.wait(), FIRST_S)
        system = os.uname()
        release = self._release()
        reasons = reboot_reasons(self.machine, system.release)
        return {
            "distribution": {
                "id": release.get("ID", "linux"),
                "version": release.get("VERSION_ID"),
                "name": release.get("PRETTY_NAME", "Linux"),
            },
            "kernel": system.release,
            "architecture": system.machine,
            "board": self._first("/sys/firmware/devicetree/base/model", "/sys/class/dmi/id/product_name"),
            "firmware": self._first("/sys/class/dmi/id/bios_version"),
            "daemon": metadata.version("edge-kubelet"),
            "withheld": len(self._updates or ()) - len(self._allowed or ()),
            "updates": self._shown(arguments.get("start", 0)),
            "reboot": {
                "needed": reasons is not None,
                "reasons": [{"package": each} for each in reasons or () if self.allows("names", each)],
            },
        }

    def _release(self) -> dict[str, str]:
        lines = (self.machine.text("/etc/os-release") or "").splitlines()
        pairs = (line.partition("=") for line in lines if not line.startswith("#"))
        found = {}
        for name, equals, value in pairs:
            try:
                words = shlex.split(value)
            except ValueError:
                continue
            if equals and words:
                found[name] = words[0]
        return found

    def _first(self, *paths: str) -> str | None:
        return next((text.rstrip("\0") for path in paths if (text := self.machine.text(path))), None)

    @property
    def _allowed(self) -> list[Update] | None:
        """The updates that the board's owner lets be seen."""
        return self._updates and [each for each in self._updates if self.allows("names", each.name)]

    def _shown(self, start: int) -> dict[str, Any]:
        manager, found = self._manager, self._allowed
        known = {
            "source": manager and manager.name,
            "checked_ms": manager and self._fetched_ms(manager),
        }
        if found is None:
            return {**known, "pending": None, "security": None, "packages": [], "next": None}
        shown, following = page(found, start, UPDATES_PER_PAGE)
        unknown = any(each.security is None for each in found)
        return {
            **known,
            "pending": len(found),
            "security": None if unknown else sum(bool(each.security) for each in found),
            "packages": [each._asdict() for each in shown],
            "next": following,
        }

    def _fetched_ms(self, manager: _Manager) -> int | None:
        found = (
            each for pattern in manager.lists for each in self.machine.matching("/", pattern.lstrip("/"))
        )
        return max(
            (changed for each in found if (changed := self._changed_ms(each)) is not None), default=None
        )

    @staticmethod
    def _changed_ms(path: Path) -> int | None:
        try:
            return int(path.stat().st_mtime * 1000)
        except OSError:
            return None


HANDLER: HandlerFactory = PackagesHandler
