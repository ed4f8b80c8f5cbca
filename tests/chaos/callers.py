"""Agents that call nodes all the time, and write what they saw; and what measures lags.

Each call carries a message of its own, so that another call's answer is noticed. Must not judge.
"""

import asyncio
import random
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from schemas.errors import Failure
from schemas.projection import META_IDEMPOTENCY_KEY
from tests.chaos import once_kind
from tests.chaos.agents import NOT_REACHED, PATIENCE_S, Agent, ToolCall, code_of, messages
from tests.chaos.history import Answer, Call, Lag
from tests.chaos.journals import written
from tests.chaos.site import now_ms
from tests.chaos.topology import ONE_RELAY, RelayParts

_LOOP_S = 0.05
_PROBE_S = 0.2


def new_id(chance: random.Random) -> str:
    """Return an id that can also be a trace's."""
    return f"{chance.getrandbits(128):032x}"


def traced(trace_id: str) -> str:
    """Return the ``traceparent`` of a trace."""
    return f"00-{trace_id}-{trace_id[:16]}-01"


class Callers:
    """Callers that are one agent of ``relay``; what they saw goes to ``journal`` too."""

    def __init__(self, agent: Agent, journal: Path, relay: RelayParts = ONE_RELAY.relays[0]) -> None:
        self.calls: list[Call] = []
        self.agent = agent
        self.relay = relay
        self._is_stopped = False
        self._journal = journal

    def anew(self) -> "Callers":
        """Return the same agent's callers, which have seen nothing yet."""
        return Callers(self.agent, self._journal, self.relay)

    def stop(self) -> None:
        """Have those that keep calling end after the call that each of them makes."""
        self._is_stopped = True

    async def keep_calling(self, nodes: Sequence[str], chance: random.Random, period_s: float) -> None:
        """Call any node every ``period_s``, or as soon as the call before has ended, until told to stop."""
        async with self.agent.connected() as http:
            due = time.monotonic()
            while not self._is_stopped:
                await self.call(http, chance.choice(nodes), new_id(chance))
                due = max(due + period_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())

    async def call(self, http: httpx2.AsyncClient, node_id: str, trace_id: str) -> Call:
        """Call the echo of a node, and note what comes of it."""
        return await self._made(
            http,
            node_id,
            ToolCall(trace_id, f"sysecho.{node_id}.echo.invoke", {"message": trace_id}, _headers(trace_id)),
        )

    async def call_keyed(self, http: httpx2.AsyncClient, node_id: str, trace_id: str, key: str) -> Call:
        """Call the tool of a node that is not idempotent under ``key``, and note what comes of it."""
        meta = {META_IDEMPOTENCY_KEY: key}
        asked = ToolCall(trace_id, once_kind.tool(node_id), {"message": key}, _headers(trace_id), meta)
        return await self._made(http, node_id, asked, key)

    async def _made(
        self, http: httpx2.AsyncClient, node_id: str, asked: ToolCall, key: str | None = None
    ) -> Call:
        began_ms = now_ms()
        answers: tuple[Answer, ...] = ()
        is_given_up = False
        try:
            async with asyncio.timeout(PATIENCE_S):
                answers = tuple([_answer(message) async for message in messages(http, asked)])
        except (TimeoutError, httpx2.ReadTimeout):
            is_given_up = True
        except httpx2.HTTPStatusError:  # refused for its rate, before it was read
            answers = (Answer(asked.request_id, Failure.RATE_LIMITED.value.code),)
        except NOT_REACHED:
            pass  # the connection is broken
        call = Call(
            asked.request_id,
            node_id,
            began_ms,
            now_ms(),
            answers,
            self.relay.agents,
            is_given_up=is_given_up,
            relay=self.relay.program,
            key=key,
        )
        self.calls.append(call)
        written(self._journal, asdict(call))
        return call


def _answer(message: Mapping[str, Any]) -> Answer:
    code = code_of(message)
    if code != "ok":
        return Answer(message.get("id"), code)
    content = message["result"]["structuredContent"]
    return Answer(message["id"], code, content.get("message"), content.get("node_id"), content.get("run"))


def _headers(trace_id: str) -> dict[str, str]:
    return {"traceparent": traced(trace_id)}


async def measure_loop(lags: list[Lag]) -> None:
    """Note how late this process's own loop is, until cancelled."""
    while True:
        due = time.monotonic() + _LOOP_S
        await asyncio.sleep(_LOOP_S)
        lags.append(Lag(now_ms(), max(0.0, (time.monotonic() - due) * 1000)))


async def measure_relay(url: str, roots: ssl.SSLContext, lags: list[Lag]) -> None:
    """Note how long the relay takes to answer that it lives: so late is its loop. Until cancelled."""
    async with httpx2.AsyncClient(base_url=url, verify=roots, timeout=PATIENCE_S, trust_env=False) as http:
        while True:
            began = time.monotonic()
            try:
                await http.get("/healthz")
                lags.append(Lag(now_ms(), (time.monotonic() - began) * 1000))
            except NOT_REACHED:
                pass  # it does not run now
            await asyncio.sleep(_PROBE_S)
