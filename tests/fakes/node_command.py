"""The command line of the node, run in the process of the test."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DONE, NO, USAGE, CANNOT_RUN, FAULT, CONFIG = 0, 1, 2, 3, 70, 78
NOWHERE = ("--broker", "127.0.0.1:9", "--relay", "http://127.0.0.1:9")


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: bytes
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        facts = json.loads(self.out)
        assert isinstance(facts, dict)
        return facts

    def said_in_one_line(self, text: str) -> bool:
        """Return whether standard error is one line, ours, with ``text`` in it."""
        return self.err.startswith("kubelet: ") and self.err.count("\n") == 1 and text in self.err


Run = Callable[..., Ran]


def run_as_process(*arguments: str | Path) -> Ran:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "kubelet", *map(str, arguments)],
        check=False,
        capture_output=True,
        timeout=60,
    )
    assert b"Traceback" not in done.stderr
    return Ran(done.returncode, done.stdout, done.stderr.decode())


def everything_in(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()} if directory.exists() else {}


GARBAGE = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
DAMAGED = "-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n"
