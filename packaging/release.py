"""``make release``: writes all that a release consists of to one directory.

The wheel, the source distribution, the Debian packages and an apt source of them, the images, the bills of
materials, the section of the change log, checksums, and signatures where a key is given. What is fetched
(wheels, Debian's packages for the roots) stays below ``build/release``, and the next run uses it again. Must
not publish anything.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from hashlib import file_digest, sha256
from pathlib import Path

_PROJECT = Path(__file__).resolve().parents[1]
_DEB = _PROJECT / "packaging/deb"
_IMAGE = _PROJECT / "packaging/image"
_FETCHED = _PROJECT / "build/release"
_PYTHON = Path(sys.executable)
_ROOT_PACKAGES = "python3,python3-venv,dpkg-dev,binutils"
_BASE_PACKAGES = "python3,python3-venv"
_ARCHITECTURES = ("amd64", "arm64")
_NOT_PUBLIC = re.compile(r"\.example\b")
_FOR_THE_BUILD = (
    "SOURCE_DATE_EPOCH",
    "DPKG_DEB_COMPRESSOR_TYPE",
    "DPKG_DEB_COMPRESSOR_LEVEL",
)
_REFUSED = 3


@dataclass(frozen=True, slots=True)
class Debian:
    """A release of Debian: its Python, and the minor version of its glibc."""

    suite: str
    number: str
    python: str
    glibc: str


DEBIANS = (Debian("bookworm", "12", "3.11", "36"), Debian("trixie", "13", "3.13", "41"))


class ReleaseError(Exception):
    """No release can be made; the text says why, and what to do."""


@dataclass(frozen=True, slots=True)
class Keys:
    """What signs: the name of an OpenPGP key, and the file of a minisign key."""

    openpgp: str | None
    minisign: Path | None


class Release:
    """What is written to ``out``, with the files of the time ``epoch``."""

    def __init__(self, out: Path, epoch: int) -> None:
        project = tomllib.loads((_PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
        self.version: str = project["version"]
        self.out = out / f"edge-kubelet-{self.version}"
        self.pool = self.out / "apt/pool"
        self._contacts: list[str] = [
            project["maintainers"][0]["email"],
            project["urls"]["Homepage"],
            project["urls"]["Security"],
        ]
        self._epoch = epoch
        self._environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}

    def check(self) -> None:
        """Refuse what must not be published.

        Raises:
            ReleaseError: the contacts are examples, or the change log has no section of this version.
        """
        for contact in self._contacts:
            if _NOT_PUBLIC.search(contact):
                raise ReleaseError(
                    f"{contact} is an example: write yours into pyproject.toml, or add --draft (DRAFT=yes)"
                )
        security = self._contacts[-1].removeprefix("mailto:")
        if security not in (_PROJECT / "SECURITY.md").read_text("utf-8"):
            raise ReleaseError(f"SECURITY.md does not name {security}, the contact of pyproject.toml")
        title = next(iter(_sections()))[0]
        if not title.startswith(f"{self.version} "):
            raise ReleaseError(
                f"CHANGELOG.md begins with {title!r}, not with {self.version}, the version of pyproject.toml"
            )

    def distributions(self) -> Path:
        """Write the wheel and the source distribution, and return the wheel."""
        man = _PROJECT / "build/man"
        self._run(_PYTHON, "-P", "packaging/man_pages.py", man)
        for target in ("sdist", "wheel"):
            self._run(_PYTHON, "-P", "-m", "hatchling", "build", "--target", target, "--directory", self.out)
        (wheel,) = self.out.glob("*.whl")
        return wheel

    def packages_of_this_machine(self, wheel: Path) -> None:
        """Write the Debian packages for the release and the architecture of this machine."""
        debian = _debian_of_this_machine()
        architecture = _output("dpkg", "--print-architecture")
        wheels = self._wheels(wheel, debian, architecture)
        self._run(_DEB / "build", wheels, _PROJECT / "build/man", self.pool / debian.suite)

    def packages(self, wheel: Path, debian: Debian, architecture: str) -> None:
        """Write the Debian packages for a release and an architecture, from a root of that release."""
        root = _FETCHED / f"{debian.suite}-{architecture}.tar"
        self._run(_DEB / "root", "create", root, debian.suite, architecture, _ROOT_PACKAGES)
        wheels = self._wheels(wheel, debian, architecture)
        pool = self.pool / debian.suite
        pool.mkdir(parents=True, exist_ok=True)
        places = (f"{_PROJECT}:/project", f"{wheels}:/wheels", f"{pool}:/pool")
        kept = [f"{name}={self._environment[name]}" for name in _FOR_THE_BUILD if name in self._environment]
        build = ("/project/packaging/deb/build", "/wheels", "/project/build/man", "/pool")
        self._run(_DEB / "root", "run", root, *places, "--", "env", *kept, *build)

    def images(self, wheel: Path, debian: Debian, architecture: str) -> None:
        """Write the images of hub and node, on a root of that release, and how they are run."""
        root = _FETCHED / f"base-{debian.suite}-{architecture}.tar"
        self._run(_DEB / "root", "create", root, debian.suite, architecture, _BASE_PACKAGES)
        wheels = self._wheels(wheel, debian, architecture)
        for part in ("node", "relay"):
            shutil.copy(_PROJECT / f"requirements-{part}.lock", wheels)
        self._run(_IMAGE / "build", root, wheels, architecture, self.version, self.out)
        compose = (_IMAGE / "compose.yaml").read_text("utf-8").replace("VERSION", self.version)
        (self.out / "compose.yaml").write_text(compose, "utf-8")

    def apt_source(self, earlier: Path | None, key: str | None) -> None:
        """Write the indexes of the apt source, which has a suite for each release of Debian.

        It goes on offering the packages of ``earlier``, another source: apt goes back to them.
        """
        if earlier:
            shutil.copytree(earlier / "pool", self.pool, dirs_exist_ok=True)
        for suite in sorted(each.name for each in self.pool.iterdir()):
            dist = self.out / "apt/dists" / suite
            for architecture in _ARCHITECTURES:
                index = dist / f"main/binary-{architecture}/Packages"
                index.parent.mkdir(parents=True)
                index.write_text(
                    self._ftparchive("--arch", architecture, "packages", f"pool/{suite}"), "utf-8"
                )
                self._run("gzip", "-9nk", index)
            facts = {
                "Origin": "Edge kubelet",
                "Label": "Edge kubelet",
                "Suite": suite,
                "Codename": suite,
                "Components": "main",
                "Architectures": " ".join(_ARCHITECTURES),
                "Date": format_datetime(datetime.fromtimestamp(self._epoch, UTC), usegmt=True),
            }
            told = [f"-oAPT::FTPArchive::Release::{name}={value}" for name, value in facts.items()]
            (dist / "Release").write_text(self._ftparchive(*told, "release", f"dists/{suite}"), "utf-8")
            if key:
                sign = ("gpg", "--batch", "--yes", "--local-user", key)
                self._run(*sign, "--clearsign", "--output", dist / "InRelease", dist / "Release")

    def bills_of_materials(self) -> None:
        """Write what each lock has, in the form of CycloneDX."""
        lock = (_PROJECT / "requirements-release.lock").read_bytes()
        tools = _FETCHED / f"tools-{sha256(lock).hexdigest()[:12]}"
        if not (tools / "bin/cyclonedx-py").exists():
            self._run(_PYTHON, "-P", "-m", "venv", tools)
            install = (
                "install",
                "--quiet",
                "--quiet",
                "--disable-pip-version-check",
                "--no-deps",
                "--require-hashes",
            )
            self._run(tools / "bin/pip", *install, "-r", "requirements-release.lock")
        for part in ("node", "agent", "relay"):
            self._run(
                *(
                    tools / "bin/python",
                    "-P",
                    "-W",
                    "ignore",
                    "-m",
                    "cyclonedx_py",
                    "requirements",
                    "--output-reproducible",
                    "--of",
                    "JSON",
                ),
                *("--pyproject", "pyproject.toml", "--mc-type", "application"),
                *("-o", self.out / f"edge-kubelet-{self.version}-{part}.cdx.json"),
                f"requirements-{part}.lock",
            )

    def notes(self) -> None:
        """Write the section of the change log: of a draft, what is not released yet."""
        title, text = next(iter(_sections()))
        (self.out / "CHANGES.md").write_text(f"# {title}\n\n{text.strip()}\n", "utf-8")

    def checksums(self, key: Path | None) -> None:
        """Write the checksum of each file, and sign both the list and the files."""
        files = sorted(file for file in self.out.rglob("*") if file.is_file())
        lines = []
        for file in files:
            with file.open("rb") as opened:
                digest = file_digest(opened, "sha256").hexdigest()
            lines.append(f"{digest}  {file.relative_to(self.out)}\n")
        sums = self.out / "SHA256SUMS"
        sums.write_text("".join(lines), "utf-8")
        if key:
            # A comment of one's own: the usual one has the time of the signature.
            comment = f"edge-kubelet {self.version}"
            of_release = [file for file in files if "apt" not in file.relative_to(self.out).parts]
            self._run("minisign", "-S", "-s", key, "-t", comment, "-m", sums, *of_release)

    def _wheels(self, wheel: Path, debian: Debian, architecture: str) -> Path:
        directory = _FETCHED / f"wheels-{debian.suite}-{architecture}"
        directory.mkdir(parents=True, exist_ok=True)
        self._run(_DEB / "fetch", directory, debian.python, architecture, debian.glibc)
        for older in directory.glob("edge_kubelet-*.whl"):
            older.unlink()
        shutil.copy(wheel, directory)
        return directory

    def _ftparchive(self, *arguments: str) -> str:
        return _output("apt-ftparchive", *arguments, directory=self.out / "apt") + "\n"

    def _run(self, *command: str | Path) -> None:
        subprocess.run(command, cwd=_PROJECT, env=self._environment, check=True)  # noqa: S603  # our own


def _output(*command: str, directory: Path = _PROJECT) -> str:
    ran = subprocess.run(  # noqa: S603  # our own
        command, cwd=directory, check=True, stdout=subprocess.PIPE, text=True
    )
    return ran.stdout.strip()


def _sections() -> Iterator[tuple[str, str]]:
    """Return the title and the text of each section of the change log, the newest first."""
    parts = re.split(r"^## (.+)\n", (_PROJECT / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)
    yield from zip(parts[1::2], parts[2::2], strict=True)


def _debian_of_this_machine() -> Debian:
    facts = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text("utf-8").splitlines() if "=" in line
    )
    for debian in DEBIANS:
        if facts.get("VERSION_CODENAME", "").strip('"') == debian.suite:
            return debian
    raise ReleaseError(f"this machine has none of Debian {', '.join(each.number for each in DEBIANS)}")


def _programs_of(*, roots: bool, keys: Keys) -> Iterator[tuple[str, str]]:
    """Return each program that is needed, and the package of Debian that has it."""
    yield "apt-ftparchive", "apt-utils"
    yield "dpkg-shlibdeps", "dpkg-dev"
    if roots:
        yield "mmdebstrap", "mmdebstrap"
        yield "buildah", "buildah"
    if keys.openpgp:
        yield "gpg", "gnupg"
    if keys.minisign:
        yield "minisign", "minisign"


def main(arguments: Sequence[str]) -> int:
    """Write a release; return 3 where none can be made."""
    parser = argparse.ArgumentParser(
        prog="make release", description="Writes all that a release consists of."
    )
    parser.add_argument(
        "--out", type=Path, default=_PROJECT / "dist", help="where it is written, by its version"
    )
    parser.add_argument("--draft", action="store_true", help="not to be published: contacts may be examples")
    parser.add_argument(
        "--here", action="store_true", help="Debian packages for this machine alone, without a root"
    )
    parser.add_argument(
        "--arch", action="append", choices=_ARCHITECTURES, help="of the Debian packages (all; also twice)"
    )
    parser.add_argument(
        "--earlier", type=Path, metavar="DIR", help="the apt source to go on with: its packages stay"
    )
    parser.add_argument("--openpgp-key", metavar="KEY", help="of gpg: signs the apt source")
    parser.add_argument("--minisign-key", type=Path, metavar="FILE", help="signs the files")
    given = parser.parse_args(arguments)
    keys = Keys(given.openpgp_key, given.minisign_key)
    epoch = os.environ.get("SOURCE_DATE_EPOCH") or _output("git", "log", "-1", "--format=%ct")
    release = Release(given.out.resolve(), int(epoch))
    try:
        if not given.draft:
            release.check()
        _check_machine(keys, release.out, earlier=given.earlier, is_here=given.here)
        _write(release, given.arch or _ARCHITECTURES, keys, earlier=given.earlier, is_here=given.here)
    except ReleaseError as refused:
        print(f"make release: {refused}", file=sys.stderr)  # noqa: T201  # a program
        return _REFUSED
    except subprocess.CalledProcessError as failed:
        print(f"make release: {failed.cmd[0]} failed ({failed.returncode})", file=sys.stderr)  # noqa: T201
        return 1
    print(release.out)  # noqa: T201
    return 0


def _check_machine(keys: Keys, out: Path, *, earlier: Path | None, is_here: bool) -> None:
    for program, package in _programs_of(roots=not is_here, keys=keys):
        if shutil.which(program) is None:
            raise ReleaseError(f"{program} is not here: apt install {package}")
    if not is_here and os.geteuid() != 0:
        raise ReleaseError("a root of Debian takes root; --here builds for this machine without one")
    if earlier and not (earlier / "pool").is_dir():
        raise ReleaseError(f"{earlier} is no apt source of ours: it has no directory pool")
    if earlier and earlier.resolve().is_relative_to(out):
        raise ReleaseError(f"{out} is made anew: move {earlier} out of it first")


def _write(
    release: Release, architectures: Sequence[str], keys: Keys, *, earlier: Path | None, is_here: bool
) -> None:
    shutil.rmtree(release.out, ignore_errors=True)
    release.out.mkdir(parents=True)
    wheel = release.distributions()
    if is_here:
        release.packages_of_this_machine(wheel)
    else:
        for debian in DEBIANS:
            for architecture in architectures:
                release.packages(wheel, debian, architecture)
        for architecture in architectures:
            release.images(wheel, DEBIANS[-1], architecture)
    release.apt_source(earlier, keys.openpgp)
    release.bills_of_materials()
    release.notes()
    release.checksums(keys.minisign)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
