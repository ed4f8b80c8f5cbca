"""Runs one target in a process of its own, and reads what libFuzzer says of it.

Must not choose what is run for how long.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tests.fuzz.frame_counts import FILE_VARIABLE, count_in
from tests.fuzz.one import ATHERIS_IS_MISSING

_EXECUTED: Final = re.compile(r"stat::number_of_executed_units:\s+(\d+)")
_COVERED: Final = re.compile(r"cov: (\d+) ft: (\d+)")
_WRITTEN: Final = re.compile(r"Test unit written to (\S+)")
_SLACK_S: Final = 600
"""What a process may take beyond its time: to import, to go through what was kept, and to end."""
_REPORT_LINES: Final = 40
_DID_NOT_END: Final = 124
"""In the place of the exit code of a process that was ended for that; as of ``timeout`` (1)."""


class AtherisMissingError(Exception):
    """There is no coverage guidance for this Python; the text says what to do."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of one target came to.

    Attributes:
        inputs: how many were tried.
        frames: how many frames of live sessions the other end has read of them.
        edges: the branches of our code that they reached together.
        kept: how many inputs are kept because they reached what none before them did.
        finding: the file with the input that was found; empty if none was.
        report: the end of what libFuzzer wrote, and of the traceback, if something was found.
    """

    target: str
    seconds: float
    inputs: int
    frames: int
    edges: int
    kept: int
    finding: str
    report: str

    def figures(self) -> dict[str, Any]:
        """Return the numbers, for programs."""
        return {
            "inputs": self.inputs,
            "frames": self.frames,
            "seconds": round(self.seconds, 1),
            "edges": self.edges,
            "kept": self.kept,
            "finding": self.finding,
        }


class Runner:
    """Runs targets with their corpora below ``directory``; each begins from its samples and from ``kept``."""

    def __init__(self, directory: Path, kept: Path) -> None:
        self.directory = directory
        self._kept = kept

    def corpus(self, target: str) -> Path:
        """Return the directory of what runs of ``target`` have found."""
        return _made(self.directory / "corpus" / target)

    def run(self, target: str, seconds: float) -> Outcome:
        """Fuzz ``target`` for a time.

        Raises:
            AtherisMissingError: atheris is not installed.
        """
        findings = _made(self.directory / "findings" / target)
        options = [f"-max_total_time={seconds:.0f}", f"-artifact_prefix={findings}/", "-print_funcs=0"]
        begun = time.monotonic()
        done = self.start(target, [*options, *self._directories(target)], seconds + _SLACK_S)
        said = done.stderr
        found = _WRITTEN.search(said)
        covered = _COVERED.findall(said)
        failed = done.returncode != 0
        finding = found[1] if found else f"exit code {done.returncode}" if failed else ""
        return Outcome(
            target,
            time.monotonic() - begun,
            int(executed[1]) if (executed := _EXECUTED.search(said)) else 0,
            count_in(self._frame_count(target)),
            int(covered[-1][0]) if covered else 0,
            sum(1 for _ in self.corpus(target).iterdir()),
            finding,
            _end_of(said, done.stdout) if failed else "",
        )

    def start(
        self, target: str, options: Sequence[str], timeout_s: float
    ) -> "subprocess.CompletedProcess[str]":
        """Run ``tests.fuzz.one`` with ``options``, and wait for its end.

        Raises:
            AtherisMissingError: as ``run``.
        """
        frames = self._frame_count(target)
        frames.unlink(missing_ok=True)
        try:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "tests.fuzz.one", target, *options],
                check=False,
                capture_output=True,
                text=True,
                errors="backslashreplace",
                timeout=timeout_s,
                env={**os.environ, FILE_VARIABLE: str(frames)},
            )
        except subprocess.TimeoutExpired as error:
            said = (error.stderr or b"").decode("utf-8", "backslashreplace")
            return subprocess.CompletedProcess([], _DID_NOT_END, "", f"{said}\nit did not end")
        if done.returncode == ATHERIS_IS_MISSING:
            raise AtherisMissingError(done.stderr.strip())
        return done

    def _frame_count(self, target: str) -> Path:
        return _made(self.directory / "frames") / target

    def _directories(self, target: str) -> list[str]:
        """Return the directories of inputs: the first one is written to."""
        kept = self._kept / target
        return [str(self.corpus(target)), *([str(kept)] if kept.is_dir() else [])]


def _end_of(*texts: str) -> str:
    return "\n".join(line for text in texts for line in text.splitlines()[-_REPORT_LINES:])


def _made(directory: Path) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    return directory
