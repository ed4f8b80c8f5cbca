"""``make coverage``: how much of each module its own tests cover, lines and branches.

A module that only other modules' tests reach is not tested, whatever a total says. A module's own tests are
in the file of its name, and in those that name a behaviour behind it, as ``test_link_reconnects``; what they
start as processes counts.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("schemas", "kubelet", "relay")
SETTINGS = """
[run]
branch = true
parallel = true
patch = subprocess, execv, _exit
include = {module}
data_file = {data}
sigterm = true
"""


def own_tests(module: Path) -> list[Path]:
    """Return the test files of ``module``: that of its name, and those that name a behaviour behind it."""
    directory = ROOT / "tests" / module.relative_to(ROOT).parent
    of_others = {f"test_{other.stem}.py" for other in module.parent.glob(f"{module.stem}_*.py")}
    files = [*directory.glob(f"test_{module.stem}.py"), *directory.glob(f"test_{module.stem}_*.py")]
    return sorted(path for path in files if path.name not in of_others)


def measure(module: Path, tests: Sequence[Path], directory: Path) -> float:
    """Return the percentage of lines and branches of ``module`` that ``tests`` cover, in any process."""
    settings, report = directory / "coveragerc", directory / "report.json"
    settings.write_text(SETTINGS.format(module=module, data=directory / "data"), "utf-8")
    coverage = [sys.executable, "-P", "-m", "coverage"]
    for step in (
        ["run", f"--rcfile={settings}", "-m", "pytest", "-q", *map(str, tests)],
        ["combine", f"--rcfile={settings}"],
        ["json", f"--rcfile={settings}", "-o", str(report)],
    ):
        subprocess.run([*coverage, *step], cwd=ROOT, check=True, capture_output=True)
    return float(json.loads(report.read_text("utf-8"))["totals"]["percent_covered"])


def main() -> None:
    """Print a line for each module, the least covered last."""
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    modules = [path for path in modules if not path.stem.startswith("__")]
    found: list[tuple[float, str]] = []
    with tempfile.TemporaryDirectory() as name:
        for number, module in enumerate(modules, 1):
            tests = own_tests(module)
            shown = str(module.relative_to(ROOT))
            print(f"\r{number}/{len(modules)} {shown:<40}", end="", file=sys.stderr, flush=True)
            directory = Path(name) / str(number)
            directory.mkdir()
            found.append((measure(module, tests, directory) if tests else -1, shown))
    print(file=sys.stderr)
    for percent, shown in sorted(found, reverse=True):
        print(f"{shown:<34} {'no tests of its own' if percent < 0 else f'{percent:5.1f} %'}")


if __name__ == "__main__":
    main()
