"""Which faults a run has, in which order, when and how long: all of it follows from the seed.

Must not do anything: the faults are made in ``site.py``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from tests.fakes.fault_proxy import LinkFault

ROUND = 150
"""After so many faults the system is left alone until it is right again."""

_BETWEEN_S = 0.1
_SHORTEST_S, _LONGEST_S = 0.02, 0.6
# A fault of all connections at once leaves few calls to be disturbed.
_VICTIMS = (None, *range(8))


class Link(StrEnum):
    """A way between two parts, through a proxy."""

    AGENT_RELAY = "agent-relay"
    NODE_RELAY = "node-relay"
    NODE_BROKER = "node-broker"
    RELAY_BROKER = "relay-broker"


class Program(StrEnum):
    """A process."""

    RELAY = "relay"
    BROKER = "broker"
    NODE_0 = "node-0"
    NODE_1 = "node-1"
    NODE_2 = "node-2"
    NODE_3 = "node-3"
    NODE_4 = "node-4"
    NODE_5 = "node-5"


class End(StrEnum):
    """How a process is ended, to be started again."""

    SIGKILL = "SIGKILL"
    SIGTERM = "SIGTERM"


NODES = (Program.NODE_0, Program.NODE_1, Program.NODE_2)
PROGRAMS = (Program.RELAY, Program.BROKER, *NODES)

# Without TLS there is a connection only within one machine, whose bytes no network changes.
_UNCHANGED = (LinkFault.DELAY, LinkFault.CUT, LinkFault.BLACK_HOLE, LinkFault.TRUNCATE)
_FAULTS: dict[Link | Program, tuple[LinkFault | End, ...]] = {
    Link.AGENT_RELAY: tuple(LinkFault),
    Link.NODE_RELAY: tuple(LinkFault),
    Link.NODE_BROKER: _UNCHANGED,
    Link.RELAY_BROKER: _UNCHANGED,
    **dict.fromkeys(PROGRAMS, tuple(End)),
}
# Most often where calls pass. A process takes seconds to start, and without a relay nothing is disturbed.
_WEIGHTS: dict[Link | Program, int] = {
    Link.AGENT_RELAY: 12,
    Link.NODE_RELAY: 60,
    Link.NODE_BROKER: 28,
    Link.RELAY_BROKER: 12,
    **dict.fromkeys(PROGRAMS, 2),
    Program.RELAY: 1,
}


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


def rounds(seed: int, count: int) -> Iterator[list[Fault]]:
    """Yield ``count`` faults in rounds. Those of a link may overlap, those of a process do not."""
    chance = random.Random(seed)  # noqa: S311 - the same seed is the same schedule
    while count > 0:
        yield _round(chance, min(count, ROUND))
        count -= ROUND


def _round(chance: random.Random, count: int) -> list[Fault]:
    faults: list[Fault] = []
    free_s: dict[Link | Program, float] = {}
    now_s = 0.0
    for _ in range(count):
        now_s += chance.expovariate(1 / _BETWEEN_S)
        [target] = chance.choices(list(_WEIGHTS), weights=list(_WEIGHTS.values()))
        kind = chance.choice(_FAULTS[target])
        at_s, for_s = max(now_s, free_s.get(target, 0.0)), chance.uniform(_SHORTEST_S, _LONGEST_S)
        which = chance.choice(_VICTIMS) if isinstance(target, Link) else None
        faults.append(Fault(at_s, target, kind, for_s, which))
        if isinstance(target, Program):
            free_s[target] = at_s + for_s
    return sorted(faults, key=lambda fault: fault.at_s)
