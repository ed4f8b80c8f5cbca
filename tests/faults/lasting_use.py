"""An agent of one relay that follows a node, and one that lends a tool to the node's local agent.

Both go on until they are ended. Must not judge.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Self

from relay.auth.permissions import SESSION_SCOPE
from tests.chaos.agents import agent_of
from tests.chaos.followers import Followers
from tests.chaos.history import History
from tests.chaos.lenders import Lender, Requester
from tests.chaos.run import background
from tests.chaos.site import Site, now_ms
from tests.chaos.topology import Program, RelayParts
from tests.fakes.polling import until

_BOUND_S = 60.0


@dataclass(frozen=True, slots=True)
class LastingUse:
    """What is used of the node ``node_id``."""

    node_id: str
    chance: random.Random
    followers: Followers
    lender: Lender
    requester: Requester

    @classmethod
    async def of(cls, site: Site, relay: RelayParts, node: Program, chance: random.Random) -> Self:
        """Return the agents of ``relay``, and the local agent of ``node``."""
        node_id, url = site.nodes[node], site.agent_url(relay)
        reading, lending = await agent_of(site, "agent"), await agent_of(site, "ant", SESSION_SCOPE)
        followers = Followers(reading.at(url), site.directory / "followings.jsonl", relay)
        lender = Lender("ant", [lending.at(url)], site.directory / "served.jsonl", chance)
        journal = site.directory / "requests.jsonl"
        return cls(
            node_id, chance, followers, lender, Requester(node, node_id, lender, site.socket(node), journal)
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Have it used until the end of the block."""
        async with background(
            self.followers.keep_following(self.node_id, self.chance), self.lender.keep_lending(self.node_id)
        ):
            requesting = asyncio.create_task(self.requester.keep_requesting(self.chance))
            try:
                yield
            finally:
                self.requester.stop()
                await requesting

    async def until_works(self) -> None:
        """Wait until a sample has come, and a request was answered, that were not under way before."""
        since_ms = now_ms()
        await until(lambda: self.followers.newest_ms.get(self.node_id, 0) > since_ms, _BOUND_S)
        await until(lambda: self.requester.newest_ok_ms > since_ms, _BOUND_S)

    def added_to(self, history: History) -> History:
        """Return ``history`` with what the agents saw."""
        return replace(
            history,
            followings=[*history.followings, *self.followers.followings],
            requests=[*history.requests, *self.requester.requests],
            served=[*history.served, *self.lender.served.values()],
        )
