"""Agents that follow the telemetry of a node: one call that stays open, and another when that has ended.

Must not judge.
"""

import asyncio
import json
import random
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from relay.calls.envelope import MAX_FOLLOW_S
from schemas.projection import META_FOLLOW_S
from tests.chaos.agents import NOT_REACHED, Agent, ToolCall, code_of, messages
from tests.chaos.callers import new_id
from tests.chaos.history import Following, Sample
from tests.chaos.journals import written
from tests.chaos.site import now_ms
from tests.chaos.topology import RelayParts

_INTERVAL_MS = 1000
_AGAIN_S = 0.3
# Longer than a relay needs to say that a stream has ended: three intervals, or 30 s.
_PATIENCE_S = 45.0


class Followers:
    """Followers that are one agent of a relay; what they saw goes to ``journal`` too.

    Attributes:
        relay: the one that they follow by way of.
        followings: the calls that have ended, and those that are open.
        newest_ms: when the newest sample of a node arrived.
    """

    def __init__(self, agent: Agent, journal: Path, relay: RelayParts) -> None:
        self.relay = relay
        self.followings: list[Following] = []
        self.newest_ms: dict[str, int] = {}
        self._agent = agent
        self._journal = journal

    async def keep_following(self, node_id: str, chance: random.Random) -> None:
        """Follow a node until cancelled."""
        async with self._agent.connected(_PATIENCE_S) as http:
            while True:
                following = Following(node_id, now_ms(), self.relay.agents, self.relay.program)
                self.followings.append(following)
                try:
                    await self._follow(http, following, new_id(chance))
                finally:
                    written(self._journal, asdict(following))
                await asyncio.sleep(_AGAIN_S)

    async def _follow(self, http: httpx2.AsyncClient, following: Following, request_id: str) -> None:
        call = ToolCall(
            request_id,
            f"sys.{following.node_id}.sysmetrics.subscribe",
            {"interval_ms": _INTERVAL_MS},
            meta={"progressToken": request_id, META_FOLLOW_S: MAX_FOLLOW_S},
        )
        try:
            async for message in messages(http, call):
                if message.get("method") == "notifications/progress":
                    following.samples.append(_sample(message["params"]))
                    self.newest_ms[following.node_id] = now_ms()
                else:
                    following.ends.append(code_of(message))
        except httpx2.ReadTimeout:
            following.is_silent = True
        except NOT_REACHED:
            pass
        following.ended_ms = now_ms()


def _sample(params: Mapping[str, Any]) -> Sample:
    sample = json.loads(params["message"])
    lost = params.get("_meta", {}).get("edge-kubelet/lost", 0)
    return Sample(now_ms(), sample["ts_ms"], sample["node_id"], params["progress"], lost)
