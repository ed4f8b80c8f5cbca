"""One run: the faults of a schedule while agents work, and the history that it left.

After each round of faults the system is left alone until it is right again: each node answers, the relay is
ready, and everything that agents do has worked.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from schemas.tls import client_context
from tests.chaos.callers import Callers, measure_loop, measure_relay, new_id
from tests.chaos.checker import HEARTBEAT_MS
from tests.chaos.history import Healing, History, Lag
from tests.chaos.journals import audit, faults_in, runs, written
from tests.chaos.runtimes import faults_logged
from tests.chaos.schedule import Fault, rounds
from tests.chaos.site import Site, now_ms
from tests.chaos.topology import ONE_RELAY, Program, Topology
from tests.chaos.workload import IsRight, Workload

_GIVEN_UP_S = 1.5 * HEARTBEAT_MS / 1000
_POLL_S = 0.3


async def run(
    directory: Path, seed: int, count: int, step: Callable[[str], None], topology: Topology = ONE_RELAY
) -> History:
    """Make ``count`` faults in ``directory``, which keeps every journal, and return what was observed.

    ``step`` is called with a line for each fault and each round.

    Raises:
        StartError: a process ended by itself.
    """
    async with Site.running(directory, topology) as site:
        chance = random.Random(seed)  # noqa: S311 - as the schedule has it
        workload = await Workload.of(site, directory, chance)
        callers = workload.calls.callers
        healings, lags = list[Healing](), list[Lag]()
        async with (
            faults_logged() as of_runtimes,
            background(measure_loop(lags), *measured_relays(site, lags)),
            Healer.of(site, callers, chance, workload.parts()) as healer,
            workload.running(),
        ):
            await healer.healed()
            for number, faults in enumerate(rounds(seed, count, topology), 1):
                await _disturbed(site, faults, step)
                healed = await healer.healed()
                healings += healed
                calls = sum(len(one.calls) for one in callers)
                step(f"round {number}: {calls} calls, right again after {_longest(healed)}")
    of_programs = history_of(site, lags, healings)
    history = workload.added_to(replace(of_programs, faults=[*of_programs.faults, *of_runtimes]))
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


def measured_relays(site: Site, lags: list[Lag]) -> Iterator[Coroutine[Any, Any, None]]:
    """Yield what measures how late each relay is."""
    roots = client_context(site.roots)
    for program in site.plans:
        yield measure_relay(site.relay_url(program), roots, lags)


class Healer:
    """Waits until every part is right again: each node by way of each of the callers, and ``parts``."""

    def __init__(
        self,
        site: Site,
        ways: Sequence[tuple[Callers, httpx2.AsyncClient]],
        chance: random.Random,
        parts: Mapping[str, IsRight],
    ) -> None:
        self._site = site
        self._ways = ways
        self._chance = chance
        self._parts = parts

    @classmethod
    @asynccontextmanager
    async def of(
        cls, site: Site, callers: Sequence[Callers], chance: random.Random, parts: Mapping[str, IsRight]
    ) -> AsyncIterator["Healer"]:
        """Hold a healer with connections of its own."""
        async with AsyncExitStack() as stack:
            ways = [(one, await stack.enter_async_context(one.agent.connected())) for one in callers]
            yield cls(site, ways, chance, parts)

    async def healed(self) -> list[Healing]:
        """Return when each part was right again, counted from now.

        Raises:
            StartError: a process has ended by itself.
        """
        self._site.processes.check()
        parts: dict[str, IsRight] = {
            **{
                f"{node_id} by way of {callers.relay.program}": partial(self._answers, callers, http, node_id)
                for callers, http in self._ways
                for node_id in self._site.nodes.values()
            },
            **{
                callers.relay.program: partial(self._is_ready, callers.relay.program, http)
                for callers, http in self._ways
            },
            **self._parts,
        }
        return await asyncio.gather(*(_until(part, is_right) for part, is_right in parts.items()))

    async def _answers(
        self, callers: Callers, http: httpx2.AsyncClient, node_id: str, _since_ms: int
    ) -> bool:
        call = await callers.call(http, node_id, new_id(self._chance))
        return any(answer.code == "ok" for answer in call.answers)

    async def _is_ready(self, relay: Program, http: httpx2.AsyncClient, _since_ms: int) -> bool:
        """Return whether a relay is ready, and connected to the others if there are any."""
        try:
            answer = await http.get(f"{self._site.relay_url(relay)}/readyz")
        except (httpx2.HTTPError, OSError):
            return False
        cluster = answer.json()["subsystems"].get("cluster", {"ready": True})
        return answer.is_success and bool(cluster["ready"])


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
    locks = {program: asyncio.Lock() for program in site.topology.programs}

    async def made(fault: Fault) -> None:
        await asyncio.sleep(began + fault.at_s - asyncio.get_running_loop().time())
        async with locks[fault.target] if isinstance(fault.target, Program) else nullcontext():
            step(str(fault))
            await site.make(fault)

    async with asyncio.TaskGroup() as group:
        for fault in faults:
            group.create_task(made(fault))


def history_of(site: Site, lags: Sequence[Lag], healings: Sequence[Healing]) -> History:
    """Return what the programs of a site that has ended wrote, with what was observed of it."""
    audits = [audit(plan.state.audit, relay) for relay, plan in site.plans.items()]
    logs = {part: site.log(part) for part in (*site.plans, *site.nodes)}
    return History(
        decisions=[decision for decisions, _ in audits for decision in decisions],
        outcomes=[outcome for _, outcomes in audits for outcome in outcomes],
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
