"""One soak: 50 calls a second through a whole site, while connections are lost and the broker is restarted.

Must not judge: ``slopes.py`` and the checker of ``tests/chaos`` do.
"""

import asyncio
import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

from tests.chaos.agents import agent_of
from tests.chaos.callers import Callers, measure_loop
from tests.chaos.history import History, Lag
from tests.chaos.journals import written
from tests.chaos.run import Healer, background, history_of, keep_observed, measured_relays
from tests.chaos.schedule import Fault
from tests.chaos.site import Site
from tests.chaos.topology import ONE_RELAY, End, Link, Program
from tests.fakes.fault_proxy import LinkFault
from tests.soak.measure import Watched, keep_sampling
from tests.soak.slopes import CALLS_PER_S, Sample

NODES = (Program.NODE_0, Program.NODE_1, Program.NODE_2, Program.NODE_3, Program.NODE_4, Program.NODE_5)
"""As many as it takes: one echoes ten times a second at most."""
WATCHED = (Program.RELAY, *NODES)

_CALLERS = 20
_SAMPLES = 720
_SHORTEST_S = 0.5
_FOR_S = 0.1
_RECONNECT_S = {Link.NODE_RELAY: 2.0, Link.AGENT_RELAY: 5.0}
_BROKER_S = 15.0


async def run(
    directory: Path, seconds: float, seed: int, step: Callable[[str], None]
) -> tuple[History, list[Sample]]:
    """Return what the calls came to, and what the processes used; both are also kept in ``directory``.

    Raises:
        StartError: a process ended by itself.
    """
    async with Site.running(directory, replace(ONE_RELAY, nodes=NODES)) as site:
        callers = Callers(await agent_of(site, "agent"), directory / "calls.jsonl")
        chance = random.Random(seed)  # noqa: S311 - which node is called
        nodes = list(site.nodes.values())
        lags = list[Lag]()
        samples = list[Sample]()
        watched: dict[str, Watched] = {
            program: Watched(site.processes.pid(program), site.state(program)) for program in WATCHED
        }
        async with Healer.of(site, [callers], chance, {}) as healer:
            await healer.healed()
            period_s = max(_SHORTEST_S, seconds / _SAMPLES)
            async with (
                background(
                    measure_loop(lags),
                    *measured_relays(site, lags),
                    keep_sampling(watched, period_s, samples),
                ),
                asyncio.TaskGroup() as calling,
            ):
                for _ in range(_CALLERS):
                    calling.create_task(callers.keep_calling(nodes, chance, _CALLERS / CALLS_PER_S))
                try:
                    await _disturbed(site, seconds, step)
                finally:
                    callers.stop()
            healings = await healer.healed()
    for sample in samples:
        written(directory / "samples.jsonl", asdict(sample))
    history = replace(history_of(site, lags, healings), calls=callers.calls)
    keep_observed(history, directory)
    return history, samples


async def _disturbed(site: Site, seconds: float, step: Callable[[str], None]) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    for fault in itertools.takewhile(lambda fault: fault.at_s < seconds, faults()):
        await asyncio.sleep(began + fault.at_s - loop.time())
        site.processes.check()
        await site.make(fault)
        if isinstance(fault.target, Program):
            step(f"{fault.at_s / 60:.1f} min")
    await asyncio.sleep(began + seconds - loop.time())


def faults() -> Iterator[Fault]:
    """Yield without end, in the order of their times: lost connections, and restarts of the broker."""
    lost = [_lost(link, period_s) for link, period_s in _RECONNECT_S.items()]
    return heapq.merge(*lost, _restarts(), key=lambda fault: fault.at_s)


def _lost(link: Link, period_s: float) -> Iterator[Fault]:
    for number in itertools.count(1):
        yield Fault(number * period_s, link, LinkFault.CUT, _FOR_S, which=number)


def _restarts() -> Iterator[Fault]:
    for number, end in enumerate(itertools.cycle(End), 1):
        yield Fault((number - 0.5) * _BROKER_S, Program.BROKER, end, _FOR_S, which=None)
