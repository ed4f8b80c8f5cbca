"""Three relays on three nats-servers, of which one or several are lost, parted, or have a wrong clock.

Every relay goes on with its own nodes, and the others' are called again once they can be reached. No call has
two outcomes, also of those that agents repeat by way of other relays meanwhile.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import httpx2
import pytest
import pytest_asyncio

from tests.chaos import once_kind
from tests.chaos.agents import agent_of
from tests.chaos.callers import Callers, new_id
from tests.chaos.history import Call
from tests.chaos.topology import THREE_RELAYS, End, Program
from tests.fakes.polling import until
from tests.faults.fleet_story import CALLED_AGAIN_S, NODES, RELAYS, FleetStory

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("ended_handshakes"),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def story(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FleetStory]:
    async with FleetStory.started(tmp_path_factory.mktemp("fleet")) as started:
        yield started


@asynccontextmanager
async def healed(story: FleetStory) -> AsyncIterator[None]:
    """Hold agents that work, and see in the end that everything is right again, and no promise was broken."""
    async with story.agents_at_work():
        yield
        await story.until_all_called(RELAYS, story.nodes)
    for relay in RELAYS:
        await story.until_cluster(relay, ready=True)
    assert story.violations() == []


@dataclass(frozen=True, slots=True)
class OwnAgent:
    """An agent of its own, whose records differ from those of others by its name ``sub``."""

    story: FleetStory
    sub: str
    by_relay: Mapping[Program, tuple[Callers, httpx2.AsyncClient]]

    @classmethod
    @asynccontextmanager
    async def of(cls, story: FleetStory, sub: str) -> AsyncIterator[Self]:
        """Hold one that is connected to every relay."""
        site, agent = story.site, await agent_of(story.site, sub)
        journal = site.directory / "calls.jsonl"
        callers = [Callers(agent.at(site.agent_url(relay)), journal, relay) for relay in THREE_RELAYS.relays]
        story.workloads.append(replace(story.workloads[0], callers=tuple(callers), repeaters=()))
        async with AsyncExitStack() as stack:
            https = [await stack.enter_async_context(one.agent.connected()) for one in callers]
            by_relay = {one.relay.program: (one, http) for one, http in zip(callers, https, strict=True)}
            yield cls(story, sub, by_relay)

    async def call(self, relay: Program, node_id: str, key: str) -> Call:
        """Call the tool of a node that is not idempotent, under ``key``."""
        callers, http = self.by_relay[relay]
        return await callers.call_keyed(http, node_id, new_id(self.story.chance), key)

    async def node_that_stayed(self) -> str:
        """Return a node that runs what has a new key: one that has moved lately does not."""
        for node_id in self.story.nodes:
            call = await self.call(RELAYS[0], node_id, new_id(self.story.chance))
            if [answer.code for answer in call.answers] == ["ok"]:
                return node_id
        raise AssertionError("every node has moved lately")

    async def call_that_hangs(self, relay: Program, node_id: str) -> tuple[str, Path, "asyncio.Task[Call]"]:
        """Return the key of a call that hangs at its node, the file of its runs, and the call."""
        while True:
            key = new_id(self.story.chance)
            runs = once_kind.held_file(self.story.site.packages, key)
            runs.touch()
            call = asyncio.create_task(self.call(relay, node_id, key))
            await until(lambda: runs.read_text() or call.done())  # noqa: B023 - called within the turn
            if runs.read_text():
                return key, runs, call

    def recorded(self, relay: Program, node_id: str) -> list[dict[str, Any]]:
        """Return what the audit of a relay has of calls of the tool of a node."""
        lines = map(json.loads, self.story.site.plans[relay].state.audit.read_text("ascii").splitlines())
        named = (self.sub, once_kind.tool(node_id))
        return [line for line in lines if (line.get("sub"), line.get("tool")) == named]

    def outcomes(self, relay: Program, node_id: str, correlation_id: str) -> list[dict[str, Any]]:
        """Return the ends of one of these calls."""
        ended = [line for line in self.recorded(relay, node_id) if "outcome" in line]
        return [line for line in ended if line["correlation_id"] == correlation_id]


# The first of the stories: after the others, every node has moved.
async def test_what_hangs_at_a_node_when_its_relay_is_killed_is_unknown_and_does_not_run_again(
    story: FleetStory,
) -> None:
    async with healed(story), OwnAgent.of(story, "agent-of-a-killed-relay") as agent:
        node_id = await agent.node_that_stayed()
        victim = story.holders()[node_id]
        asked, another = (relay for relay in RELAYS if relay is not victim)
        key, runs, calling = await agent.call_that_hangs(asked, node_id)
        begun = [line for line in agent.recorded(asked, node_id) if "decision" in line][-1]
        assert begun["decision"] == "allow"
        async with story.without(victim):
            assert [answer.code for answer in (await calling).answers] == ["E_DEADLINE_EXCEEDED"]
            # Its line is written a moment after the answer.
            await until(lambda: agent.outcomes(asked, node_id, begun["correlation_id"]))
            (outcome,) = agent.outcomes(asked, node_id, begun["correlation_id"])
            assert (outcome["outcome"], outcome["code"]) == ("error", "E_DEADLINE_EXCEEDED")
            await story.until_called(another, node_id, "ok")
            for relay in (another, asked):
                retry = await agent.call(relay, node_id, key)
                assert [answer.code for answer in retry.answers] == ["E_DEADLINE_EXCEEDED"]
            assert runs.read_text() == "run\n"
        ends = [len(agent.outcomes(relay, node_id, begun["correlation_id"])) for relay in (asked, another)]
        assert ends == [1, 0]
        runs.unlink()


async def test_the_nodes_of_a_relay_that_is_killed_are_called_again_over_another(story: FleetStory) -> None:
    holders = story.holders()
    victim = holders[story.nodes[0]]
    others = [relay for relay in RELAYS if relay is not victim]
    elsewhere = [node_id for node_id, relay in holders.items() if relay is not victim]
    assert elsewhere
    async with healed(story), story.lists_hold(others, elsewhere), story.without(victim):
        await story.until_all_called(others, story.nodes, CALLED_AGAIN_S)


async def test_a_server_that_is_killed_takes_no_node_from_the_lists(story: FleetStory) -> None:
    restarted = story.site.nodes[Program.NODE_4]
    others = [node_id for node_id in story.nodes if node_id != restarted]
    # Of the relays, each is connected to one of the servers that it has picked itself.
    async with healed(story), story.lists_hold(RELAYS, others), story.without(Program.SERVER):
        async with story.without(Program.NODE_4):
            # The bucket is written and read without it.
            await story.until_listed(RELAYS, restarted, connected=False)
        await story.until_listed(RELAYS, restarted, connected=True)
        await story.until_all_called(RELAYS, story.nodes)


async def test_without_any_server_each_relay_serves_its_own_nodes_and_says_so(story: FleetStory) -> None:
    holders = story.holders()
    async with healed(story):
        async with story.without(Program.SERVER, Program.SERVER_2, Program.SERVER_3):
            for relay in RELAYS:
                state = await story.until_cluster(relay, ready=False)
                assert state.startswith("not connected; only this relay's own nodes can be called"), state
                for node_id, holder in holders.items():
                    await story.until_called(relay, node_id, "ok" if holder is relay else "E_NODE_OFFLINE")
        assert story.holders() == holders


async def test_a_relay_that_is_parted_from_the_others_loses_the_nodes_that_move(story: FleetStory) -> None:
    holders = story.holders()
    parted, moves = holders[story.nodes[0]], story.nodes[0]
    others = [relay for relay in RELAYS if relay is not parted]
    async with healed(story):
        async with story.parted(parted, Program.SERVER):
            for node_id, holder in holders.items():
                is_reached = holder is parted
                await story.until_called(parted, node_id, "ok" if is_reached else "E_NODE_OFFLINE")
                await story.until_called(others[0], node_id, "E_NODE_OFFLINE" if is_reached else "ok")
            async with story.links_cut(parted):
                await story.until_all_called(others, story.nodes)
            await story.until_called(parted, moves, "E_NODE_OFFLINE")
        assert story.holders()[moves] in others


async def test_what_follows_a_node_and_lends_to_it_goes_on_when_the_node_moves(story: FleetStory) -> None:
    node_id, holders = story.nodes[0], story.holders()
    left = holders[node_id]
    used, reached = (relay for relay in RELAYS if relay is not left)
    async with healed(story), story.used(used, NODES[0]) as use:
        sessions = dict(use.lender.sessions)
        async with story.links_cut(left, used):
            await story.until_held([node_id], reached)
            await use.until_works()
        (stream,) = use.followers.followings
        assert (stream.ends, stream.ended_ms) == ([], None)
        assert use.lender.sessions == sessions


# At five minutes behind, manifests begin to be of the future: the next story.
@pytest.mark.parametrize("off_s", [300, -240])
async def test_a_relay_whose_clock_is_minutes_off_serves_and_harms_no_other(
    story: FleetStory, off_s: int
) -> None:
    wrong = story.holders()[story.nodes[0]]
    others = [relay for relay in RELAYS if relay is not wrong]
    clock = story.clock_off_by(off_s, f"time{off_s:+}")
    async with healed(story):
        async with story.without(wrong):
            story.site.prefixes[wrong] = clock.prefix
        await story.until_cluster(wrong, ready=True)
        async with story.lists_hold(RELAYS, story.nodes):
            await story.until_all_called(RELAYS, story.nodes)
        # It has their sessions too, and is used at a node by agents of another relay and by its own.
        async with story.links_cut(*others):
            await story.until_held(story.nodes, wrong)
            async with story.used(others[0], NODES[0]) as one, story.used(wrong, NODES[1]) as another:
                await story.until_all_called(RELAYS, story.nodes)
                await one.until_works()
                await another.until_works()
        # A token that its machine issues is accepted by all, until it is revoked there.
        issue = ("token", "issue", "--json", "--sub", "agent", "--public-url", story.site.public_url)
        issued = json.loads(await story.site.command(wrong, *issue))
        await story.until_accepted(issued["token"], accepted=True)
        await story.site.command(wrong, "token", "revoke", issued["jti"])
        await story.until_accepted(issued["token"], accepted=False)
        assert await story.failures(wrong) == {}
        audits = [story.site.state(relay) for relay in RELAYS]
        await story.site.command(wrong, "audit", "verify", *audits)
        async with story.without(wrong, end=End.SIGTERM):
            del story.site.prefixes[wrong]


async def test_a_relay_that_is_behind_the_clocks_of_all_others_is_not_ready_and_harms_none(
    story: FleetStory,
) -> None:
    behind = story.holders()[story.nodes[0]]
    others = [relay for relay in RELAYS if relay is not behind]
    # Just beyond what is accepted: what they sign now is soon accepted again when their clocks are right.
    ahead = story.clock_off_by(305, "time-ahead")
    moved = [*others, *NODES]
    async with healed(story):
        async with story.without(*moved, end=End.SIGTERM):
            story.site.prefixes.update(dict.fromkeys(moved, ahead.prefix))
        await story.until_not_ready(behind, "clock")
        assert "clock" in await story.failures(behind)
        async with story.lists_hold(others, story.nodes):
            await story.until_all_called(others, story.nodes)
        async with story.without(*moved, end=End.SIGTERM):
            # A node signs no earlier time again, and would be refused until its next heartbeat, in a minute.
            await story.until_signed_times_are_accepted()
            for program in moved:
                del story.site.prefixes[program]
