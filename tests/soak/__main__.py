"""Call for some minutes, and see that nothing grows: ``python -P -m tests.soak --minutes N``."""

import argparse
import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.chaos.checker import violations
from tests.chaos.history import summary
from tests.soak.plot import drawn
from tests.soak.run import WATCHED, run
from tests.soak.slopes import MIB, Slope, slopes

SEED = 1
SHORTEST_MIN = 0.5
STOPPED = 130
_UNITS = {"memory": ("MiB", MIB)}


def main() -> int:
    """Run, and return the exit code: 1 if something is not flat, or a promise was broken; 130 by Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long (default: 1)")
    parser.add_argument(
        "--directory", type=Path, default=Path("build/soak"), help="where journals, samples and plot are kept"
    )
    options = parser.parse_args()
    if not options.minutes >= SHORTEST_MIN:
        parser.error(f"a run of less than {SHORTEST_MIN} minutes has too few samples to judge")
    directory = options.directory.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    began = time.monotonic()
    seconds = options.minutes * 60
    try:
        history, samples = asyncio.run(run(directory, seconds, SEED, lambda line: print(line, flush=True)))
    except KeyboardInterrupt:
        print(f"stopped before its end: nothing is judged; the journals are in {directory}", file=sys.stderr)
        return STOPPED
    found = slopes(samples, WATCHED)
    plot = directory / "soak.svg"
    plot.write_text(drawn(samples), "ascii")
    print("\n".join(table(found)))
    print(f"{summary(history)}; {time.monotonic() - began:.0f} s in all; plot: {plot}")
    broken = violations(history)
    for violation in broken:
        print(violation, file=sys.stderr)
    return 0 if not broken and all(one.is_flat for one in found) else 1


def table(found: Sequence[Slope]) -> list[str]:
    """Return the slopes as aligned lines."""
    lines = [f"{'process':<8} {'what':<12} {'median':>8} {'slope/h':>9} {'limit/h':>9}"]
    for one in found:
        name, unit = _UNITS.get(one.what, ("", 1))
        numbers = f"{one.middle / unit:>8.1f} {one.per_hour / unit:>+9.2f} {one.limit_per_hour / unit:>9.2f}"
        verdict = "flat" if one.is_flat else "NOT FLAT"
        lines.append(f"{one.process:<8} {one.what:<12} {numbers} {name:<4}{verdict}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
