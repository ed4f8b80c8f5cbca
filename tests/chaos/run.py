"""One run: the faults of a schedule while callers call, and the history that it left.

After each round of faults the system is left alone until it is right again: each node answers, and the relay
is ready.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2

from schemas.tls import client_context
from tests.chaos.callers import Callers, measure_loop, measure_relay
from tests.chaos.checker import HEARTBEAT_MS
from tests.chaos.history import Healing, History, Lag
from tests.chaos.journals import audit, runs, written
from tests.chaos.schedule import NODES, Fault, Program, rounds
from tests.chaos.site import Site, now_ms

_CALLERS = 4
_PERIOD_S = 0.2
_GIVEN_UP_S = 1.5 * HEARTBEAT_MS / 1000
_POLL_S = 0.3


async def run(directory: Path, seed: int, count: int, step: Callable[[str], None]) -> History:
    """Make ``count`` faults in ``directory``, which keeps every journal, and return what was observed.

    What is in no program's journal, disturbances, lags and healings, is kept in ``observed.jsonl``.

    ``step`` is called with a line for each fault and each round.

    Raises:
        StartError: a process ended by itself.
    """
    async with Site.running(directory, NODES) as site:
        roots, host = client_context(site.roots), urlsplit(site.public_url).netloc
        callers = Callers(site.agent_url, host, await site.token(), roots, directory / "calls.jsonl")
        chance = random.Random(seed)  # noqa: S311 - as the schedule has it
        nodes = list(site.nodes.values())
        healings: list[Healing] = []
        lags: list[Lag] = []
        async with (
            background(measure_loop(lags), measure_relay(site.relay_url, roots, lags)),
            callers.connected() as http,
        ):
            healer = Healer(site, callers, http, chance)
            await healer.healed()
            async with asyncio.TaskGroup() as calling:
                for _ in range(_CALLERS):
                    calling.create_task(callers.keep_calling(nodes, chance, _PERIOD_S))
                try:
                    for number, faults in enumerate(rounds(seed, count), 1):
                        await _disturbed(site, faults, step)
                        healed = await healer.healed()
                        healings += healed
                        took_s = _longest_s(healed)
                        step(f"round {number}: {len(callers.calls)} calls, right again after {took_s:.1f} s")
                finally:
                    callers.stop()
    history = history_of(site, callers, lags, healings)
    observed = [
        *map(asdict, history.disturbances),
        *map(asdict, history.lags),
        *map(asdict, history.healings),
    ]
    for record in observed:
        written(directory / "observed.jsonl", record)
    return history


class Healer:
    """Waits until every part is right again."""

    def __init__(self, site: Site, callers: Callers, http: httpx2.AsyncClient, chance: random.Random) -> None:
        self._site = site
        self._callers = callers
        self._http = http
        self._chance = chance

    async def healed(self) -> list[Healing]:
        """Return when each part was right again, counted from now.

        Raises:
            StartError: a process has ended by itself.
        """
        self._site.processes.check()
        waits = [_until(node_id, partial(self._answers, node_id)) for node_id in self._site.nodes.values()]
        return await asyncio.gather(*waits, _until(Program.RELAY, self._is_ready))

    async def _answers(self, node_id: str) -> bool:
        call = await self._callers.call(self._http, node_id, f"{self._chance.getrandbits(128):032x}")
        return any(answer.code == "ok" for answer in call.answers)

    async def _is_ready(self) -> bool:
        try:
            return (await self._http.get(f"{self._site.relay_url}/readyz")).is_success
        except (httpx2.HTTPError, OSError):
            return False


async def _until(part: str, is_right: Callable[[], Awaitable[bool]]) -> Healing:
    began_ms = now_ms()
    try:
        async with asyncio.timeout(_GIVEN_UP_S):
            while not await is_right():  # noqa: ASYNC110 - a process elsewhere
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return Healing(part, began_ms, None)
    return Healing(part, began_ms, now_ms())


async def _disturbed(site: Site, faults: Sequence[Fault], step: Callable[[str], None]) -> None:
    """Make each fault at its time, those of one target one after another."""
    began = asyncio.get_running_loop().time()
    locks = {fault.target: asyncio.Lock() for fault in faults}

    async def made(fault: Fault) -> None:
        await asyncio.sleep(began + fault.at_s - asyncio.get_running_loop().time())
        async with locks[fault.target]:
            step(str(fault))
            await site.make(fault)

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(made(fault))


def history_of(site: Site, callers: Callers, lags: Sequence[Lag], healings: Sequence[Healing]) -> History:
    decisions, outcomes = audit(site.plan.state.audit)
    return History(
        calls=callers.calls,
        decisions=decisions,
        outcomes=outcomes,
        runs=[run for node, node_id in site.nodes.items() for run in runs(site.log(node), node_id)],
        disturbances=site.disturbances,
        lags=lags,
        healings=healings,
    )


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have ``work`` done until the end of the block, which fails if it does."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


def _longest_s(healings: Sequence[Healing]) -> float:
    return max((healing.healed_ms or now_ms()) - healing.began_ms for healing in healings) / 1000
