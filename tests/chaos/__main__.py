"""Make faults, and check what they left: ``python -P -m tests.chaos --faults N``. Prints a failure's seed."""

import argparse
import asyncio
import random
import shutil
import sys
import time
from functools import partial
from pathlib import Path

from tests.chaos.checker import violations
from tests.chaos.coverage import found_elsewhere, shortfalls
from tests.chaos.history import summary
from tests.chaos.run import run
from tests.chaos.topology import ONE_RELAY, THREE_RELAYS

TOPOLOGIES = {len(topology.relays): topology for topology in (ONE_RELAY, THREE_RELAYS)}


def main() -> int:
    """Run, and return the exit code; the journals of a run that failed are kept."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument(
        "--relays", type=int, choices=list(TOPOLOGIES), default=1, help="how many (default: 1)"
    )
    parser.add_argument(
        "--seed", type=int, default=None, help="replay the schedule of this seed (default: any)"
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("build/chaos"), help="where the journals are kept"
    )
    options = parser.parse_args()
    if options.faults < 1:
        parser.error("make at least one fault")
    seed = options.seed if options.seed is not None else random.SystemRandom().getrandbits(32)
    directory = (options.directory / str(seed)).resolve()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    kept = f"seed {seed}, journals in {directory}"
    print(kept, flush=True)
    began = time.monotonic()
    topology = TOPOLOGIES[options.relays]
    try:
        running = run(directory, seed, options.faults, partial(print, flush=True), topology)
        history = asyncio.run(running)
    except BaseException:
        print(f"failed: {kept}", file=sys.stderr)
        raise
    found, lacking = violations(history), shortfalls(history, options.faults, topology)
    for problem in (*found, *lacking):
        print(problem, file=sys.stderr)
    took_s = time.monotonic() - began
    print(f"{options.faults} faults in {took_s:.0f} s, {len(found)} violations; {summary(history)}")
    print(f"{found_elsewhere(history)} keys found by way of another relay")
    if found or lacking:
        print(f"failed: {kept}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
