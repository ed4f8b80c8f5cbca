"""Attacker: any client that can reach the relay's port, as fast as it can, from as many addresses as it has;
and a node that was admitted. Tried: to fill the disk with what is written about it: bad tokens, foreign
names, sessions that fail, answers to no call.

What must happen: one counted line for each address, reason and kind of refusal, then one a minute; at most
120 a minute for strangers, however many addresses they have; nothing is lost from the counts; and the last
space on the disk is for calls.
"""

import asyncio
from collections import Counter

import pytest

from relay.audit.refusal_counts import MAX_UNAUTHENTICATED, RefusalEvent
from tests.fakes.disk import full_disk
from tests.fakes.frames import message_id
from tests.fakes.served_relay import HERE, ServedRelay
from tests.fakes.signer import NODE_ID, SimulatedNode

pytestmark = pytest.mark.asyncio(loop_scope="module")

MANY = 200


async def test_many_bad_requests_of_one_address_are_one_line_a_reason(relay: ServedRelay) -> None:
    for number in range(MANY):
        assert (await relay.mcp("tools/list", token=f"bad{number}")).status == 401
        assert (await relay.ask("GET /", host=f"evil{number}.example")).status == 421
        origin = ("Origin", f"https://evil{number}.example")
        assert (await relay.ask("GET /", [origin])).status == 403
    assert relay.hub.audited() == []
    assert relay.refusals() == [
        ("token_refused", HERE, "malformed", MANY),
        ("request_refused", HERE, "host", MANY),
        ("request_refused", HERE, "origin", MANY),
    ]
    relay.hub.refusals.write()
    assert len(relay.hub.audited()) == 3


async def test_many_sessions_that_come_to_nothing_are_one_line(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async def one() -> None:
        async with relay.end(node) as end:
            await end.answer_challenge(token={"nonce": "A" * 43})
            assert await end.until_closed() == (4001, [])

    for _ in range(5):
        await asyncio.gather(*(one() for _ in range(10)))
    assert relay.refusals() == [("node_refused", HERE, "token_nonce", 50)]


async def flood_of_answers(relay: ServedRelay, node: SimulatedNode) -> None:
    async with relay.session(node) as end:
        for number in range(MANY):
            await end.send("cmd_ack", {"ok": True, "result": {}}, message_id(number))
        await end.send("bye", {"reason": "shutting_down"})
        await end.until_closed()
    await relay.until_idle()


@pytest.mark.long
async def test_many_unasked_answers_are_one_line(relay: ServedRelay, node: SimulatedNode) -> None:
    await flood_of_answers(relay, node)
    assert relay.refusals() == [("frame_dropped", NODE_ID, "unasked", MANY)]


@pytest.mark.long
async def test_the_log_does_not_grow_by_a_line_an_answer(relay: ServedRelay, node: SimulatedNode) -> None:
    await flood_of_answers(relay, node)
    assert len(relay.hub.lines.entries("frame dropped")) <= MANY // 10


async def test_more_addresses_than_are_told_apart_are_counted_together(relay: ServedRelay) -> None:
    reasons = ("malformed", "expired", "signature")
    for second in range(30):
        for number in range(1500):
            address = f"198.51.{number >> 8}.{number & 255}" if number % 2 else f"2001:db8:{number:x}::1"
            relay.hub.refusals.count(RefusalEvent.TOKEN_REFUSED, address, reasons[number % 3])
        relay.hub.refusals.write_due()
        relay.hub.seconds.now += 1
        lines = relay.hub.audited()
        assert len(lines) <= MAX_UNAUTHENTICATED + len(reasons), second
    by_reason: Counter[str] = Counter()
    for _, _, reason, count in relay.refusals():
        by_reason[reason] += count
    assert by_reason == dict.fromkeys(reasons, 15_000)


async def test_one_who_has_a_whole_ipv6_network_is_one_source(relay: ServedRelay) -> None:
    for number in range(5000):
        relay.hub.refusals.count(RefusalEvent.TOKEN_REFUSED, f"2001:db8::{number:x}", "malformed")
    assert relay.refusals() == [("token_refused", "2001:db8::/64", "malformed", 5000)]


async def test_a_disk_that_is_full_already_does_not_make_the_counts_grow(relay: ServedRelay) -> None:
    with full_disk():
        for second in range(10):
            for number in range(2000):
                address = f"2001:db8:{second}:{number:x}::1"
                relay.hub.refusals.count(RefusalEvent.TOKEN_REFUSED, address, "expired")
            relay.hub.refusals.write_due()
            relay.hub.seconds.now += 1
    refusals = relay.refusals()
    assert len(refusals) == MAX_UNAUTHENTICATED + 1
    assert sum(count for _, _, _, count in refusals) == 20_000
