"""Everything that agents do in one run: calls, streams, callers' tools and remote tools. Must not judge."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from relay.auth.permissions import SESSION_SCOPE
from schemas.addresses import mcp_url
from schemas.tls import client_context
from tests.chaos.agents import Agent
from tests.chaos.callers import Callers
from tests.chaos.followers import Followers
from tests.chaos.history import History
from tests.chaos.lenders import Lender, Requester
from tests.chaos.runtimes import Runtime
from tests.chaos.site import Site
from tests.chaos.topology import ONE_RELAY, RelayParts

_CALLERS = 4
_PERIOD_S = 0.2
_RUNTIMES = 2
_FOLLOWERS = 2
_LENDERS = ("ant", "bee")

IsRight = Callable[[int], Awaitable[bool]]
"""Returns whether something works that was begun after a time in milliseconds."""


async def plain_callers(site: Site, directory: Path) -> Callers:
    """Return the callers of a site, whose journal is in ``directory``."""
    return Callers(await agent_of(site, "agent"), directory / "calls.jsonl")


async def agent_of(site: Site, sub: str, *scopes: str, relay: RelayParts = ONE_RELAY.relays[0]) -> Agent:
    """Return an agent of ``relay``, whose token allows ``scopes``."""
    host = urlsplit(site.public_url).netloc
    token = await site.token(sub, *scopes)
    return Agent(site.agent_url(relay), host, token, client_context(site.roots))


@dataclass(frozen=True, slots=True)
class Workload:
    """The agents of a site. ``runtimes`` connect to its public URL, by the link of the nodes."""

    site: Site
    chance: random.Random
    plain: Callers
    followers: tuple[Followers, ...]
    lenders: tuple[Lender, ...]
    requesters: tuple[Requester, ...]
    runtimes: tuple[Runtime, ...]

    @classmethod
    async def of(cls, site: Site, directory: Path, chance: random.Random) -> "Workload":
        """Return the agents, whose journals are in ``directory``."""
        plain = await plain_callers(site, directory)
        lenders = [
            Lender(name, await agent_of(site, name, SESSION_SCOPE), directory / "served.jsonl", chance)
            for name in _LENDERS
        ]
        ca = site.plan.state.ca
        token = await site.token("runtime")
        return cls(
            site,
            chance,
            plain,
            tuple(Followers(plain.agent, directory / "followings.jsonl") for _ in range(_FOLLOWERS)),
            tuple(lenders),
            tuple(
                Requester(part, node_id, lender, site.socket(part), directory / "requests.jsonl")
                for part, node_id in site.nodes.items()
                for lender in lenders
            ),
            tuple(
                Runtime(
                    mcp_url(site.public_url),
                    token,
                    ca / "server-root.pem",
                    ca / "root.pem",
                    directory / "remote.jsonl",
                )
                for _ in range(_RUNTIMES)
            ),
        )

    @property
    def callers(self) -> tuple[Callers, ...]:
        """Those that call echo."""
        return (self.plain,)

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
                *(
                    group.create_task(self.plain.keep_calling(nodes, self.chance, _PERIOD_S))
                    for _ in range(_CALLERS)
                ),
                *(group.create_task(one.keep_requesting(self.chance)) for one in self.requesters),
                *(group.create_task(one.keep_calling(nodes, self.chance)) for one in self.runtimes),
            ]
            try:
                yield
            finally:
                self.plain.stop()
                for requester in self.requesters:
                    requester.stop()
                for runtime in self.runtimes:
                    runtime.stop()
            await asyncio.wait(ending)
            for task in lasting:
                task.cancel()

    def added_to(self, history: History) -> History:
        """Return ``history`` with what the agents saw."""
        return replace(
            history,
            calls=[*self.plain.calls, *(call for one in self.runtimes for call in one.calls)],
            recorded=[record for one in self.runtimes for record in one.records],
            followings=[following for one in self.followers for following in one.followings],
            requests=[request for one in self.requesters for request in one.requests],
            served=[served for one in self.lenders for served in one.served.values()],
        )

    def parts(self) -> dict[str, IsRight]:
        """Return what has to work, by its name: it is asked whether it has worked since a time."""
        return {
            **{
                f"stream {number} of {node}": partial(_has_followed, one, node)
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
