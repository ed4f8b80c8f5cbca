"""Fuzzes every parser, or those named: ``python -P -m tests.fuzz --minutes N [TARGET...]``.

Each target runs in a process of its own (``tests.fuzz.one``), as many at a time as there are cores, and goes
on from what earlier runs found below ``build/fuzz``. A finding is kept there, and the exit code is 1.
``--keep`` runs nothing: it puts small inputs out of all that were found into ``tests/fuzz/corpus``.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Final

from tests.fuzz.corpus import KEPT, keep
from tests.fuzz.run import AtherisMissingError, Outcome, Runner
from tests.fuzz.targets import TARGETS

ROOT: Final = Path(__file__).parents[2]
FOUND, UNAVAILABLE = 1, 69


def main() -> int:
    """Run the targets, or keep what they found; return the exit code."""
    options = _options()
    names = options.targets or list(TARGETS)
    runner = Runner(ROOT / "build" / "fuzz", KEPT)
    if options.keep:
        print(f"{keep(runner.directory / 'corpus', names)} inputs in {KEPT.relative_to(ROOT)}")
        return 0
    try:
        return _run(runner, names, options.minutes * 60, options.jobs)
    except AtherisMissingError as error:
        print(error, file=sys.stderr)
        return UNAVAILABLE


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -P -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"{', '.join(TARGETS)} (default: all)")
    parser.add_argument("--minutes", type=float, default=10, help="for all targets together (default: 10)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="at a time (default: cores)")
    parser.add_argument("--keep", action="store_true", help="put what was found into the corpus in git")
    options = parser.parse_args()
    if unknown := set(options.targets) - TARGETS.keys():
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    return options


def _run(runner: Runner, names: Sequence[str], seconds: float, jobs: int) -> int:
    shares = sum(TARGETS[name].share for name in names)
    each = {name: max(1.0, seconds * jobs * TARGETS[name].share / shares) for name in names}
    print(
        f"{'':26} {'inputs':>12} {'a second':>9} {'frames':>10} {'edges':>7} {'kept':>6}  finding", flush=True
    )
    sys.stdout.flush()
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(jobs) as pool:
        running = [pool.submit(runner.run, name, each[name]) for name in names]
        for done in as_completed(running):
            outcome = done.result()
            outcomes.append(outcome)
            print(_row(outcome), flush=True)
    inputs, frames = sum(each.inputs for each in outcomes), sum(each.frames for each in outcomes)
    findings = [each for each in outcomes if each.finding]
    print(f"{'all':26} {inputs:>12,} {'':>9} {frames:>10,}")
    figures = {
        outcome.target: outcome.figures() for outcome in sorted(outcomes, key=lambda each: each.target)
    }
    (runner.directory / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
    for outcome in findings:
        print(f"\n{outcome.target}: {outcome.finding}\n{outcome.report}", file=sys.stderr)
    return FOUND if findings else 0


def _row(outcome: Outcome) -> str:
    a_second = outcome.inputs / outcome.seconds if outcome.seconds else 0
    return (
        f"{outcome.target:26} {outcome.inputs:>12,} {a_second:>9,.0f} {outcome.frames:>10,}"
        f" {outcome.edges:>7,} {outcome.kept:>6,}"
        f"  {outcome.finding or '-'}"
    )


if __name__ == "__main__":
    sys.exit(main())
