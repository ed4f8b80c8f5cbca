"""Programs that others wrote for Node.js, as ``tests/conformance/package-lock.json`` pins them.

Node.js itself is one of them, so that what a machine happens to have makes no difference.
"""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent.parent / "conformance"
INSTALL = "npm ci --ignore-scripts --no-audit --no-fund --prefix tests/conformance"
TIMEOUT_S = 90

_BIN = DIRECTORY / "node_modules" / ".bin"
# npm leaves a package out without a message when it is optional, as Node.js for the other processors is.
_NEEDED = ("node", "conformance", "mcp-inspector", "mcp-server-everything", "claude", "codex")
_LIBRARIES = ("oidc-provider",)


def missing() -> str | None:
    """Return why the programs cannot be run, or None if they can."""
    absent = [name for name in _NEEDED if not (_BIN / name).exists()]
    absent += [name for name in _LIBRARIES if not (_BIN.parent / name).exists()]
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

    def claude_code(self) -> str:
        """Return the path of Claude Code, which is a program of the processor and needs no Node.js."""
        [program] = (DIRECTORY / "node_modules" / "@anthropic-ai").glob("claude-code-*/claude")
        return str(program)

    @asynccontextmanager
    async def everything_over_http(self, port: int, transport: str = "streamableHttp") -> AsyncIterator[str]:
        """Run the reference server on the loopback address during the block; the value is its URL.

        ``transport``: ``streamableHttp``, or ``sse``, which was before it.
        """
        node, *words = self.command("mcp-server-everything", transport)
        process = await asyncio.create_subprocess_exec(
            node,
            "--import",
            (DIRECTORY / "loopback_only.mjs").as_uri(),
            *words,
            env={**self.environment(), "PORT": str(port)},
            cwd=self.home,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stderr is not None
        try:
            async with asyncio.timeout(TIMEOUT_S):
                while b" on port " not in (line := await process.stderr.readline()):
                    assert line, "the server ended by itself"
            yield f"http://127.0.0.1:{port}/{'sse' if transport == 'sse' else 'mcp'}"
        finally:
            process.terminate()
            await process.communicate()

    def run(
        self, program: str, *arguments: str, stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        return self.execute(self.command(program, *arguments), stdin, environment)

    def execute(
        self, command: Sequence[str], stdin: str = "", environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a whole command line to its end."""
        return subprocess.run(
            command,
            input=stdin,
            env={**self.environment(), **(environment or {})},
            cwd=self.home,
            capture_output=True,
            encoding="utf-8",
            timeout=TIMEOUT_S,
            check=False,
        )
