"""Plants faults in a copy of the tree, and runs the quick tests that must catch them, for ``make mutations``.

The faults are in ``mutations.toml``. Ends with 1 if one survives, if its text is not in exactly one place of
the product any more, or if its tests fail without it. ``--only NAME`` plants that one; it may be given
several times.
"""

import argparse
import ast
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
PRODUCT = ("relay", "kubelet", "schemas")
FAULTS = Path(__file__).with_suffix(".toml")

_LONGEST_S = 600
_HUNG_S = 60
_FAILED = frozenset({1, 2})
"""How pytest ends when a test fails, or a module of the product cannot be imported any more."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is replaced by what, and where a test must fail then."""

    name: str
    before: str
    after: str
    tests: list[str]
    integration: bool = False


class StaleError(Exception):
    """The table of faults does not fit the tree any more."""


class Copy:
    """A copy of the tree below ``root``, from which all processes that it starts import."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._planted = 0
        tracked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(tracked, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            source, copied = ROOT / name, root / name
            if source.is_file():
                copied.parent.mkdir(parents=True, exist_ok=True)
                copied.write_bytes(source.read_bytes())
                copied.chmod(source.stat().st_mode)
        self._check_imports()
        self._sources = {
            file: file.read_text("utf-8")
            for package in PRODUCT
            for file in sorted((root / package).rglob("*"))
            if file.suffix in {".py", ".json"}
        }

    def _python(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        # Before the environment's own paths, of which one leads to the tree that was copied.
        environment = {**os.environ, "PYTHONPATH": str(self._root)}
        command = [sys.executable, "-P", *arguments]
        return subprocess.run(  # noqa: PLW1510 - the caller judges how it ends
            command, cwd=self._root, env=environment, capture_output=True, text=True, timeout=_LONGEST_S
        )

    def _check_imports(self) -> None:
        names = ", ".join(PRODUCT)
        shown = self._python("-c", f"import {names}; print(*(each.__file__ for each in ({names})))")
        if shown.stdout.split() != [str(self._root / package / "__init__.py") for package in PRODUCT]:
            raise StaleError(f"the copy does not import itself: {shown.stdout} {shown.stderr}")

    def run(self, faults: Iterable[Fault]) -> subprocess.CompletedProcess[str]:
        """Run the tests of ``faults`` until one fails."""
        faults = list(faults)
        paths = sorted({str(path) for fault in faults for name in fault.tests for path in self._found(name)})
        left_out = "long" if any(fault.integration for fault in faults) else "integration"
        options = ("-q", "-x", "-m", f"not {left_out}", "-p", "no:cacheprovider", f"--timeout={_HUNG_S}")
        return self._python("-m", "pytest", *options, *paths)

    def _found(self, name: str) -> list[Path]:
        place, tests = PurePath(name), self._root / "tests"
        found = [*tests.rglob(str(place.with_name(f"test_{place.name}.py")))]
        found += [path for path in tests.rglob(name) if path.is_dir()]
        if not found:
            raise StaleError(f"no tests are called {name}")
        return found

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """Have ``fault`` in the copy."""
        files = [file for file, text in self._sources.items() for _ in range(text.count(fault.before))]
        if len(files) != 1:
            where = ", ".join(str(file.relative_to(self._root)) for file in files) or "nowhere"
            raise StaleError(f"its text has to be in one place, and is in: {where}")
        (file,) = files
        text = self._sources[file].replace(fault.before, fault.after)
        try:
            ast.parse(text) if file.suffix == ".py" else json.loads(text)
        except (ValueError, SyntaxError):
            raise StaleError("what replaces its text does not fit there") from None
        self._write(file, text)
        try:
            yield
        finally:
            self._write(file, self._sources[file])

    def _write(self, file: Path, text: str) -> None:
        # Each time another time of change, by which Python knows that a compiled module is out of date.
        self._planted += 1
        file.write_text(text, "utf-8")
        os.utime(file, (self._planted, self._planted))


def faults() -> list[Fault]:
    """Return the faults of the table."""
    table = tomllib.loads(FAULTS.read_text("utf-8"))
    return [Fault(name, **members) for name, members in table.items()]


def outcome(copy: Copy, fault: Fault) -> tuple[str, str]:
    """Return what became of ``fault``, and the test that has caught it or what is wrong."""
    try:
        with copy.planted(fault):
            done = copy.run([fault])
    except StaleError as error:
        return "stale", str(error)
    except subprocess.TimeoutExpired:
        return "killed", f"its tests take longer than {_LONGEST_S} s"
    if done.returncode == 0:
        return "survived", "all of " + ", ".join(fault.tests) + " pass"
    if done.returncode not in _FAILED:
        return "stale", f"pytest ended with {done.returncode}: {done.stderr[-200:]}"
    lines = done.stdout.splitlines()
    failed = next((line for line in lines if line.startswith(("FAILED ", "ERROR "))), "FAILED no test")
    return "killed", failed.partition(" ")[2].partition(" - ")[0]


def main() -> int:
    """Plant the faults, and return the status of the process."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.house.mutations", description=__doc__)
    parser.add_argument("--only", action="append", metavar="NAME", help="one of the faults")
    only = parser.parse_args().only
    planted = [fault for fault in faults() if only is None or fault.name in only]
    if only is not None and (unknown := {*only} - {fault.name for fault in planted}):
        parser.error(f"no such fault: {', '.join(sorted(unknown))}")
    with TemporaryDirectory(prefix="mutations-") as directory:
        copy = Copy(Path(directory).resolve())
        for integration in (False, True):
            of_kind = [fault for fault in planted if fault.integration is integration]
            if of_kind and (before := copy.run(of_kind)).returncode != 0:
                print(f"The tests fail without a fault:\n{before.stdout[-2000:]}{before.stderr[-2000:]}")
                return 1
        outcomes = []
        for fault in planted:
            result, why = outcome(copy, fault)
            outcomes.append(result)
            print(f"{result:9} {fault.name:50} {why}", flush=True)
    caught = outcomes.count("killed")
    print(f"\n{caught} of {len(outcomes)} faults were caught")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
