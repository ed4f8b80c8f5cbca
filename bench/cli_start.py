"""How long a command of the relay takes to start, beside the library that parses commands."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from bench.results import Figure

_RUNS = 15


def measure_cli_start() -> Figure:
    """Return ``cli_start``: seconds of ``relay token list``, the fastest of several runs of each."""
    # As it is installed: with its modules compiled, which the first command does.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    relay = [sys.executable, "-P", "-m", "relay"]
    with tempfile.TemporaryDirectory() as state:
        where = ["--state-dir", state]
        subprocess.run([*relay, "ca", "init", *where], check=True, capture_output=True)
        ours, theirs = [], []
        # In turns, so that other work on the machine slows both.
        for _ in range(_RUNS):
            ours.append(_seconds([*relay, "token", "list", *where]))
            theirs.append(_seconds([sys.executable, "-P", "-c", "import typer"]))
    return Figure("cli_start", min(ours), "s", "python -c 'import typer'", min(theirs), "ratio <= 3")


def _seconds(command: Sequence[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - started
