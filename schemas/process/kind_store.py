"""The packages of kinds that a program finds in a directory of its own: one for each, with what it needs.

The program looks there for the kinds that its settings name, and for nothing else. Where it runs them, as the
node's daemon does, what would take the place of a module of it is refused, and what they need must be there.
A relay reads their documents alone, also of packages for other machines. Must not run code of a package.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import Distribution, distributions
from importlib.util import find_spec
from pathlib import Path

from schemas.error_roots import OperatorError
from schemas.files import check_directory, check_unchangeable, read_named, sync_directory
from schemas.kind_packages import GROUP, read_named_kinds, sites_in
from schemas.process.wheel import MAX_WHEEL_BYTES, Wheel, fits_here, name_and_version, normal_name, read_wheel

_MAX_REQUIREMENTS_BYTES = 1 << 20
_PIN = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9._-]*)==(?P<version>[A-Za-z0-9.+!_-]+)"
    r"(?P<marker>\s*;[^#]*?)?(?P<hashes>(\s+--hash=sha256:[0-9a-f]{64})+)"
)
_DOWNLOAD = ("--require-hashes", "--only-binary", ":all:", "--no-deps")
_DIRECTORY_MODE, _FILE_MODE = 0o755, 0o644


class KindStoreError(OperatorError):
    """A package is not installed, or cannot be; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A package that is installed, and its kinds."""

    name: str
    version: str
    kinds: tuple[str, ...]


def read_packages(wheel: Path, requirements: Path | None, *, run_here: bool = True) -> list[Wheel]:
    """Return the package in ``wheel``, and then what ``requirements`` pins by hash.

    ``run_here``: this interpreter is to import them. What is pinned lies beside ``requirements``; pip
    downloads what is missing there, if this interpreter has pip.

    Raises:
        WheelError, KindStoreError: one of them cannot be used, or is missing.
        OSError: a file cannot be read.
    """
    packages = [read_wheel(wheel.name, read_named(wheel, MAX_WHEEL_BYTES), runs_here=run_here)]
    if requirements is not None:
        packages += _pinned(requirements)
    return packages


def _pinned(requirements: Path) -> list[Wheel]:
    lines = read_named(requirements, _MAX_REQUIREMENTS_BYTES).decode("utf-8", "replace").replace("\\\n", " ")
    pins = []
    for line in (text.split(" #")[0].strip() for text in lines.splitlines()):
        if line and not line.startswith("#"):
            if (pin := _PIN.fullmatch(line)) is None:
                raise KindStoreError(f"{requirements}: every line is NAME==VERSION --hash=sha256:…")
            pins.append(pin)
    found = {pin: _beside(requirements.parent, pin) for pin in pins}
    if None in found.values() and find_spec("pip") is not None:
        with tempfile.TemporaryDirectory() as downloads:
            _download(requirements, downloads)
            found = {pin: wheel or _beside(Path(downloads), pin) for pin, wheel in found.items()}
    # One with a marker may be for other machines.
    if missing := [pin["name"] for pin, wheel in found.items() if wheel is None and not pin["marker"]]:
        raise KindStoreError(
            f"no wheel of {', '.join(missing)} with a pinned hash is beside {requirements}: "
            f"pip download {' '.join(_DOWNLOAD)} -r {requirements.name}"
        )
    return [wheel for wheel in found.values() if wheel is not None]


def _beside(directory: Path, pin: re.Match[str]) -> Wheel | None:
    wanted = normal_name(pin["name"]), pin["version"]
    for file in sorted(directory.glob("*.whl")):
        if not fits_here(file.name) or name_and_version(file.name) != wanted:
            continue
        data = read_named(file, MAX_WHEEL_BYTES)
        if f"sha256:{hashlib.sha256(data).hexdigest()}" in pin["hashes"]:
            return read_wheel(file.name, data)
    return None


def _download(requirements: Path, directory: str) -> None:
    command = [sys.executable, "-P", "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += [*_DOWNLOAD, "--dest", directory, "-r", str(requirements)]
    if subprocess.run(command, check=False, stdout=sys.stderr, stdin=subprocess.DEVNULL).returncode:  # noqa: S603 - our own interpreter
        raise KindStoreError(f"pip did not download what {requirements} names")


class KindStore:
    """The packages in ``directory`` of ``program``; ``run_here``: this runs their handlers."""

    def __init__(self, directory: Path, program: str, *, run_here: bool = True) -> None:
        self._directory = directory
        self._program = program
        self._run_here = run_here

    def packages(self) -> list[Installed]:
        return [_installed(site) for site in sites_in(self._directory)]

    def install(self, wheels: Sequence[Wheel], *, dry_run: bool = False) -> Installed:
        """Install the first of ``wheels`` with the others, in place of another version of it.

        Raises:
            KindStoreError: it brings no kind, replaces a module, or lacks something.
            ConfigError: one of its kinds breaks a rule.
            OSError: it cannot be written.
        """
        place = self._directory / wheels[0].name
        if self._run_here:
            _check_modules(wheels, [site for site in sites_in(self._directory) if site != place])
            _check_needs(wheels)
        with self._staged(wheels, dry_run=dry_run) as staged:
            package = _installed(staged)
            if not package.kinds:
                raise KindStoreError(f"{package.name} has no entry point in {GROUP}: it brings no kind")
            read_named_kinds(package.kinds, staged.parent)
            self._check_alone(package)
            if not dry_run:
                os.sync()  # its files first, and then its name
                self._put(staged, place)
        return package

    def uninstall(self, kind: str, *, dry_run: bool = False) -> Installed:
        """Remove the package that brings ``kind``, and return what it was.

        Raises:
            KindStoreError: none does.
            OSError: it cannot be removed.
        """
        for package in self.packages():
            if kind in package.kinds and not dry_run:
                with tempfile.TemporaryDirectory(dir=self._directory, prefix=".") as away:
                    (self._directory / package.name).rename(Path(away) / package.name)
            if kind in package.kinds:
                return package
        raise KindStoreError(
            f"no package in {self._directory} brings {kind}: see `{self._program} kind list`"
        )

    def _make_directory(self) -> None:
        if not self._directory.parent.is_dir():
            raise KindStoreError(
                f"{self._directory.parent} is not there: set the program up first, "
                f"or `{self._program} service install`"
            )
        check_directory(self._directory.parent)
        if not self._directory.is_dir():
            self._directory.mkdir()
            self._directory.chmod(_DIRECTORY_MODE)  # whatever the umask
        check_unchangeable(self._directory)

    def _check_alone(self, package: Installed) -> None:
        for other in self.packages():
            if other.name != package.name and (both := set(other.kinds) & set(package.kinds)):
                raise KindStoreError(f"{other.name} brings {', '.join(sorted(both))} already")

    @contextmanager
    def _staged(self, wheels: Sequence[Wheel], *, dry_run: bool) -> Iterator[Path]:
        """Write ``wheels`` to a directory that is not looked at, and gone afterwards."""
        if not dry_run:
            self._make_directory()
        with tempfile.TemporaryDirectory(dir=None if dry_run else self._directory, prefix=".") as parent:
            site = Path(parent) / wheels[0].name
            for wheel in wheels:
                for path, content in wheel.files.items():
                    _write(site, path, content)
            yield site

    def _put(self, staged: Path, place: Path) -> None:
        if place.exists():
            # Beside it: it goes with the directory that was staged in.
            place.rename(staged.with_name(".replaced"))
        staged.rename(place)
        sync_directory(self._directory)


def _write(site: Path, path: str, content: bytes) -> None:
    file = site / path
    for directory in reversed(file.relative_to(site).parents):
        (site / directory).mkdir(exist_ok=True)
        (site / directory).chmod(_DIRECTORY_MODE)  # whatever the umask
    with file.open("xb") as written:
        os.fchmod(written.fileno(), _FILE_MODE)
        written.write(content)


def _installed(site: Path) -> Installed:
    """Return the package that ``site`` is named after."""
    for each in distributions(path=[str(site)]):
        if normal_name(each.name) == site.name:
            return Installed(site.name, each.version, tuple(_kinds_of(each)))
    raise KindStoreError(f"{site} holds no package of its name: remove it")


def _kinds_of(package: Distribution) -> list[str]:
    return sorted(entry.name for entry in package.entry_points.select(group=GROUP))


def _check_modules(wheels: Sequence[Wheel], others: Sequence[Path]) -> None:
    """See that each module is brought by one package alone: no import finds another than it did."""
    brought: dict[str, str] = {}
    for site in others:
        for package in distributions(path=[str(site)]):
            release = f"{normal_name(package.name)} {package.version}"
            tops = {
                file.parts[0].partition(".")[0]
                for file in package.files or ()
                if ".dist-info" not in str(file)
            }
            brought |= dict.fromkeys(tops, release)
    for wheel in wheels:
        release = f"{wheel.name} {wheel.version}"
        if ours := sorted(filter(_is_there, wheel.modules)):
            raise KindStoreError(
                f"{wheel.name} would replace what the daemon has already ({', '.join(ours)}): leave it out"
            )
        for module in sorted(wheel.modules):
            # The same release of a package may serve two kinds: it is the same code.
            if (other := brought.setdefault(module, release)) != release:
                raise KindStoreError(f"{release} and {other} both bring the module {module}")


def _is_there(module: str) -> bool:
    """Return whether this interpreter finds ``module``; by its finders, whatever has been imported."""
    return any(finder.find_spec(module, None) is not None for finder in sys.meta_path)


def _check_needs(wheels: Sequence[Wheel]) -> None:
    there = {wheel.name for wheel in wheels} | {normal_name(each.name) for each in distributions()}
    for wheel in wheels:
        if missing := sorted(wheel.needs - there):
            raise KindStoreError(
                f"{wheel.name} needs {', '.join(missing)}: pin it by hash in --requirements FILE"
            )
