"""How long ``make demo`` takes in a fresh clone until a node has answered: packages are fetched first.

Beside the same in that clone once more, when nothing is to be fetched. Needs a package index.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from bench.results import Figure

_ROOT = Path(__file__).parents[1]
_ANSWER = "    this machine, "
_BOUND_S = 600
_SHOWN = 2000


def measure_first_answer() -> list[Figure]:
    """Return ``demo_first_answer_s``; nothing, and why, if the packages cannot be fetched."""
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-bench-") as name:
        subprocess.run(["git", "clone", "--quiet", _ROOT, name], check=True)  # noqa: S607 - git of PATH
        try:
            first, again = _seconds_to_answer(name), _seconds_to_answer(name)
        except RuntimeError as error:
            print(f"left out: the demo of a fresh clone: {error}")
            return []
    return [Figure("demo_first_answer_s", first, "s", "nothing to fetch", again, "<= 60")]


def _seconds_to_answer(clone: str) -> float:
    """Run ``make demo`` in ``clone`` to its end, and return when its first answer was printed.

    Raises:
        RuntimeError: there was none.
    """
    command = ["timeout", str(_BOUND_S), "make", "--no-print-directory", "demo"]
    options = ["DEMO_ARGS=--once --nodes 0"]
    answered, printed = None, ""
    started = time.perf_counter()
    with subprocess.Popen(
        [*command, *options],
        cwd=clone,
        env={**os.environ, "PIP_NO_CACHE_DIR": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as demo:
        for line in demo.stdout or ():
            printed += line
            if answered is None and line.startswith(_ANSWER):
                answered = time.perf_counter() - started
    if answered is None or demo.returncode != 0:
        raise RuntimeError(f"it ended with {demo.returncode}: {printed[-_SHOWN:]}")
    return answered
