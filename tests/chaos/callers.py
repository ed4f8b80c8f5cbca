"""Agents that call nodes all the time, over HTTP and TLS, and write what they saw; and what measures lags.

Each call carries a message of its own, so that another call's answer is noticed. Must not judge.
"""

import asyncio
import json
import random
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2

from schemas.addresses import MCP_PATH
from tests.chaos.history import Answer, Call, Lag
from tests.chaos.journals import written
from tests.chaos.site import now_ms
from tests.fakes.mcp_wire import ERA_META, NEW

_PATIENCE_S = 10.0
_LOOP_S = 0.05
_PROBE_S = 0.2


class Callers:
    """Callers that present ``token`` at ``url``, whose host the relay knows by the name ``host``."""

    def __init__(self, url: str, host: str, token: str, roots: ssl.SSLContext, journal: Path) -> None:
        self.calls: list[Call] = []
        self._url = url
        self._headers = {
            "host": host,
            "authorization": f"Bearer {token}",
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": NEW,
            "mcp-method": "tools/call",
        }
        self._roots = roots
        self._is_stopped = False
        self._journal = journal

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[httpx2.AsyncClient]:
        """Hold the connections of one caller."""
        timeout = httpx2.Timeout(_PATIENCE_S)
        async with httpx2.AsyncClient(
            base_url=self._url, headers=self._headers, verify=self._roots, timeout=timeout, trust_env=False
        ) as http:
            yield http

    def stop(self) -> None:
        """Have those that keep calling end after the call that each of them makes."""
        self._is_stopped = True

    async def keep_calling(self, nodes: Sequence[str], chance: random.Random, period_s: float) -> None:
        """Call any node every ``period_s``, or as soon as the call before has ended, until told to stop."""
        async with self.connected() as http:
            due = time.monotonic()
            while not self._is_stopped:
                await self.call(http, chance.choice(nodes), f"{chance.getrandbits(128):032x}")
                due = max(due + period_s, time.monotonic())
                await asyncio.sleep(due - time.monotonic())

    async def call(self, http: httpx2.AsyncClient, node_id: str, trace_id: str) -> Call:
        """Call the echo of a node, and note what comes of it."""
        began_ms = now_ms()
        ended_ms: int | None = None
        answers: tuple[Answer, ...] = ()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                answers = await _asked(http, node_id, trace_id)
            ended_ms = now_ms()
        except TimeoutError:
            pass
        except (httpx2.HTTPError, OSError):
            ended_ms = now_ms()
        call = Call(trace_id, node_id, began_ms, ended_ms, answers)
        self.calls.append(call)
        written(self._journal, asdict(call))
        return call


async def _asked(http: httpx2.AsyncClient, node_id: str, trace_id: str) -> tuple[Answer, ...]:
    name = f"sysecho.{node_id}.echo.invoke"
    params = {"name": name, "arguments": {"message": trace_id}, "_meta": dict(ERA_META)}
    request = {"jsonrpc": "2.0", "id": trace_id, "method": "tools/call", "params": params}
    headers = {"mcp-name": name, "traceparent": f"00-{trace_id}-{trace_id[:16]}-01"}
    response = await http.post(MCP_PATH, content=json.dumps(request), headers=headers)
    text = response.text
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        messages = [line.removeprefix("data:") for line in text.splitlines() if line.startswith("data: {")]
    else:
        messages = [text]
    return tuple(_answer(json.loads(message)) for message in messages)


def _answer(message: dict[str, Any]) -> Answer:
    if "error" in message:
        data = message["error"].get("data") or {}
        return Answer(message.get("id"), str(data.get("code", message["error"].get("code"))))
    result = message["result"]
    if result.get("isError"):
        return Answer(message["id"], result["_meta"]["edge-kubelet/error"]["code"])
    content = result["structuredContent"]
    return Answer(message["id"], "ok", content.get("message"), content.get("node_id"))


async def measure_loop(lags: list[Lag]) -> None:
    """Note how late this process's own loop is, until cancelled."""
    while True:
        due = time.monotonic() + _LOOP_S
        await asyncio.sleep(_LOOP_S)
        lags.append(Lag(now_ms(), max(0.0, (time.monotonic() - due) * 1000)))


async def measure_relay(url: str, roots: ssl.SSLContext, lags: list[Lag]) -> None:
    """Note how long the relay takes to answer that it lives: so late is its loop. Until cancelled."""
    async with httpx2.AsyncClient(base_url=url, verify=roots, timeout=_PATIENCE_S, trust_env=False) as http:
        while True:
            began = time.monotonic()
            try:
                await http.get("/healthz")
                lags.append(Lag(now_ms(), (time.monotonic() - began) * 1000))
            except (httpx2.HTTPError, OSError):
                pass  # it does not run now
            await asyncio.sleep(_PROBE_S)
