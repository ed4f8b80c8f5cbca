"""Attacker: agents with valid tokens. Tried: a thousand that follow one node, at any cadence; one that does
not read; all of them vanishing without a word; one that subscribes and stops over and over.

What must happen: the node samples once for all of them, a slow one loses its own samples and no others, what
is held for each is bounded, and the node stops when the last lease has lapsed.
"""

import asyncio
from pathlib import Path

import pytest

from relay.streams.telemetry.hub import MAX_WAITING
from relay.streams.telemetry.stream import MIN_LEASE_S
from schemas.registry import SchemaRegistry
from tests.fakes.followed import Followed, Reader

CROWD = 1000
SAMPLES = 40


@pytest.fixture
def followed(tmp_path: Path, registry: SchemaRegistry) -> Followed:
    return Followed(tmp_path, registry)


async def test_a_thousand_subscribers_share_one_stream_and_lapse_together(followed: Followed) -> None:
    notified = [0] * CROWD
    for number in range(CROWD):
        agent = followed.agent(f"agent-{number}")
        assert (await followed.subscribe(agent, 1000 * (1 + number % 4))).error is None

        def notify(number: int = number) -> None:
            notified[number] += 1

        followed.follow(agent, notify)
    assert followed.leases() == [(1000, 30_000)]
    for _ in range(12):
        followed.sample()
    assert notified == [12, 6, 4, 3] * (CROWD // 4)
    assert followed.counted("telemetry_samples_total", verdict="accepted") == 12


async def test_agents_that_vanish_leave_a_node_that_stops(followed: Followed) -> None:
    for number in range(CROWD):
        await followed.subscribe(followed.agent(f"agent-{number}"))
    followed.pass_time(int(MIN_LEASE_S))
    assert followed.leases()[-1] == (1000, 0)
    assert followed.counted("telemetry_subscriptions") == 0


async def test_one_that_does_not_read_slows_no_other_and_holds_little(followed: Followed) -> None:
    slow, quick = Reader(), Reader()
    calls = [
        asyncio.create_task(followed.subscribe(followed.agent(sub), emit=reader.emit, follow_s=600))
        for sub, reader in (("slow", slow), ("quick", quick))
    ]
    for reader in (slow, quick):
        await reader.next()
    slow.reads.clear()
    for number in range(SAMPLES):
        followed.sample()
        assert (await quick.next())["progress"] == 2 + number
    assert slow.received.qsize() == 1
    slow.reads.set()
    waited = [(await slow.next())["progress"] for _ in range(1 + MAX_WAITING)]
    assert waited[1:] == list(range(SAMPLES + 2 - MAX_WAITING, SAMPLES + 2))
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)


async def test_a_node_gets_one_lease_a_second_at_most_after_a_burst(followed: Followed) -> None:
    agent = followed.agent()
    followed.frames.limited = True  # as the rate of the frame does after a burst
    for _ in range(100):
        await followed.subscribe(agent)
        followed.follow(agent)()
    await followed.subscribe(agent)
    followed.frames.limited = False
    followed.pass_time(1)
    assert followed.leases() == [(1000, 30_000)]
