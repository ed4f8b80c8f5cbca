"""What agents do at three relays: calls by way of each, and calls that are repeated by way of others.

Must not judge.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.callers import Callers
from tests.chaos.history import History
from tests.chaos.repeaters import Repeater
from tests.chaos.site import Site
from tests.chaos.workload import IsRight, agent_of

_PERIOD_S = 0.3
_REPEATERS = 4


@dataclass(frozen=True, slots=True)
class FleetWorkload:
    """The agents of a site of several relays: one agent, which has ``callers`` at each."""

    site: Site
    chance: random.Random
    callers: tuple[Callers, ...]
    repeaters: tuple[Repeater, ...]

    @classmethod
    async def of(cls, site: Site, directory: Path, chance: random.Random) -> "FleetWorkload":
        """Return the agents, whose journal is in ``directory``."""
        agent, journal = await agent_of(site, "agent"), directory / "calls.jsonl"
        callers = tuple(
            Callers(replace(agent, url=site.agent_url(relay)), journal, relay)
            for relay in site.topology.relays
        )
        return cls(site, chance, callers, tuple(Repeater(callers, chance) for _ in range(_REPEATERS)))

    def anew(self) -> "FleetWorkload":
        """Return the same agents, which have not worked yet."""
        callers = tuple(one.anew() for one in self.callers)
        repeaters = tuple(Repeater(callers, self.chance) for _ in self.repeaters)
        return replace(self, callers=callers, repeaters=repeaters)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the agents work until the end of the block. What was begun then is ended."""
        nodes = list(self.site.nodes.values())
        async with asyncio.TaskGroup() as group:
            for callers in self.callers:
                group.create_task(callers.keep_calling(nodes, self.chance, _PERIOD_S))
            for repeater in self.repeaters:
                group.create_task(repeater.keep_repeating(nodes))
            try:
                yield
            finally:
                for callers in self.callers:
                    callers.stop()
                for repeater in self.repeaters:
                    repeater.stop()

    def parts(self) -> Mapping[str, IsRight]:
        """Return what has to work besides the calls of every node by way of each relay."""
        return {}

    def added_to(self, history: History) -> History:
        """Return ``history`` with what the agents saw besides."""
        calls = [call for callers in self.callers for call in callers.calls]
        return replace(history, calls=[*history.calls, *calls])
