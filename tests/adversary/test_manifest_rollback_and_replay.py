"""Attacker: one who keeps a node's old manifests, and can write on its topic or restart the relay.

Tried: rollback, replay, fast-forward, two manifests of one instant, a tombstone and then a replay, a restart
and then a replay. What must happen: nothing older than the newest ever accepted comes back, and a time in
the far future does not move the mark, which would shut the node out.
"""

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest

from schemas.manifest import MAX_FUTURE_MS
from schemas.registry import SchemaRegistry
from schemas.trust import ManifestReason, Outcome, Verdict
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import DAY_MS, ECHO, NODE_ID, NOW_MS, TENANT, TTL_MS, SimulatedNode

REFUSED = "manifest_refused"


def offer(hub: Hub, wire: bytes, way: str = "broker") -> Verdict:
    return hub.fleet.offer_manifest(NODE_ID, wire, way)


def mark(hub: Hub) -> int | None:
    (known,) = hub.nodes_of(TENANT)
    return known.mark.issued_at_ms if known.mark else None


def at(node: SimulatedNode, offset_ms: int) -> bytes:
    return node.manifest(issued_at_ms=NOW_MS + offset_ms)


def test_an_older_manifest_does_not_come_back(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    newest = at(node, 10)
    offer(hub, newest)
    verdict = offer(hub, at(node, 9))
    assert verdict.reason is ManifestReason.ROLLBACK
    assert verdict.reason.failure.value.code == "E_MANIFEST_INVALID"
    assert verdict.mark is not None
    assert verdict.mark.issued_at_ms == NOW_MS + 10
    assert manifest_in_force(hub, node) == newest
    assert audited_refusals(hub) == [refusal(REFUSED, NODE_ID, "rollback")]


def test_a_mark_of_a_clock_that_was_ahead_opens_no_way_to_a_replay(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    hub.clock.advance(DAY_MS)
    offer(hub, at(node, DAY_MS), "session")
    hub.clock.advance(-DAY_MS)
    assert offer(hub, at(node, -2)).outcome is Outcome.STALE  # a replay, by the broker
    assert mark(hub) == NOW_MS + DAY_MS
    newest = at(node, 0)
    assert offer(hub, newest, "session").outcome is Outcome.ACCEPTED
    assert offer(hub, at(node, -1)).outcome is Outcome.STALE
    assert offer(hub, at(node, DAY_MS)).reason is ManifestReason.FUTURE
    assert (mark(hub), manifest_in_force(hub, node)) == (NOW_MS, newest)


def test_while_it_is_connected_an_older_one_is_a_brokers_old_copy(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    newest = at(node, 10)
    offer(hub, newest, "session")
    assert offer(hub, node.manifest()).outcome is Outcome.STALE
    assert manifest_in_force(hub, node) == newest
    assert audited_refusals(hub) == []


def test_the_same_bytes_again_change_nothing_and_are_no_refusal(hub: Hub, node: SimulatedNode) -> None:
    good = hub.connect(node)
    hub.clock.advance(TTL_MS - 1)
    assert [offer(hub, good).outcome for _ in range(100)] == [Outcome.UNCHANGED] * 100
    (known,) = hub.nodes_of(TENANT)
    assert known.is_listed(hub.clock())
    # A replay prolongs nothing.
    hub.clock.advance(1)
    assert offer(hub, good).outcome is Outcome.UNCHANGED
    assert not known.is_listed(hub.clock())
    assert audited_refusals(hub) == []


def test_the_far_future_is_refused_and_excludes_no_node(hub: Hub, node: SimulatedNode) -> None:
    good = hub.connect(node)
    for offset_ms in (MAX_FUTURE_MS + 1, 365 * 86_400_000, 2**53 - 1 - NOW_MS - TTL_MS):
        verdict = offer(hub, at(node, offset_ms))
        assert verdict.reason is ManifestReason.FUTURE
        assert verdict.reason.failure.value.code == "E_MANIFEST_INVALID"
    # Beyond whole numbers, where one is no different from the next.
    assert offer(hub, node.manifest(issued_at_ms=1e21, expires_at_ms=1e21 + 131_072)).manifest is None
    assert manifest_in_force(hub, node) == good
    assert mark(hub) == NOW_MS
    assert offer(hub, at(node, 1)).outcome is Outcome.ACCEPTED
    assert audited_refusals(hub) == [refusal(REFUSED, NODE_ID, "future", 4)]


def test_the_near_future_is_a_clock_that_is_fast_and_no_more(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    assert offer(hub, at(node, MAX_FUTURE_MS)).outcome is Outcome.ACCEPTED
    assert mark(hub) == NOW_MS + MAX_FUTURE_MS


def test_of_two_manifests_of_one_instant_the_first_stays(hub: Hub, node: SimulatedNode) -> None:
    good = hub.announce(node)
    for capabilities, expires_at_ms in (([ECHO], NOW_MS + TTL_MS), ([ECHO], NOW_MS + TTL_MS + 1)):
        other = node.manifest(capabilities=capabilities, expires_at_ms=expires_at_ms)
        verdict = offer(hub, other)
        assert verdict.reason is ManifestReason.CONFLICT
        assert verdict.reason.failure.value.code == "E_MANIFEST_INVALID"
    assert manifest_in_force(hub, node) == good
    assert audited_refusals(hub) == [refusal(REFUSED, NODE_ID, "conflict", 2)]


def test_an_expired_manifest_is_refused_although_it_is_new(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    expired = node.manifest(issued_at_ms=NOW_MS + 1, expires_at_ms=NOW_MS + 1000)
    hub.clock.advance(1000)
    verdict = offer(hub, expired)
    assert verdict.reason is ManifestReason.EXPIRED
    assert mark(hub) == NOW_MS
    assert audited_refusals(hub) == [refusal(REFUSED, NODE_ID, "expired")]


def test_a_tombstone_does_not_open_the_way_for_a_replay(hub: Hub, node: SimulatedNode) -> None:
    old = hub.announce(node)
    offer(hub, at(node, 10))
    hub.fleet.tombstone(NODE_ID)
    assert manifest_in_force(hub, node) is None
    assert offer(hub, old).reason is ManifestReason.ROLLBACK
    assert manifest_in_force(hub, node) is None
    assert mark(hub) == NOW_MS + 10
    assert audited_refusals(hub) == [refusal(REFUSED, NODE_ID, "rollback")]


def test_a_tombstone_takes_nothing_from_a_node_that_is_connected(hub: Hub, node: SimulatedNode) -> None:
    good = hub.connect(node)
    hub.fleet.tombstone(NODE_ID)
    assert manifest_in_force(hub, node) == good


@pytest.mark.asyncio
async def test_a_restart_does_not_open_the_way_for_a_replay(tmp_path: Path, registry: SchemaRegistry) -> None:
    first = Hub(tmp_path, registry)
    node = first.ca.issue()
    old = first.announce(node)
    newest = at(node, 10)
    offer(first, newest)
    await flushed(first)
    first.close()
    for replay, reason in (
        (old, ManifestReason.ROLLBACK),
        (node.manifest(capabilities=[ECHO]), ManifestReason.ROLLBACK),
    ):
        again = Hub(tmp_path, registry)
        again.fleet.offer_identity(NODE_ID, node.leaf_pem)
        assert offer(again, replay).reason is reason
        again.fleet.tombstone(NODE_ID)
        assert offer(again, replay).reason is reason
        assert manifest_in_force(again, node) is None
        assert audited_refusals(again)[-1] == refusal(REFUSED, NODE_ID, "rollback", 2)
        # What was newest then is so still: a broker's retained copy is how a relay learns who is there.
        assert offer(again, newest).outcome is Outcome.ACCEPTED
        await flushed(again)
        again.close()


async def flushed(hub: Hub) -> None:
    """Let the marks reach the disk as at the end of a relay."""
    running = asyncio.create_task(hub.marks.run())
    await asyncio.sleep(0)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert {node_id for node_id, _, _ in hub.marks.load()} == {NODE_ID}


@pytest.mark.asyncio(loop_scope="module")
async def test_over_a_session_the_node_learns_what_it_must_overtake(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    hub = relay.hub
    hub.announce(node)
    offer(hub, at(node, 10))
    async with relay.end(node) as end:
        await end.authenticate()
        await end.send("announce", json.loads(at(node, MAX_FUTURE_MS + 1)))
        refused = (await end.receive("announce_ack")).payload
    assert refused["error"]["code"] == "E_MANIFEST_INVALID"
    assert refused["error"]["message"] == "The manifest was not accepted: future."
    assert refused["mark_issued_at_ms"] == NOW_MS + 10
    assert audited_refusals(hub) == [refusal(REFUSED, NODE_ID, "future")]
