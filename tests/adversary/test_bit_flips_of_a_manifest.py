"""Attacker: a broker, or a disk, that changes what it carries. Tried: every single bit of a manifest flipped.

What must happen: not one of them is accepted or raises anything, what was in force stays, the mark does not
move, and each is counted: as a refusal, or as pending where the flip made the name of another leaf.
"""

from collections import Counter

import pytest

from schemas.trust import Outcome
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force
from tests.fakes.signer import NODE_ID, NOW_MS, SimulatedNode


def flips(wire: bytes) -> list[bytes]:
    flipped = []
    for position in range(len(wire) * 8):
        changed = bytearray(wire)
        changed[position // 8] ^= 1 << position % 8
        flipped.append(bytes(changed))
    return flipped


@pytest.mark.parametrize("way", ["broker", "session"])
def test_no_manifest_with_one_bit_flipped_is_accepted(hub: Hub, node: SimulatedNode, way: str) -> None:
    good = hub.connect(node)
    newer = node.manifest(issued_at_ms=NOW_MS + 1)
    outcomes = Counter(hub.fleet.offer_manifest(NODE_ID, wire, way).outcome for wire in flips(newer))
    assert set(outcomes) == {Outcome.REJECTED, Outcome.PENDING}
    assert manifest_in_force(hub, node) == good
    lines = audited_refusals(hub)
    assert {(line["event"], line["source"]) for line in lines} == {("manifest_refused", NODE_ID)}
    assert sum(line["count"] for line in lines) >= outcomes[Outcome.REJECTED]
    # All that was wrong with them was the bit.
    assert hub.fleet.offer_manifest(NODE_ID, newer, way).outcome is Outcome.ACCEPTED


def test_only_a_flip_in_the_name_of_the_leaf_lets_it_wait_for_one(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    newer = node.manifest(issued_at_ms=NOW_MS + 1)
    start = newer.index(node.kid.encode()) * 8
    kid = range(start, start + len(node.kid) * 8)
    for position, wire in enumerate(flips(newer)):
        pending = hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.PENDING
        assert not pending or position in kid
