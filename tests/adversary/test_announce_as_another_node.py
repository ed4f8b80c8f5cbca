"""Attacker: node A, enrolled in the same tenant. Tried: to announce itself where B does, and as B.

What must happen: B's manifest stays what it was, B's mark does not move, A's tools do not appear under B,
and each attempt is a refusal on B's account, for that is whose topic it came on.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import pytest

from relay.fleet.inventory import PENDING_FOR_MS
from schemas.trust import HighWaterMark, ManifestReason, Outcome
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedNode

NEWER: Final[Mapping[str, Any]] = {"issued_at_ms": NOW_MS + 1}


@pytest.fixture
def attacker(hub: Hub) -> SimulatedNode:
    """Node A, which the relay knows and believes in its own right."""
    attacker = hub.ca.issue(OTHER_NODE_ID)
    hub.connect(attacker)
    return attacker


@pytest.fixture
def good(hub: Hub, node: SimulatedNode) -> bytes:
    """The manifest of B, which is ``node``."""
    return hub.connect(node)


def mark_of(hub: Hub, node: SimulatedNode) -> HighWaterMark | None:
    (known,) = [known for known in hub.nodes_of(node.tenant) if known.node_id == node.node_id]
    return known.mark


def check_untouched(hub: Hub, node: SimulatedNode, good: bytes) -> None:
    assert manifest_in_force(hub, node) == good
    mark = mark_of(hub, node)
    assert mark is not None
    assert mark.issued_at_ms == NOW_MS
    own = node.manifest(issued_at_ms=NOW_MS + 2)
    assert hub.fleet.offer_manifest(NODE_ID, own, "broker").outcome is Outcome.ACCEPTED


def test_its_own_good_manifest_on_another_nodes_topic_is_refused(
    hub: Hub, node: SimulatedNode, attacker: SimulatedNode, good: bytes
) -> None:
    verdict = hub.fleet.offer_manifest(NODE_ID, attacker.manifest(**NEWER), "broker")
    assert verdict.reason is ManifestReason.ID_MISMATCH
    assert verdict.reason.failure.value.code == "E_ATTESTATION_FAILED"
    assert audited_refusals(hub) == [refusal("manifest_refused", NODE_ID, "id_mismatch")]
    check_untouched(hub, node, good)


def test_another_nodes_id_and_leaf_under_its_own_signature_are_refused(
    hub: Hub, node: SimulatedNode, attacker: SimulatedNode, good: bytes
) -> None:
    verdict = hub.fleet.offer_manifest(NODE_ID, node.manifest(signer=attacker.key, **NEWER), "broker")
    assert verdict.reason is ManifestReason.SIGNATURE
    assert verdict.reason.failure.value.code == "E_ATTESTATION_FAILED"
    assert audited_refusals(hub) == [refusal("manifest_refused", NODE_ID, "signature")]
    check_untouched(hub, node, good)


def as_another(attacker: SimulatedNode) -> bytes:
    """Return a manifest that is A's in all but the id: rightly signed, with A's own leaf."""
    return attacker.manifest(node_id=NODE_ID, **NEWER)


def test_another_nodes_id_with_the_leaf_of_the_sender_is_never_accepted(
    hub: Hub, node: SimulatedNode, attacker: SimulatedNode, good: bytes
) -> None:
    # A's leaf is known, but not as B's: to the relay it is a leaf of B's that has not come yet.
    assert hub.fleet.offer_manifest(NODE_ID, as_another(attacker), "broker").outcome is Outcome.PENDING
    check_untouched(hub, node, good)
    hub.clock.advance(PENDING_FOR_MS)
    hub.fleet.sweep()
    assert audited_refusals(hub) == [refusal("manifest_refused", NODE_ID, "unvouched")]


def test_publishing_its_own_leaf_as_another_nodes_does_not_help(
    hub: Hub, node: SimulatedNode, attacker: SimulatedNode, good: bytes
) -> None:
    hub.fleet.offer_manifest(NODE_ID, as_another(attacker), "broker")
    hub.fleet.offer_identity(NODE_ID, attacker.leaf_pem)
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, "id_mismatch")]
    check_untouched(hub, node, good)


def test_another_nodes_leaf_on_its_own_topic_gives_it_nothing(
    hub: Hub, node: SimulatedNode, attacker: SimulatedNode, good: bytes
) -> None:
    hub.fleet.offer_identity(OTHER_NODE_ID, node.leaf_pem)
    forged = node.manifest(node_id=OTHER_NODE_ID, signer=attacker.key, **NEWER)
    assert hub.fleet.offer_manifest(OTHER_NODE_ID, forged, "broker").manifest is None
    assert audited_refusals(hub)[0] == refusal("identity_refused", OTHER_NODE_ID, "id_mismatch")
    check_untouched(hub, node, good)


def not_its_own(attacker: SimulatedNode, node: SimulatedNode) -> list[bytes]:
    """Return B's own manifest, B's as A signs it, and A's under B's id."""
    return [node.manifest(**NEWER), node.manifest(signer=attacker.key, **NEWER), as_another(attacker)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("which", range(3), ids=["B's own", "B's as A signs it", "A's under B's id"])
async def test_over_its_own_session_it_announces_no_other_node(
    relay: ServedRelay, node: SimulatedNode, good: bytes, which: int
) -> None:
    attacker = relay.hub.ca.issue(OTHER_NODE_ID)
    async with relay.session(attacker) as end:
        await end.send("announce", json.loads(not_its_own(attacker, node)[which]))
        refused = (await end.receive("announce_ack")).payload
    assert refused["error"]["code"] == "E_ATTESTATION_FAILED"
    assert refused["error"]["message"] == "The manifest was not accepted: id_mismatch."
    assert audited_refusals(relay.hub) == [refusal("manifest_refused", OTHER_NODE_ID, "id_mismatch")]
    check_untouched(relay.hub, node, good)


@pytest.mark.asyncio(loop_scope="module")
async def test_it_gets_no_session_under_another_nodes_name(
    relay: ServedRelay, node: SimulatedNode, good: bytes
) -> None:
    attacker = relay.hub.ca.issue(OTHER_NODE_ID)
    async with relay.end(attacker) as end:
        await end.answer_challenge(node_id=NODE_ID)
        assert await end.until_closed() == (4001, [])
    async with relay.end(attacker) as end:
        await end.answer_challenge(node_id=NODE_ID, certificate=node.leaf_pem)
        assert await end.until_closed() == (4001, [])
    async with relay.end(attacker) as end:
        await end.answer_challenge(node_id=NODE_ID, certificate=node.leaf_pem, token={"kid": node.kid})
        assert await end.until_closed() == (4001, [])
    assert audited_refusals(relay.hub) == [
        refusal("node_refused", "127.0.0.1", "id_mismatch"),
        refusal("node_refused", "127.0.0.1", "token_unknown_key"),
        refusal("node_refused", "127.0.0.1", "token_signature"),
    ]
    check_untouched(relay.hub, node, good)
