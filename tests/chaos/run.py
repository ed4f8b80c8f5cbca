"""One run: the faults of a schedule while agents work, and the history that it left.

After each round of faults the system is left alone until it is right again: each node answers, the relay is
ready, and everything that agents do has worked.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from tests.chaos.callers import Callers, measure_loop, measure_relay, new_id
from tests.chaos.checker import HEARTBEAT_MS
from tests.chaos.history import Healing, History, Lag
from tests.chaos.journals import audit, faults_in, runs, written
from tests.chaos.runtimes import faults_logged
from tests.chaos.schedule import NODES, Fault, Program, rounds
from tests.chaos.site import Site, now_ms
from tests.chaos.workload import IsRight, Workload

_GIVEN_UP_S = 1.5 * HEARTBEAT_MS / 1000
_POLL_S = 0.3


async def run(directory: Path, seed: int, count: int, step: Callable[[str], None]) -> History:
    """Make ``count`` faults in ``directory``, which keeps every journal, and return what was observed.

    ``step`` is called with a line for each fault and each round.

    Raises:
        StartError: a process ended by itself.
    """
    async with Site.running(directory, NODES) as site:
        chance = random.Random(seed)  # noqa: S311 - as the schedule has it
        workload = await Workload.of(site, directory, chance)
        roots = workload.callers.agent.roots
        healings, lags = list[Healing](), list[Lag]()
        async with (
            faults_logged() as of_runtimes,
            background(measure_loop(lags), measure_relay(site.relay_url, roots, lags)),
            workload.callers.agent.connected() as http,
            workload.running(),
        ):
            healer = Healer(site, workload.callers, http, chance, workload.parts())
            await healer.healed()
            for number, faults in enumerate(rounds(seed, count), 1):
                await _disturbed(site, faults, step)
                healed = await healer.healed()
                healings += healed
                calls = len(workload.callers.calls)
                step(f"round {number}: {calls} calls, right again after {_longest(healed)}")
    of_programs = history_of(site, workload.callers, lags, healings)
    history = replace(
        of_programs,
        calls=[*workload.callers.calls, *(call for one in workload.runtimes for call in one.calls)],
        recorded=[record for one in workload.runtimes for record in one.records],
        followings=[following for one in workload.followers for following in one.followings],
        requests=[request for one in workload.requesters for request in one.requests],
        served=[served for one in workload.lenders for served in one.served.values()],
        faults=[*of_programs.faults, *of_runtimes],
    )
    keep_observed(history, directory)
    return history


def keep_observed(history: History, directory: Path) -> None:
    """Keep what is in no program's journal: disturbances, lags and healings, in ``observed.jsonl``."""
    observed = [
        *map(asdict, history.disturbances),
        *map(asdict, history.lags),
        *map(asdict, history.healings),
    ]
    for record in observed:
        written(directory / "observed.jsonl", record)


class Healer:
    """Waits until every part is right again."""

    def __init__(
        self,
        site: Site,
        callers: Callers,
        http: httpx2.AsyncClient,
        chance: random.Random,
        parts: Mapping[str, IsRight],
    ) -> None:
        self._site = site
        self._callers = callers
        self._http = http
        self._chance = chance
        self._parts = parts

    async def healed(self) -> list[Healing]:
        """Return when each part was right again, counted from now.

        Raises:
            StartError: a process has ended by itself.
        """
        self._site.processes.check()
        parts: dict[str, IsRight] = {
            **{node_id: partial(self._answers, node_id) for node_id in self._site.nodes.values()},
            Program.RELAY: self._is_ready,
            **self._parts,
        }
        return await asyncio.gather(*(_until(part, is_right) for part, is_right in parts.items()))

    async def _answers(self, node_id: str, _since_ms: int) -> bool:
        call = await self._callers.call(self._http, node_id, new_id(self._chance))
        return any(answer.code == "ok" for answer in call.answers)

    async def _is_ready(self, _since_ms: int) -> bool:
        try:
            return (await self._http.get(f"{self._site.relay_url}/readyz")).is_success
        except (httpx2.HTTPError, OSError):
            return False


async def _until(part: str, is_right: IsRight) -> Healing:
    began_ms = now_ms()
    try:
        async with asyncio.timeout(_GIVEN_UP_S):
            while not await is_right(began_ms):  # noqa: ASYNC110 - a process elsewhere
                await asyncio.sleep(_POLL_S)
    except TimeoutError:
        return Healing(part, began_ms, None)
    return Healing(part, began_ms, now_ms())


async def _disturbed(site: Site, faults: Sequence[Fault], step: Callable[[str], None]) -> None:
    """Make each fault at its time, those of one process one after another."""
    began = asyncio.get_running_loop().time()
    locks = {program: asyncio.Lock() for program in Program}

    async def made(fault: Fault) -> None:
        await asyncio.sleep(began + fault.at_s - asyncio.get_running_loop().time())
        async with locks[fault.target] if isinstance(fault.target, Program) else nullcontext():
            step(str(fault))
            await site.make(fault)

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(made(fault))


def history_of(site: Site, callers: Callers, lags: Sequence[Lag], healings: Sequence[Healing]) -> History:
    """Return what the programs of a site that has ended wrote, with what was observed of it."""
    decisions, outcomes = audit(site.plan.state.audit)
    logs = {part: site.log(part) for part in (Program.RELAY, *site.nodes)}
    return History(
        calls=callers.calls,
        decisions=decisions,
        outcomes=outcomes,
        runs=[run for node, node_id in site.nodes.items() for run in runs(logs[node], node_id)],
        disturbances=site.disturbances,
        lags=lags,
        healings=healings,
        faults=[fault for part, log in logs.items() for fault in faults_in(log, part)],
    )


@asynccontextmanager
async def background(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Have ``work`` done until the end of the block, which fails if it does."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        yield
        for task in tasks:
            task.cancel()


def _longest(healings: Sequence[Healing]) -> str:
    """Return how long the slowest part took, and which it was."""
    took = {one.part: (one.healed_ms or now_ms()) - one.began_ms for one in healings}
    slowest = max(took, key=lambda part: took[part])
    return f"{took[slowest] / 1000:.1f} s ({slowest})"
