"""Attacker: one who can write on B's identity topic. Tried: to retain a bad certificate over the good one.

What must happen: the bad one is refused with its reason and displaces nothing: B's manifests are accepted as
before, and so is a renewal, however often it is tried.
"""

import pytest

from schemas.identity import to_pem
from schemas.trust import Outcome
from tests.fakes.forged import invalid_leaf
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.signer import (
    DAY_MS,
    LOW_ORDER_KEYS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

CA = SimulatedCa()

BAD = [
    pytest.param(to_pem([b"junk"]), "bad_certificate", id="junk"),
    pytest.param(CA.root_pem, "wrong_form", id="the root"),
    pytest.param(CA.issue(OTHER_NODE_ID).leaf_pem, "id_mismatch", id="another node's"),
    pytest.param(SimulatedCa("elsewhere").issue().leaf_pem, "chain", id="a foreign root's"),
    pytest.param(CA.issue(now_ms=NOW_MS - 91 * DAY_MS).leaf_pem, "validity", id="one that has expired"),
    pytest.param(CA.issue(now_ms=NOW_MS + DAY_MS).leaf_pem, "validity", id="one of tomorrow"),
    pytest.param(
        invalid_leaf(CA, public_key=LOW_ORDER_KEYS["order-4"]), "low_order_key", id="one of a low-order key"
    ),
]


@pytest.mark.parametrize(("pem", "reason"), BAD)
def test_a_bad_identity_displaces_nothing(hub: Hub, node: SimulatedNode, pem: str, reason: str) -> None:
    hub.connect(node)
    for _ in range(5):
        hub.fleet.offer_identity(NODE_ID, pem)
    newer = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, newer, "broker").outcome is Outcome.ACCEPTED
    renewed = hub.ca.issue(key=key_named("the renewed key"), now_ms=NOW_MS + 60_000)
    hub.fleet.offer_identity(NODE_ID, renewed.leaf_pem)
    newest = renewed.manifest(issued_at_ms=NOW_MS + 2)
    assert hub.fleet.offer_manifest(NODE_ID, newest, "broker").outcome is Outcome.ACCEPTED
    assert manifest_in_force(hub, node) == newest
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, reason, 5)]


def test_an_empty_identity_takes_nothing_away(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    hub.fleet.offer_identity(NODE_ID, "")
    newer = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, newer, "broker").outcome is Outcome.ACCEPTED
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, "bad_certificate")]


def test_old_leaves_of_its_own_push_out_no_newer_one(hub: Hub, node: SimulatedNode) -> None:
    old = [
        hub.ca.issue(now_ms=NOW_MS - days * DAY_MS, key=key_named(f"key of {days}")) for days in (40, 30, 20)
    ]
    hub.connect(node)
    for leaf in old:
        hub.fleet.offer_identity(NODE_ID, leaf.leaf_pem)
    newer = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, newer, "broker").outcome is Outcome.ACCEPTED
    assert audited_refusals(hub) == []


def test_an_old_leaf_does_not_bring_back_an_old_tenant(hub: Hub) -> None:
    moved = hub.ca.issue(tenant="globex")
    before = hub.ca.issue(tenant="acme", now_ms=NOW_MS - DAY_MS)
    hub.connect(moved)
    hub.fleet.offer_identity(NODE_ID, before.leaf_pem)
    assert [known.node_id for known in hub.nodes_of("globex")] == [NODE_ID]
    assert hub.nodes_of("acme") == []
