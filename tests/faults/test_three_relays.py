"""Three relays on three nats-servers, of which one or several are lost, parted, or have a wrong clock.

Every relay goes on with its own nodes, and the others' are called again once they can be reached. No call has
two outcomes, also of those that agents repeat by way of other relays meanwhile.
"""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio

from tests.chaos.topology import End, Program
from tests.faults.faked_time import FakedTime
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
    async with FleetStory.told(tmp_path_factory.mktemp("fleet")) as told:
        yield told


@asynccontextmanager
async def healed(story: FleetStory) -> AsyncIterator[None]:
    """Hold agents that work, and see in the end that everything is right again, and no promise was broken."""
    async with story.agents_at_work():
        yield
        await story.until_all_called(RELAYS, story.nodes)
    for relay in RELAYS:
        await story.until_cluster(relay, ready=True)
    assert story.violations() == []


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
                assert state.startswith("not connected, its own nodes alone"), state
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
@pytest.mark.parametrize("step", ["+5m", "-4m"])
async def test_a_relay_whose_clock_is_minutes_off_serves_and_harms_no_other(
    story: FleetStory, step: str
) -> None:
    wrong = story.holders()[story.nodes[0]]
    others = [relay for relay in RELAYS if relay is not wrong]
    clock = FakedTime(story.site.directory / f"time{step}")
    clock.set(step)
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
        issue = ("token", "issue", "--json", "--sub", "guest", "--public-url", story.site.public_url)
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
    ahead = FakedTime(story.site.directory / "time-ahead")
    # Just beyond what is accepted: what they sign now must be accepted again when their clocks are right.
    ahead.set("+305s")
    moved = [*others, *NODES]
    async with healed(story):
        async with story.without(*moved, end=End.SIGTERM):
            story.site.prefixes.update(dict.fromkeys(moved, ahead.prefix))
        await story.until_not_ready(behind, "clock")
        assert "clock" in await story.failures(behind)
        async with story.lists_hold(others, story.nodes):
            await story.until_all_called(others, story.nodes)
        async with story.without(*moved, end=End.SIGTERM):
            for program in moved:
                del story.site.prefixes[program]
