"""Programs that others wrote for Node.js, as ``tests/conformance/package-lock.json`` pins them.

Node.js itself is one of them, so that what a machine happens to have makes no difference.
"""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent.parent / "conformance"
INSTALL = "npm ci --ignore-scripts --no-audit --no-fund --prefix tests/conformance"
TIMEOUT_S = 90

_BIN = DIRECTORY / "node_modules" / ".bin"
# npm leaves a package out without a message when it is optional, as Node.js for the other processors is.
_NEEDED = ("node", "conformance", "mcp-inspector")


def missing() -> str | None:
    """Return why the programs cannot be run, or None if they can."""
    absent = [name for name in _NEEDED if not (_BIN / name).exists()]
    return f"not installed: {', '.join(absent)}. Run: {INSTALL}" if absent else None


@dataclass(frozen=True, slots=True)
class NpmPrograms:
    """The programs, run with ``home`` for a home directory: nothing of the user's is read or written."""

    home: Path

    def environment(self) -> dict[str, str]:
        """Return the environment that they run in."""
        path = os.pathsep.join([str(_BIN), os.environ.get("PATH", os.defpath)])
        return {"PATH": path, "HOME": str(self.home), "NO_COLOR": "1"}

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return the command line of ``program``: a name of npm's, or a script of ours."""
        script = DIRECTORY / program if program.endswith(".mjs") else _BIN / program
        return [str(_BIN / "node"), str(script), *arguments]

    def run(
        self, program: str, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run ``program`` to its end."""
        return subprocess.run(
            self.command(program, *arguments),
            input=stdin,
            env={**self.environment(), **(environment or {})},
            cwd=self.home,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
