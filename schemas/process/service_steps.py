"""Installing a program as a service of systemd, and removing it: a list of steps, which can be shown first.

Must not change anything, nor read anything but the units of the program.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from schemas.settings import Form
from schemas.settings_sources import CONFIG_DIRECTORY, Program

UNITS = Path("/etc/systemd/system")
PACKAGED_UNITS = Path("/usr/lib/systemd/system")
"""Where a distribution's packages have theirs."""
DEFAULT_SCRIPTS = Path("/opt/edge-kubelet/bin")
"""Where the units expect the program; replaced by where it lies."""
_DESTINATIONS = {
    ".sysusers.conf": Path("/etc/sysusers.d"),
    ".tmpfiles.conf": Path("/etc/tmpfiles.d"),
    ".service": UNITS,
    ".path": UNITS,
}
OWN_KINDS = "kinds"
"""Where packages of kinds are in a state directory that is not the service's."""
_PUBLIC_MODE = 0o644


@dataclass(frozen=True, slots=True)
class Service:
    """A program that runs as a service.

    Attributes:
        name: of the unit, the user and the state directory.
        units: the directory of its units, which is in its package.
        program: its name, and the settings that its configuration may have.
        directories: what it writes, which only ``purge`` removes; the first is the state directory.
        state_mark: what a state directory has that was set up.
        kinds: where packages of kinds are, which belong to root.
        groups: those that its sysusers file makes besides that of its user.
    """

    name: str
    units: Path
    program: Program
    directories: tuple[Path, ...]
    state_mark: str
    kinds: Path
    groups: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """The unit of the program itself."""
        return f"{self.name}.service"


@dataclass(frozen=True, slots=True)
class Write:
    """A file with ``text``; one that is there is kept if ``keep``, which an operator edits."""

    path: Path
    text: str
    keep: bool = False
    mode: int = _PUBLIC_MODE


@dataclass(frozen=True, slots=True)
class Remove:
    """A file, or a directory with all that is in it; ``if_empty``: a directory that has nothing in it."""

    path: Path
    if_empty: bool = False


@dataclass(frozen=True, slots=True)
class Run:
    """A command.

    Attributes:
        may_fail: what it does may be done already.
        if_changed: it is run only if a file was written before it.
    """

    command: tuple[str, ...]
    may_fail: bool = False
    if_changed: bool = False


Step = Write | Remove | Run


def install_steps(
    service: Service, scripts: Path, moved: Path | None = None, packages: Iterable[str] = ()
) -> Iterator[Step]:
    """Yield what installs ``service``, whose program is in ``scripts``. Once more, they change nothing.

    ``moved`` is a state directory that becomes the service's, with the ``packages`` of kinds in it.
    """
    for path, source in _placed(service):
        text = source.read_text("utf-8").replace(f"{DEFAULT_SCRIPTS}/", f"{scripts}/")
        yield Write(path, text)
    yield Write(service.program.usual_file, _sample(service.program), keep=True)
    for path, _ in _placed(service):
        if path.parent == _DESTINATIONS[".sysusers.conf"]:
            yield Run(("systemd-sysusers", str(path)))
            if moved is not None:
                yield from move_steps(service, moved, packages)
        elif path.parent == _DESTINATIONS[".tmpfiles.conf"]:
            yield Run(("systemd-tmpfiles", "--create", str(path)))
    yield Run(("systemctl", "daemon-reload"))
    yield Run(("systemctl", "enable", service.unit))
    yield Run(("systemctl", "try-restart", service.unit), if_changed=True)


def move_steps(service: Service, moved: Path, packages: Iterable[str] = ()) -> Iterator[Step]:
    """Yield what makes ``moved`` the state directory of ``service``. Moved: there must be no second CA.

    The ``packages`` of kinds become root's: what the service runs, it cannot change.
    """
    place, kinds = str(service.directories[0]), str(service.kinds)
    names = list(packages)
    if names:
        yield Run(("install", "--directory", "--mode=0755", kinds))
    for name in names:
        there = f"{kinds}/{name}"
        yield Run(("mv", "--no-target-directory", str(moved / OWN_KINDS / name), there))
        yield Run(("chown", "--recursive", "--no-dereference", "root:root", there))
        yield Run(("chmod", "--recursive", "u=rwX,go=rX", there))
    yield Run(("mv", "--no-target-directory", str(moved), place))
    yield Run(("chown", "--recursive", "--no-dereference", f"{service.name}:{service.name}", place))
    yield Run(("chmod", "0750", place))


def uninstall_steps(service: Service, *, purge: bool) -> Iterator[Step]:
    """Yield what removes ``service``. Its state, its configuration and its user stay unless ``purge``."""
    units = [path.name for path, _ in _placed(service) if path.parent == UNITS]
    yield Run(("systemctl", "disable", "--now", *units), may_fail=True)
    for path, _ in _placed(service):
        yield Remove(path)
    yield Remove(UNITS / f"{service.unit}.d", if_empty=not purge)
    yield Run(("systemctl", "daemon-reload"))
    if not purge:
        return
    for directory in service.directories:
        yield Remove(directory)
    yield Remove(service.program.usual_file)
    yield Remove(CONFIG_DIRECTORY, if_empty=True)
    yield Run(("userdel", service.name), may_fail=True)
    for group in (service.name, *service.groups):
        yield Run(("groupdel", group), may_fail=True)


def as_lines(steps: Iterable[Step]) -> Iterator[str]:
    """Yield ``steps`` for people: a line for each, and the text of a file below it."""
    for step in steps:
        match step:
            case Write(path, text):
                yield f"write {path}"
                yield from (f"    {line}".rstrip() for line in text.splitlines())
            case Remove(path):
                yield f"remove {path}"
            case Run(command):
                yield f"run {' '.join(command)}"


def as_document(steps: Iterable[Step]) -> list[dict[str, object]]:
    """Return ``steps`` for programs."""
    shown: list[dict[str, object]] = []
    for step in steps:
        match step:
            case Write(path, text):
                shown.append({"write": str(path), "text": text})
            case Remove(path):
                shown.append({"remove": str(path)})
            case Run(command):
                shown.append({"run": command})
    return shown


def _placed(service: Service) -> list[tuple[Path, Path]]:
    """Return where each file of the service goes, and the file."""
    return [
        (directory / (file.name.removesuffix(ending) + _ending_there(ending)), file)
        for ending, directory in _DESTINATIONS.items()
        for file in sorted(service.units.glob(f"*{ending}"))
    ]


def _ending_there(ending: str) -> str:
    return ".conf" if ending.endswith(".conf") else ending


def _sample(program: Program) -> str:
    """Return a configuration in which every setting is a comment."""
    lines = [f"# Settings of {program.name}: `{program.name} config check` reads them. All have defaults."]
    for setting in program.table:
        if setting.form is Form.FLAG or setting.form is Form.NUMBER:
            value = setting.default or ""
        else:
            value = f'"{setting.default or ""}"'
        lines += ["", f"# {setting.doc}", f"# {setting.name} = {value}"]
    return "\n".join(lines) + "\n"
