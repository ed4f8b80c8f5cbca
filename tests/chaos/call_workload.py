"""Calls by way of each relay, and, where there are several, calls that are repeated by way of others.

Must not judge.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.chaos.agents import agent_of
from tests.chaos.callers import Callers
from tests.chaos.history import History
from tests.chaos.repeaters import Repeater
from tests.chaos.site import Site

_CALLERS = 4
_PERIOD_S = 0.2
_REPEATERS = 4


@dataclass(frozen=True, slots=True)
class CallWorkload:
    """Those that call the nodes of a site: one agent, which has ``callers`` at each relay."""

    site: Site
    chance: random.Random
    callers: tuple[Callers, ...]
    repeaters: tuple[Repeater, ...]

    @classmethod
    async def of(cls, site: Site, directory: Path, chance: random.Random) -> "CallWorkload":
        """Return them; their journal is in ``directory``."""
        agent, relays = await agent_of(site, "agent"), site.topology.relays
        journal = directory / "calls.jsonl"
        callers = tuple(Callers(agent.at(site.agent_url(relay)), journal, relay) for relay in relays)
        several = range(_REPEATERS) if len(relays) > 1 else ()
        return cls(site, chance, callers, tuple(Repeater(callers, chance) for _ in several))

    def anew(self) -> "CallWorkload":
        """Return the same agents, which have not worked yet."""
        callers = tuple(one.anew() for one in self.callers)
        repeaters = tuple(Repeater(callers, self.chance) for _ in self.repeaters)
        return replace(self, callers=callers, repeaters=repeaters)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the agents work until the end of the block. What was begun then is ended."""
        nodes = list(self.site.nodes.values())
        staying = self.site.staying() or nodes
        async with asyncio.TaskGroup() as group:
            for callers in self.callers:
                for _ in range(_CALLERS // len(self.callers)):
                    group.create_task(callers.keep_calling(nodes, self.chance, _PERIOD_S))
            for number, repeater in enumerate(self.repeaters):
                # Half of the keys are of nodes whose answers are known.
                group.create_task(repeater.keep_repeating(staying if number % 2 else nodes))
            try:
                yield
            finally:
                for callers in self.callers:
                    callers.stop()
                for repeater in self.repeaters:
                    repeater.stop()

    def added_to(self, history: History) -> History:
        """Return ``history`` with the calls that the agents made."""
        calls = [call for callers in self.callers for call in callers.calls]
        return replace(history, calls=[*history.calls, *calls])
