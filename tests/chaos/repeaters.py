"""Agents that repeat a call under its idempotency key by way of other relays, at once or one after another.

The tool is not idempotent: each run returns an id of its own. Must not judge.
"""

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack

import httpx2

from tests.chaos.callers import Callers, new_id

_AT_ONCE = 0.3
"""How many keys are called at two relays at once, of one."""
_PAUSE_S = 0.1
_AGAIN_S = 0.2


class Repeater:
    """One agent, which has ``callers`` at each relay."""

    def __init__(self, callers: Sequence[Callers], chance: random.Random) -> None:
        self._callers = callers
        self._chance = chance
        self._is_stopped = False

    def stop(self) -> None:
        """Have it end after the key that it uses."""
        self._is_stopped = True

    async def keep_repeating(self, nodes: Sequence[str]) -> None:
        """Call any node under one key after another, each at every relay, until told to stop."""
        async with AsyncExitStack() as stack:
            ways = [(one, await stack.enter_async_context(one.agent.connected())) for one in self._callers]
            while not self._is_stopped:
                await self._repeat(self._chance.sample(ways, len(ways)), self._chance.choice(nodes))
                await asyncio.sleep(_AGAIN_S)

    async def _repeat(self, ways: Sequence[tuple[Callers, httpx2.AsyncClient]], node_id: str) -> None:
        key = new_id(self._chance)
        first, rest = ways[:1], ways[1:]
        if self._chance.random() < _AT_ONCE:
            first, rest = ways[:2], ways[2:]
        for turn in (first, *([way] for way in rest)):
            await asyncio.gather(
                *(callers.call_keyed(http, node_id, new_id(self._chance), key) for callers, http in turn)
            )
            await asyncio.sleep(_PAUSE_S)
