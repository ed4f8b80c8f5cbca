"""What a run must have had for its checks to mean something. Pure functions of records.

Without keyed calls that were answered no second outcome of one can be found, and a fault that was not made
breaks nothing. Must not judge what happened: ``checker.py`` does.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from math import ceil

from tests.chaos.history import History
from tests.chaos.topology import Topology

_FAULTS_OF_A_KIND = 200
"""Of so many faults, at least one is of each kind: a tenth of what is expected of the rarest."""
_FAULTS_A_KEYED_ANSWER = 20
_FAULTS_A_FOUND_CALL = 40
"""About a fifth of what a run beside other work had."""


def found_elsewhere(history: History) -> int:
    """Return how many keys were answered alike by way of several relays: a retry has found the first call."""
    relays: defaultdict[tuple[str | None, object], set[str]] = defaultdict(set)
    for call in history.calls:
        for answer in call.answers:
            if answer.run is not None:
                relays[call.key, answer.run].add(call.relay)
    return sum(len(answered_by) > 1 for answered_by in relays.values())


def shortfalls(history: History, faults: int, topology: Topology) -> list[str]:
    """Return of what a run of so many ``faults`` had too little."""
    return [
        f"too few {what}: {count}, at least {least} are needed"
        for what, count, least in _needed(history, faults, topology)
        if count < least
    ]


def _needed(history: History, faults: int, topology: Topology) -> Iterator[tuple[str, int, int]]:
    made = Counter(disturbance.kind for disturbance in history.disturbances)
    for kind in sorted({kind for part in topology.weights for kind in topology.faults_of(part)}):
        yield f"faults of the kind {kind}", made[kind], faults // _FAULTS_OF_A_KIND
    if topology.staying is not None:
        answered = sum(answer.run is not None for call in history.calls for answer in call.answers)
        yield "calls with a key that were answered", answered, ceil(faults / _FAULTS_A_KEYED_ANSWER)
        found = found_elsewhere(history)
        yield "keys found by way of another relay", found, ceil(faults / _FAULTS_A_FOUND_CALL)
