"""Which faults a run has, in which order, when and how long: all of it follows from the seed.

Must not do anything: the faults are made in ``site.py``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tests.chaos.topology import ONE_RELAY, End, Link, Program, Topology
from tests.fakes.fault_proxy import LinkFault

ROUND = 150
"""After so many faults the system is left alone until it is right again."""

_BETWEEN_S = 0.1
_SHORTEST_S, _LONGEST_S = 0.02, 0.6
# A fault of all connections at once leaves few calls to be disturbed.
_VICTIMS = (None, *range(8))


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at_s: when it begins, in seconds after the beginning of its round.
        for_s: how long it lasts; a process is started again after it.
        which: the one connection of a link that it happens to, as it is counted by the proxy; None: to all.
    """

    at_s: float
    target: Link | Program
    kind: LinkFault | End
    for_s: float
    which: int | None

    def __str__(self) -> str:
        where = "" if self.which is None else f"[{self.which}]"
        return f"{self.at_s:.3f} s: {self.kind} {self.target}{where} for {self.for_s:.3f} s"


def rounds(seed: int, count: int, topology: Topology = ONE_RELAY) -> Iterator[list[Fault]]:
    """Yield ``count`` faults in rounds. Those of a link may overlap, those of a process do not."""
    chance = random.Random(seed)  # noqa: S311 - the same seed is the same schedule
    while count > 0:
        yield _round(chance, min(count, ROUND), topology)
        count -= ROUND


def _round(chance: random.Random, count: int, topology: Topology) -> list[Fault]:
    faults: list[Fault] = []
    free_s: dict[Link | Program, float] = {}
    now_s = 0.0
    parts, weights = list(topology.weights), list(topology.weights.values())
    for _ in range(count):
        now_s += chance.expovariate(1 / _BETWEEN_S)
        [target] = chance.choices(parts, weights=weights)
        kind = chance.choice(topology.faults_of(target))
        at_s, for_s = max(now_s, free_s.get(target, 0.0)), chance.uniform(_SHORTEST_S, _LONGEST_S)
        which = chance.choice(_VICTIMS) if isinstance(target, Link) else None
        faults.append(Fault(at_s, target, kind, for_s, which))
        if isinstance(target, Program):
            free_s[target] = at_s + for_s
    return sorted(faults, key=lambda fault: fault.at_s)
