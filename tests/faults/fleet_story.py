"""Three relays on three nats-servers, and what agents see of them, for stories of faults.

The parts are those of ``tests/chaos``, whose checker judges what the agents of a story have seen. Must not
decide what must happen.
"""

import asyncio
import json
import random
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx2

from kubelet.config import last_issued_file
from schemas.addresses import MCP_PATH
from schemas.manifest import MAX_FUTURE_MS
from tests.chaos.call_workload import CallWorkload
from tests.chaos.callers import Callers, measure_loop, new_id
from tests.chaos.checker import violations
from tests.chaos.evidence import TOLERANCE_MS
from tests.chaos.history import DEADLINE_MS, Decision, Disturbance, History, Lag
from tests.chaos.run import background, history_of, measured_relays
from tests.chaos.site import Site, now_ms
from tests.chaos.topology import THREE_RELAYS, End, Link, Program
from tests.fakes.fault_proxy import LinkFault
from tests.fakes.mcp_wire import ERA_META
from tests.fakes.polling import until
from tests.faults.faked_time import FakedTime
from tests.faults.lasting_use import LastingUse

SEED = 1
NODES = (Program.NODE_0, Program.NODE_1, Program.NODE_2, Program.NODE_3, Program.NODE_4)
RELAYS = tuple(relay.program for relay in THREE_RELAYS.relays)
NODE_LINKS = {relay.program: relay.nodes for relay in THREE_RELAYS.relays}
SERVER_LINKS = {relay.program: relay.servers for relay in THREE_RELAYS.relays if relay.servers is not None}
CALLED_AGAIN_S = 30.0
BOUND_S = 60.0

_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class RelayAgent:
    """An agent of one relay."""

    callers: Callers
    http: httpx2.AsyncClient
    chance: random.Random

    async def call(self, node_id: str) -> str:
        """Return ``ok`` or the code of an echo; empty if the relay did not answer."""
        call = await self.callers.call(self.http, node_id, new_id(self.chance))
        return call.answers[0].code if call.answers else ""

    async def connected(self) -> set[str]:
        """Return the nodes that the relay lists as connected."""
        (content,) = (await self._read_nodes({})).json()["result"]["contents"]
        return {node["node_id"] for node in json.loads(content["text"])["nodes"] if node["connected"]}

    async def accepts(self, token: str) -> bool:
        """Return whether the relay accepts ``token``."""
        answer = await self._read_nodes({"authorization": f"Bearer {token}"})
        return answer.status_code != httpx2.codes.UNAUTHORIZED

    async def _read_nodes(self, headers: Mapping[str, str]) -> httpx2.Response:
        params = {"uri": "fleet://nodes", "_meta": ERA_META}
        message = {"jsonrpc": "2.0", "id": "nodes", "method": "resources/read", "params": params}
        named = {"mcp-method": "resources/read", "mcp-name": "fleet://nodes"}
        return await self.http.post(MCP_PATH, json=message, headers={**named, **headers})


@dataclass
class FleetStory:
    """The site, and ``agents`` of it by relay.

    Attributes:
        workloads: what agents did: those of ``agents``, and of each story.
        uses: what was followed and lent in each story.
        clocks_off_s: by how much clocks were wrong in stories.
    """

    site: Site
    workloads: list[CallWorkload]
    agents: Mapping[Program, RelayAgent]
    lags: list[Lag]
    chance: random.Random
    uses: list[LastingUse] = field(default_factory=list)
    clocks_off_s: list[int] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def started(cls, directory: Path) -> AsyncIterator[Self]:
        """Hold the site once every node is called by way of every relay, from at least two of them."""
        chance = random.Random(SEED)  # noqa: S311 - which node is called
        async with Site.running(directory, replace(THREE_RELAYS, nodes=NODES, staying=None)) as site:
            workload = await CallWorkload.of(site, directory, chance)
            agents = {one.relay.program: one for one in workload.callers}
            one, two, three = (agents[relay] for relay in RELAYS)
            lags = list[Lag]()
            async with (
                background(measure_loop(lags), *measured_relays(site, lags)),
                one.agent.connected() as http_1,
                two.agent.connected() as http_2,
                three.agent.connected() as http_3,
            ):
                https = zip((one, two, three), (http_1, http_2, http_3), strict=True)
                each = {callers.relay.program: RelayAgent(callers, http, chance) for callers, http in https}
                story = cls(site, [workload], each, lags, chance)
                await story.until_all_called(RELAYS, story.nodes)
                assert len(set(story.holders().values())) > 1
                yield story

    @property
    def nodes(self) -> list[str]:
        return list(self.site.nodes.values())

    def holders(self) -> dict[str, Program]:
        """Return which relay each node that has a session is connected to."""
        relays = {self.site.node_url(relay): relay.program for relay in THREE_RELAYS.relays}
        urls = {node_id: self.site.connected_to(node) for node, node_id in self.site.nodes.items()}
        return {node_id: relays[url] for node_id, url in urls.items() if url is not None}

    async def until_all_called(
        self, relays: Collection[Program], nodes: Collection[str], bound_s: float = BOUND_S
    ) -> None:
        """Wait until every one of ``nodes`` is called by way of every one of ``relays``."""
        async with asyncio.timeout(bound_s):
            for relay in relays:
                for node_id in nodes:
                    await self.until_called(relay, node_id, "ok")

    async def until_called(self, relay: Program, node_id: str, code: str) -> None:
        """Wait until a call by way of ``relay`` ends with ``code``."""
        async with asyncio.timeout(BOUND_S):
            while await self.agents[relay].call(node_id) != code:
                self.site.processes.check()
                await asyncio.sleep(_POLL_S)

    async def until_cluster(self, relay: Program, *, ready: bool) -> str:
        """Wait until a relay says whether it knows the others, and is ready itself; return what it says."""
        async with asyncio.timeout(BOUND_S):
            while True:
                page = await self.page(relay)
                cluster = page["subsystems"]["cluster"]
                if cluster["ready"] is ready and page["ready"]:
                    return str(cluster["state"])
                await asyncio.sleep(_POLL_S)

    async def until_not_ready(self, relay: Program, subsystem: str) -> None:
        """Wait until a relay is not ready because of a subsystem."""
        async with asyncio.timeout(BOUND_S):
            while True:
                page = await self.page(relay)
                if not (page["ready"] or page["subsystems"][subsystem]["ready"]):
                    return
                await asyncio.sleep(_POLL_S)

    async def page(self, relay: Program) -> dict[str, Any]:
        """Return what ``/readyz`` of a relay says."""
        found = await self.agents[relay].http.get(f"{self.site.relay_url(relay)}/readyz")
        page: dict[str, Any] = found.json()
        return page

    @asynccontextmanager
    async def without(self, *programs: Program, end: End = End.SIGKILL) -> AsyncIterator[None]:
        """Have processes ended until the end of the block, which starts them again."""
        began_ms = now_ms()
        processes = self.site.processes
        for program in programs:
            await (processes.kill if end is End.SIGKILL else processes.stop)(program)
        try:
            yield
        finally:
            for program in programs:
                await self.site.start(program)
            self.site.disturbances += [Disturbance(program, began_ms, now_ms()) for program in programs]

    @asynccontextmanager
    async def parted(self, relay: Program, server: Program) -> AsyncIterator[None]:
        """Have a relay and the first server on one side, all else on the other, until the end of the block.

        Their nodes and agents reach all of them.
        """
        begun = []
        for one, link in SERVER_LINKS.items():
            for other, proxy in zip(THREE_RELAYS.servers, self.site.proxies.of(link), strict=True):
                if (one is relay) != (other is server):
                    begun.append((proxy, proxy.begin(LinkFault.CUT)))
        async with self.site.proxies.disturbed(Link.SERVER_SERVERS, LinkFault.CUT):
            yield
        for proxy, number in begun:
            proxy.end(number)

    async def until_listed(self, relays: Collection[Program], node_id: str, *, connected: bool) -> None:
        """Wait until ``relays`` list a node as connected, or as not."""
        async with asyncio.timeout(BOUND_S):
            for relay in relays:
                while (node_id in await self.agents[relay].connected()) is not connected:  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def lists_hold(self, relays: Collection[Program], nodes: Collection[str]) -> AsyncIterator[None]:
        """Hold that ``relays``, once they list ``nodes`` as connected, do so until the end of the block."""

        async def watch() -> None:
            while True:
                for relay in relays:
                    assert set(nodes) <= await self.agents[relay].connected(), relay
                await asyncio.sleep(_POLL_S)

        for node_id in nodes:
            await self.until_listed(relays, node_id, connected=True)
        async with background(watch()):
            yield

    @asynccontextmanager
    async def links_cut(self, *relays: Program) -> AsyncIterator[None]:
        """Have no node reach ``relays`` until the end of the block."""
        async with AsyncExitStack() as stack:
            for relay in relays:
                await stack.enter_async_context(self.site.proxies.disturbed(NODE_LINKS[relay], LinkFault.CUT))
            yield

    async def until_held(self, nodes: Collection[str], relay: Program) -> None:
        await until(lambda: {self.holders().get(node_id) for node_id in nodes} == {relay}, BOUND_S)

    async def until_accepted(self, token: str, *, accepted: bool) -> None:
        """Wait until every relay accepts ``token``, or none does."""
        async with asyncio.timeout(BOUND_S):
            for agent in self.agents.values():
                while await agent.accepts(token) is not accepted:  # noqa: ASYNC110 - on another machine
                    await asyncio.sleep(_POLL_S)

    async def until_signed_times_are_accepted(self) -> None:
        """Wait until the times that nodes have signed or reserved are accepted by a clock that is right."""

        def newest_ms() -> int:
            return max(int(last_issued_file(self.site.state(node)).read_text("ascii")) for node in NODES)

        await until(lambda: newest_ms() < now_ms() + MAX_FUTURE_MS, BOUND_S)

    async def failures(self, relay: Program) -> dict[str, str]:
        """Return what ``relay doctor`` finds that keeps calls from passing a relay, by check."""
        command = self.site.relay_command(relay, "doctor", "--json")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        findings = list(map(json.loads, out.splitlines()))
        assert findings
        return {each["check"]: each["found"] for each in findings if each["severity"] == "failure"}

    @asynccontextmanager
    async def used(self, relay: Program, node: Program) -> AsyncIterator[LastingUse]:
        """Have an agent of ``relay`` follow a node and lend it a tool until the end of the block."""
        (parts,) = (parts for parts in THREE_RELAYS.relays if parts.program is relay)
        use = await LastingUse.of(self.site, parts, node, self.chance)
        self.uses.append(use)
        async with use.running():
            await use.until_works()
            yield use

    @asynccontextmanager
    async def agents_at_work(self) -> AsyncIterator[None]:
        """Have agents call and repeat calls until the end of the block."""
        workload = self.workloads[0].anew()
        self.workloads.append(workload)
        async with workload.running():
            yield

    def violations(self) -> list[str]:
        """Return what of all that the agents saw so far breaks a promise."""
        # An audit has the time of its relay, so a lag excuses what is late by that time too.
        off_ms = [0, *(1000 * off_s for off_s in self.clocks_off_s)]
        lags = [replace(lag, at_ms=lag.at_ms + off) for off in off_ms for lag in self.lags]
        history = _settled(history_of(self.site, lags, []))
        for workload in self.workloads:
            history = workload.added_to(history)
        for use in self.uses:
            history = use.added_to(history)
        return list(map(str, violations(history)))

    def clock_off_by(self, off_s: int, name: str) -> FakedTime:
        """Return a clock that is wrong by so many seconds, for programs of the site."""
        self.clocks_off_s.append(off_s)
        clock = FakedTime(self.site.directory / name)
        clock.set(f"{off_s:+}s")
        return clock


def _settled(history: History) -> History:
    """Return ``history`` without the latest calls of each relay, which have not ended yet.

    The relays go on, and call nodes by themselves. Each audit has the time of its own relay.
    """
    latest_ms = {decision.relay: decision.at_ms for decision in history.decisions}

    def has_ended(decision: Decision) -> bool:
        return abs(latest_ms[decision.relay] - decision.at_ms) > DEADLINE_MS + TOLERANCE_MS

    settled = [each for each in history.decisions if not each.allowed or has_ended(each)]
    return replace(history, decisions=settled)
