"""Fuzz a parser for a while: ``python -P -m tests.fuzz TARGET --seconds N``. Prints a finding's seed."""

import argparse
import random
import sys
import time
from itertools import count

from tests.fuzz.mutation import mutated
from tests.fuzz.targets import TARGETS


def main() -> int:
    """Run until the time is over, or until something is found; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -P -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--seconds", type=float, default=60, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="begin with this seed (default: any)")
    options = parser.parse_args()
    target = TARGETS[options.target]
    first = options.seed if options.seed is not None else random.SystemRandom().getrandbits(48)
    until = time.monotonic() + options.seconds
    for seed in count(first):
        data = mutated(target.samples, random.Random(seed))  # noqa: S311 - a source of changes
        try:
            target.parse(data)
        except BaseException:
            print(f"found with --seed {seed}: {data!r}", file=sys.stderr)
            raise
        if time.monotonic() >= until:
            print(f"{seed - first + 1} inputs, nothing found")
            return 0
    raise AssertionError


if __name__ == "__main__":
    sys.exit(main())
