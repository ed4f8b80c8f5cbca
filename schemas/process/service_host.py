"""Services of systemd on this machine: applies the steps of an installation, and reads what runs.

An installation is a list of steps, which can be shown first.
"""

import os
import pwd
import shutil
import stat
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from schemas.error_roots import OperatorError
from schemas.files import PRIVATE_DIRECTORY, check_directory, write_atomic
from schemas.kind_packages import sites_in
from schemas.process.status_socket import NotRunningError, read_status
from schemas.settings import CONFIG_DIRECTORY, Form, Program
from schemas.text import printable

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


@dataclass(frozen=True, slots=True)
class Take:
    """A directory of another user, moved to its place: from then on that user changes nothing in it."""

    path: Path


Step = Write | Remove | Run | Take


def install_steps(
    service: Service,
    scripts: Path,
    moved: Path | None = None,
    packages: Iterable[str] = (),
    *,
    adopts: bool = False,
) -> Iterator[Step]:
    """Yield what installs ``service``, whose program is in ``scripts``. Once more, they change nothing.

    ``moved`` is a state directory that becomes the service's, with the ``packages`` of kinds in it; with
    ``adopts`` one does that is in its place already.
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
            elif adopts:
                yield from adopt_steps(service)
        elif path.parent == _DESTINATIONS[".tmpfiles.conf"]:
            yield Run(("systemd-tmpfiles", "--create", str(path)))
    yield Run(("systemctl", "daemon-reload"))
    yield Run(("systemctl", "enable", service.unit))
    yield Run(("systemctl", "try-restart", service.unit), if_changed=True)


def move_steps(service: Service, moved: Path, packages: Iterable[str] = ()) -> Iterator[Step]:
    """Yield what makes ``moved`` the state directory of ``service``. Moved: there must be no second CA.

    The ``packages`` of kinds become root's: what the service runs, it cannot change.
    """
    kinds, names = str(service.kinds), list(packages)
    if names:
        yield Run(("install", "--directory", "--mode=0755", kinds))
    for name in names:
        there = f"{kinds}/{name}"
        yield Run(("mv", "--no-target-directory", str(moved / OWN_KINDS / name), there))
        yield Take(Path(there))
        yield Run(("chown", "--recursive", "--no-dereference", "root:root", there))
        yield Run(("chmod", "--recursive", "u=rwX,go=rX", there))
    yield Run(("mv", "--no-target-directory", str(moved), str(service.directories[0])))
    yield from adopt_steps(service)


def adopt_steps(service: Service) -> Iterator[Step]:
    """Yield what gives the state directory of ``service`` to its user, with all that is in it."""
    place = service.directories[0]
    yield Take(place)
    yield Run(("chown", "--recursive", "--no-dereference", f"{service.name}:{service.name}", str(place)))
    yield Run(("chmod", "0750", str(place)))


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
            case Take(path):
                yield f"take {path} from its owner"


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
            case Take(path):
                shown.append({"take": str(path)})
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
    lines = [
        f"# Settings of {program.name}: `{program.name} config check` reads them. None is needed.",
        "# A line shows the default, or an example where there is none.",
    ]
    for setting in program.options:
        value = setting.default or setting.example
        if setting.form is Form.LIST:
            value = f'["{value}"]'
        elif setting.form is Form.TEXT:
            value = f'"{value}"'
        lines += ["", f"# {setting.doc}", f"# {setting.name} = {value}"]
    for setting in program.table:
        if setting.form is Form.TABLE:  # behind a table's name stand its members alone
            lines += ["", f"# {setting.doc}", f'# ["{setting.name}"]']
    return "\n".join(lines) + "\n"


_HIDDEN = tuple(map(Path, ("/home", "/root", "/run/user", "/tmp", "/var/tmp")))  # noqa: S108 - it is refused
_TIMEOUT_S = 60
_DIRECTORY_MODE = 0o755
_SHOWN = ("UnitFileState", "ActiveState", "SubState", "StatusText", "MainPID", "NRestarts")


class ServiceError(OperatorError):
    """The service cannot be installed, removed or seen; the text is what to do."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What a command has ended with, and all that it said."""

    status: int
    output: str


def run_command(command: Sequence[str]) -> Ran:
    """Run ``command``, which is found on the path, with its directories of system programs.

    Raises:
        ServiceError: it is not there, or does not end.
    """
    program = shutil.which(command[0], path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise ServiceError(f"{command[0]} is not there: this takes a system that runs systemd")
    try:
        ran = subprocess.run(  # noqa: S603 - fixed arguments, without a shell
            [program, *command[1:]], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ServiceError(f"`{' '.join(command)}` has not ended within {_TIMEOUT_S} s") from None
    return Ran(ran.returncode, ran.stdout + ran.stderr)


def scripts_of(program: str) -> Path:
    """Return the directory of the running installation's commands, which must have ``program``.

    Raises:
        ServiceError: it has not.
    """
    directory = Path(sysconfig.get_path("scripts"))
    if not (directory / program).is_file():
        raise ServiceError(
            f"{directory} has no command {program}: install the package, and run it from there"
        )
    return directory


def check_reachable(*programs: Path) -> None:
    """Check that a service can run ``programs``, and that only root can change them.

    Raises:
        ServiceError: it cannot, or another user could.
    """
    advice = (
        "install it where all can read it: by pipx install --global, or in a venv in /opt/edge-kubelet "
        "(docs/operations.md)"
    )
    for place in (path for program in programs for path in (program, program.resolve())):
        if any(place.is_relative_to(hidden) for hidden in _HIDDEN):
            raise ServiceError(f"{place} is not visible to a service; {advice}")
        for path in (place, *place.parents):
            found = path.stat()
            if not found.st_mode & stat.S_IXOTH:
                raise ServiceError(f"{path} is closed to the user of the service; {advice}")
            if found.st_uid != 0 or (found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX):
                raise ServiceError(f"{path} could be changed by others than root; {advice}")


def _owners_of(directory: Path) -> set[int]:
    owners = set[int]()
    for each in (directory, *directory.rglob("*")):
        with suppress(FileNotFoundError):  # a program may work there
            owners.add(each.lstat().st_uid)
    return owners


def _user_of(service: Service) -> set[int]:
    try:
        return {pwd.getpwnam(service.name).pw_uid}
    except KeyError:
        return set()


def _check_stopped(service: Service, directory: Path) -> None:
    with suppress(NotRunningError):
        read_status(directory)
        raise ServiceError(f"{service.program.name} runs with {directory}: stop it first")


def _take(path: Path, above: int | None = None) -> None:
    """Make ``path``, and each directory in it, this user's alone, and see that there is no link then.

    From above to below, by descriptors: its owner may put links there as long as it is the owner's.

    Raises:
        ServiceError: there is one.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    directory = os.open(path if above is None else path.name, flags, dir_fd=above)
    try:
        os.fchown(directory, os.geteuid(), os.getegid())
        os.fchmod(directory, PRIVATE_DIRECTORY)
        for each in list(os.scandir(directory)):
            facts = each.stat(follow_symlinks=False)
            if stat.S_ISDIR(facts.st_mode):
                _take(path / each.name, directory)
            elif stat.S_ISLNK(facts.st_mode) or facts.st_nlink > 1:
                raise ServiceError(f"{path / each.name} is a link: no state is behind one")
    finally:
        os.close(directory)


@dataclass(frozen=True, slots=True)
class Host:
    """A machine: the directory that stands for its root, and how commands are run there."""

    root: Path = Path("/")
    run: Callable[[Sequence[str]], Ran] = run_command

    def due(self, steps: Iterable[Step]) -> list[Step]:
        """Return those of ``steps`` that change something: a file as it should be is not written again."""
        due: list[Step] = []
        for step in steps:
            match step:
                case Write():
                    is_due = self._is_due(step)
                case Remove(path):
                    is_due = self._at(path).exists()
                case Run():
                    is_due = not step.if_changed or any(isinstance(before, Write) for before in due)
                case Take():
                    is_due = True
            if is_due:
                due.append(step)
        return due

    def apply(self, steps: Iterable[Step]) -> None:
        """Apply ``steps``, in their order.

        Raises:
            ServiceError: a command has failed.
            OSError: a file cannot be written or removed.
        """
        for step in steps:
            match step:
                case Write():
                    self._write(step)
                case Remove():
                    self._remove(step)
                case Run():
                    self._run(step)
                case Take(path):
                    _take(self._at(path))

    def is_packaged(self, service: Service) -> bool:
        is_packaged, is_placed = (self._at(at / service.unit).exists() for at in (PACKAGED_UNITS, UNITS))
        return is_packaged and not is_placed

    def check_not_packaged(self, service: Service) -> None:
        """Check that no package of the distribution has the units of ``service``.

        Raises:
            ServiceError: one has them.
        """
        if self.is_packaged(service):
            unit = PACKAGED_UNITS / service.unit
            raise ServiceError(
                f"{unit} belongs to a package: apt installs, upgrades and removes {service.name}"
            )

    def check_movable(self, service: Service, source: Path) -> Sequence[str]:
        """Return the packages of kinds in ``source``, which can become the state directory of ``service``.

        Raises:
            ServiceError: it is no such directory, a process uses it, or the service has one that was set up.
        """
        place, taken = service.directories[0], self._at(service.directories[0])
        if not (source / service.state_mark).is_file():
            raise ServiceError(f"{source} is no state directory: it has no {service.state_mark}")
        for file in source.rglob("*"):
            # What root would give to the service by another name.
            facts = file.lstat()
            if stat.S_ISLNK(facts.st_mode) or (stat.S_ISREG(facts.st_mode) and facts.st_nlink > 1):
                raise ServiceError(f"{file} is a link: no state is behind one")
        _check_stopped(service, source)
        if taken.is_dir() and any(taken.iterdir()):
            raise ServiceError(f"{place} is in use, and {source} would replace it: move it away first")
        packages = [site.name for site in sites_in(source / OWN_KINDS)]
        for name in packages:
            if self._at(service.kinds / name).exists():
                raise ServiceError(f"{service.kinds / name} is there: `kind uninstall` first")
        return packages

    def has_own_state(self, service: Service) -> bool:
        """Return whether this user, root, has set up the state directory of ``service``, as in a trial.

        Raises:
            ServiceError: a process uses it.
        """
        place = self._at(service.directories[0])
        try:
            is_set_up = (place / service.state_mark).is_file()
        except PermissionError:
            return False  # to a user who may only see what would be done
        is_own = is_set_up and _owners_of(place) - _user_of(service) == {os.geteuid()}
        if is_own:
            _check_stopped(service, place)
        return is_own

    def status(self, service: Service) -> Mapping[str, str]:
        """Return what systemd says of ``service``; without ``ActiveState`` it is not installed.

        Raises:
            ServiceError: systemd does not answer.
        """
        if not any(self._at(directory / service.unit).exists() for directory in (UNITS, PACKAGED_UNITS)):
            return {}
        properties = [f"--property={name}" for name in _SHOWN]
        ran = self.run(("systemctl", "show", service.unit, *properties))
        if ran.status:
            raise ServiceError(f"systemd does not answer: {printable(ran.output.strip(), 500)}")
        pairs = (line.partition("=") for line in ran.output.splitlines())
        return {name: printable(value) for name, _, value in pairs if name in _SHOWN}

    def _run(self, step: Run) -> None:
        ran = self.run(step.command)
        if ran.status and not step.may_fail:
            said = printable(ran.output.strip(), 500)
            raise ServiceError(f"`{' '.join(step.command)}` failed: {said}")

    def _at(self, path: Path) -> Path:
        return self.root / path.relative_to("/")

    def _is_due(self, step: Write) -> bool:
        place = self._at(step.path)
        return not place.exists() or (not step.keep and place.read_text("utf-8") != step.text)

    def _write(self, step: Write) -> None:
        place = self._at(step.path)
        for parent in (parent for parent in reversed(place.parents) if not parent.exists()):
            parent.mkdir()
            parent.chmod(_DIRECTORY_MODE)  # the umask may be narrower
        check_directory(place.parent)
        write_atomic(place, step.text, step.mode)

    def _remove(self, step: Remove) -> None:
        place = self._at(step.path)
        if not place.is_dir() or place.is_symlink():
            place.unlink(missing_ok=True)
        elif not step.if_empty:
            shutil.rmtree(place)
        elif not any(place.iterdir()):
            place.rmdir()
