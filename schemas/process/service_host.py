"""Services of systemd on this machine: applies the steps of an installation, and reads what runs.

Must not decide what an installation consists of.
"""

import os
import shutil
import stat
import subprocess
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from schemas.error_roots import OperatorError
from schemas.kind_packages import sites_in
from schemas.process.service_steps import OWN_KINDS, PACKAGED_UNITS, UNITS, Remove, Run, Service, Step, Write
from schemas.process.status_socket import NotRunningError, read_status
from schemas.text import printable

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
        "install it where all can read it: pipx install --global edge-kubelet, or a venv in /opt/edge-kubelet"
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

    def is_packaged(self, service: Service) -> bool:
        """Return whether a package of the distribution has installed ``service``."""
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
        with suppress(NotRunningError):
            read_status(source)
            raise ServiceError(f"{service.program.name} runs with {source}: stop it first")
        if taken.is_dir() and any(taken.iterdir()):
            raise ServiceError(f"{place} is in use, and {source} would replace it: move it away first")
        packages = [site.name for site in sites_in(source / OWN_KINDS)]
        for name in packages:
            if self._at(service.kinds / name).exists():
                raise ServiceError(f"{service.kinds / name} is there: `kind uninstall` first")
        return packages

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
        new = place.with_name(f"{place.name}.new")
        new.write_text(step.text, "utf-8")
        new.chmod(step.mode)
        new.replace(place)

    def _remove(self, step: Remove) -> None:
        place = self._at(step.path)
        if not place.is_dir() or place.is_symlink():
            place.unlink(missing_ok=True)
        elif not step.if_empty:
            shutil.rmtree(place)
        elif not any(place.iterdir()):
            place.rmdir()
