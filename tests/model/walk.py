"""``make walk STEPS=n SEED=s``: a random walk through the model of delivery, which ``seed`` repeats.

Prints how often each thing happened: a walk that never resumes a session shows nothing. On a violation it
prints the seed, the step and the choices before it, and exits with 1.
"""

import argparse
import random
import sys
import time
from collections import deque
from contextlib import closing

from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from tests.model.choices import WEIGHTS, Choice
from tests.model.history import History, ViolationError
from tests.model.world import World

_BATCH = 1000
_PICKS = 1 << 16


def walk(world: World, steps: int, seed: int) -> History:
    """Make ``steps`` choices at random.

    Raises:
        ViolationError: a property does not hold; its notes are the seed, the step and the last choices.
    """
    chance = random.Random(seed)  # noqa: S311 - it is to be repeated
    actions, weights = tuple(WEIGHTS), tuple(WEIGHTS.values())
    last: deque[Choice] = deque(maxlen=40)
    step = 0
    try:
        while step < steps:
            for action in chance.choices(actions, weights, k=min(_BATCH, steps - step)):
                step += 1
                last.append(Choice(action, chance.randrange(_PICKS)))
                world.step(last[-1])
        world.finish()
    except ViolationError as violation:
        violation.add_note(f"seed {seed}, step {step}, after {[(c.action.name, c.pick) for c in last]}")
        raise
    return world.history


def main() -> int:
    """Walk as the arguments say; return the exit code."""
    parser = argparse.ArgumentParser(prog="make walk", description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}, {arguments.steps} steps", flush=True)
    began = time.monotonic()
    try:
        with closing(World(FrameReader(SchemaRegistry()))) as world:
            history = walk(world, arguments.steps, arguments.seed)
    except ViolationError as violation:
        print(f"violated: {violation}", *violation.__notes__, sep="\n", file=sys.stderr)
        return 1
    minutes = (time.monotonic() - began) / 60
    for name, times in sorted(history.counts.items()):
        print(f"  {times:9}  {name}")
    print(f"{len(history.calls)} calls, no violation; {arguments.steps / minutes:.0f} steps a minute")
    return 0


if __name__ == "__main__":
    sys.exit(main())
