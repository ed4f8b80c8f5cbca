"""Everything that agents do in one run: calls, streams, callers' tools and remote tools. Must not judge."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from relay.auth.permissions import SESSION_SCOPE
from tests.chaos.agents import agent_of
from tests.chaos.call_workload import CallWorkload
from tests.chaos.followers import Followers
from tests.chaos.history import History
from tests.chaos.lenders import Lender, Requester
from tests.chaos.runtimes import Runtime
from tests.chaos.site import Site

_RUNTIMES = 2
_FOLLOWERS = 2
_LENDERS = ("ant", "bee")

IsRight = Callable[[int], Awaitable[bool]]
"""Returns whether something works that was begun after a time in milliseconds."""


@dataclass(frozen=True, slots=True)
class Workload:
    """The agents of a site, of which each but the runtimes uses every relay.

    ``runtimes`` connect to the public URL, by the link of the nodes.
    """

    site: Site
    chance: random.Random
    calls: CallWorkload
    followers: tuple[Followers, ...]
    lenders: tuple[Lender, ...]
    requesters: tuple[Requester, ...]
    runtimes: tuple[Runtime, ...]

    @classmethod
    async def of(cls, site: Site, directory: Path, chance: random.Random) -> "Workload":
        """Return the agents, whose journals are in ``directory``."""
        calls, relays = await CallWorkload.of(site, directory, chance), site.topology.relays
        lenders = []
        for name in _LENDERS:
            agent = await agent_of(site, name, SESSION_SCOPE)
            agents = [agent.at(site.agent_url(relay)) for relay in relays]
            lenders.append(Lender(name, agents, directory / "served.jsonl", chance))
        token = await site.token("runtime")
        return cls(
            site,
            chance,
            calls,
            tuple(
                Followers(callers.agent, directory / "followings.jsonl", callers.relay)
                for callers in calls.callers
                for _ in range(max(1, _FOLLOWERS // len(relays)))
            ),
            tuple(lenders),
            tuple(
                Requester(part, node_id, lender, site.socket(part), directory / "requests.jsonl")
                for part, node_id in site.nodes.items()
                for lender in lenders
            ),
            tuple(Runtime(site, token, directory / "remote.jsonl") for _ in range(_RUNTIMES)),
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have the agents work until the end of the block. What was begun then is ended, but for streams."""
        nodes = list(self.site.nodes.values())
        async with asyncio.TaskGroup() as group:
            lasting = [
                *(
                    group.create_task(one.keep_following(node, self.chance))
                    for one in self.followers
                    for node in nodes
                ),
                *(group.create_task(one.keep_lending(node)) for one in self.lenders for node in nodes),
            ]
            ending = [
                *(group.create_task(one.keep_requesting(self.chance)) for one in self.requesters),
                *(group.create_task(one.keep_calling(nodes, self.chance)) for one in self.runtimes),
            ]
            try:
                async with self.calls.running():
                    yield
            finally:
                for requester in self.requesters:
                    requester.stop()
                for runtime in self.runtimes:
                    runtime.stop()
            await asyncio.wait(ending)
            for task in lasting:
                task.cancel()

    def added_to(self, history: History) -> History:
        """Return ``history`` with what the agents saw."""
        history = self.calls.added_to(history)
        return replace(
            history,
            calls=[*history.calls, *(call for one in self.runtimes for call in one.calls)],
            recorded=[record for one in self.runtimes for record in one.records],
            followings=[following for one in self.followers for following in one.followings],
            requests=[request for one in self.requesters for request in one.requests],
            served=[served for one in self.lenders for served in one.served.values()],
        )

    def parts(self) -> dict[str, IsRight]:
        """Return what has to work besides calls, by its name."""
        return {
            **{
                f"stream {number} of {node} by way of {one.relay.program}": partial(_has_followed, one, node)
                for number, one in enumerate(self.followers)
                for node in self.site.nodes.values()
            },
            **{
                f"tool of {one.caller} at {one.node_id}": partial(_has_worked, one) for one in self.requesters
            },
            **{f"runtime {number}": partial(_has_worked, one) for number, one in enumerate(self.runtimes)},
        }


async def _has_followed(followers: Followers, node_id: str, since_ms: int) -> bool:
    return followers.newest_ms.get(node_id, 0) > since_ms


async def _has_worked(one: Requester | Runtime, since_ms: int) -> bool:
    return one.newest_ok_ms > since_ms
