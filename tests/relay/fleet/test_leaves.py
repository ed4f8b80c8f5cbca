"""Which leaves are believed. What the fleet makes of them is in ``test_fleet``."""

import base64
from dataclasses import replace

import pytest

import relay.fleet.leaves
from relay.auth.permissions import Rights
from relay.fleet.leaves import FleetTrust, KeptLeaves, root_validities
from relay.fleet.node_record import Where
from relay.fleet.replay_marks import KeptLeaf
from schemas.certificates import IdentityError, verify_leaf
from schemas.errors import Failure
from schemas.identity import first_certificate_in, kid_of, to_pem
from schemas.kinds import KindRegistry
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.trust import HighWaterMark, ManifestReason, Outcome, TrustRules
from tests.fakes.fleet_tools import ECHO_NAME, METRICS_NAME, OTHER_TENANT, READ_ONLY, failure, listed
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.signer import (
    DAY_MS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedCa,
    SimulatedNode,
    key_named,
)
from tests.fakes.view_stage import Calls

CA, ELSEWHERE = SimulatedCa(), SimulatedCa("elsewhere")
NODE = CA.issue()
KEPT = KeptLeaf.of(NODE.identity())
ROOTS = [CA.root_pem]


@pytest.fixture(scope="module")
def trust(registry: SchemaRegistry) -> FleetTrust:
    return FleetTrust(TrustRules(registry, KindRegistry()), [CA.root_pem], frozenset())


@pytest.mark.parametrize("revoked", [NODE.kid, NODE.identity().issued_as], ids=["kid", "issuer-and-serial"])
def test_a_revoked_leaf_is_refused(trust: FleetTrust, revoked: str) -> None:
    with pytest.raises(IdentityError, match="revoked"):
        replace(trust, revoked=frozenset({revoked})).identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)


@pytest.fixture
def keeping(trust: FleetTrust) -> FleetTrust:
    """Return a trust that has kept the leaf."""
    return replace(trust, kept=KeptLeaves([KEPT]))


def test_a_leaf_that_was_kept_has_the_identity_that_verifying_it_gives() -> None:
    assert KeptLeaves([KEPT]).recall(NODE.leaf_pem, ROOTS, NOW_MS) == verify_leaf(
        NODE.leaf_pem, ROOTS, NOW_MS
    )
    chain = "text\n" + NODE.leaf_pem + CA.root_pem
    assert KeptLeaves([KEPT]).recall(chain, [ELSEWHERE.root_pem, *ROOTS], NOW_MS) == NODE.identity()


def test_it_is_not_verified_and_not_kept_again(keeping: FleetTrust, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.fleet.leaves.verify_leaf", None)  # to call it would fail
    kept: list[KeptLeaf] = []
    keeping = replace(keeping, kept=KeptLeaves([KEPT], kept.append))
    assert keeping.identify(NODE_ID, NODE.leaf_pem, None, NOW_MS) == NODE.identity()
    assert kept == []


def test_a_leaf_that_is_new_is_verified_and_kept(keeping: FleetTrust) -> None:
    kept: list[KeptLeaf] = []
    keeping = replace(keeping, kept=KeptLeaves([], kept.append))
    keeping.identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)
    assert kept == [KEPT]


def test_one_that_is_rejected_is_not_kept(keeping: FleetTrust) -> None:
    kept: list[KeptLeaf] = []
    keeping = replace(keeping, kept=KeptLeaves([], kept.append))
    for pem in (ELSEWHERE.issue().leaf_pem, CA.issue(OTHER_NODE_ID).leaf_pem):
        with pytest.raises(IdentityError):
            keeping.identify(NODE_ID, pem, None, NOW_MS)
    assert kept == []


def test_one_that_was_revoked_since_is_rejected(keeping: FleetTrust) -> None:
    with pytest.raises(IdentityError, match="revoked"):
        replace(keeping, revoked=frozenset({NODE.kid})).identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)


def test_one_whose_root_is_not_trusted_any_more_is_rejected(keeping: FleetTrust) -> None:
    with pytest.raises(IdentityError, match="chain"):
        replace(keeping, roots=[ELSEWHERE.root_pem]).identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)


def test_one_of_another_node_is_rejected(keeping: FleetTrust) -> None:
    with pytest.raises(IdentityError, match="id_mismatch"):
        keeping.identify(OTHER_NODE_ID, NODE.leaf_pem, None, NOW_MS)


@pytest.mark.parametrize(
    "now_ms",
    [
        pytest.param(NOW_MS - DAY_MS, id="before it begins"),
        pytest.param(KEPT.not_after_ms, id="when it has expired"),
        pytest.param(NOW_MS + 4000 * DAY_MS, id="when its root has expired"),
    ],
)
def test_one_that_is_not_valid_now_is_left_to_be_verified(now_ms: int) -> None:
    assert KeptLeaves([KEPT]).recall(NODE.leaf_pem, ROOTS, now_ms) is None
    with pytest.raises(IdentityError):
        verify_leaf(NODE.leaf_pem, ROOTS, now_ms)


def test_a_root_that_has_expired_verifies_no_leaf_that_is_kept() -> None:
    root = next(iter(root_validities(tuple(ROOTS)).values()))
    lasting = CA.issue(valid_days=3649)
    kept = KeptLeaf.of(lasting.identity())
    assert KeptLeaves([kept]).recall(lasting.leaf_pem, ROOTS, min(root[1], kept.not_after_ms) - 1) is not None
    assert KeptLeaves([kept]).recall(lasting.leaf_pem, ROOTS, root[1]) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "globex"},
        {"tenant": ""},
        {"node_id": OTHER_NODE_ID},
        {"node_id": NODE_ID[:-1]},
        {"node_id": ""},
        {"public_key": bytes(key_named("a thief").verify_key)},
        {"public_key": b""},
        {"not_before_ms": 0},
        {"not_after_ms": KEPT.not_after_ms + DAY_MS},
        {"root_kid": kid_of(first_certificate_in(ELSEWHERE.root_pem))},
        {"root_kid": ""},
        {"tenant": "\ud800"},
    ],
    ids=lambda changes: str(next(iter(changes.items()))[0]),
)
def test_what_does_not_fit_the_bytes_of_the_leaf_counts_for_nothing(changes: dict[str, object]) -> None:
    changed = KEPT._replace(**changes)  # type: ignore[arg-type]  # a case
    assert KeptLeaves([changed]).recall(NODE.leaf_pem, ROOTS, NOW_MS) is None


def test_another_leaf_with_the_same_facts_is_verified() -> None:
    again = CA.issue(key=NODE.key)
    assert KeptLeaves([KEPT]).recall(again.leaf_pem, ROOTS, NOW_MS) is None
    der = bytearray(first_certificate_in(NODE.leaf_pem))
    der[-1] ^= 1
    assert KeptLeaves([KEPT]).recall(to_pem([bytes(der)]), ROOTS, NOW_MS) is None
    # Kept by the thumbprint of these bytes, and of no certificate.
    text = base64.b64encode(b"not a certificate").decode()
    kid = kid_of(b"not a certificate")
    pem = f"-----BEGIN CERTIFICATE-----\n{text}\n-----END CERTIFICATE-----\n"
    assert KeptLeaves([KEPT._replace(kid=kid)]).recall(pem, ROOTS, NOW_MS) is None


@pytest.mark.parametrize(
    "pem", ["", "\x1b[31m", "-----BEGIN CERTIFICATE-----\nA\n-----END CERTIFICATE-----\n"]
)
def test_what_is_no_certificate_is_left_to_be_rejected(pem: str) -> None:
    assert KeptLeaves([KEPT]).recall(pem, ROOTS, NOW_MS) is None


def test_a_root_that_cannot_be_read_verifies_nothing() -> None:
    broken = to_pem([b"\x30\x03abc"])
    assert set(root_validities((CA.root_pem, broken))) == {KEPT.root_kid}


# --- identities ---------------------------------------------------------------------------------------


def test_a_leaf_of_the_root_identifies_its_node(hub: Hub, node: SimulatedNode) -> None:
    assert hub.fleet.identify(NODE_ID, node.leaf_pem) == node.identity()


@pytest.mark.parametrize(
    ("pem", "reason"),
    [
        pytest.param("", "bad_certificate", id="nothing"),
        pytest.param("garbage", "bad_certificate", id="garbage"),
        pytest.param("x" * 20_000, "bad_certificate", id="too much"),
        pytest.param(
            "-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n",
            "bad_certificate",
            id="no base64",
        ),
        pytest.param(SimulatedCa("elsewhere").issue().leaf_pem, "chain", id="a foreign root"),
        pytest.param(SimulatedCa().issue(OTHER_NODE_ID).leaf_pem, "id_mismatch", id="another node's"),
        pytest.param(SimulatedCa().issue(now_ms=NOW_MS - 91 * DAY_MS).leaf_pem, "validity", id="expired"),
    ],
)
def test_a_leaf_that_proves_nothing_displaces_nothing(
    hub: Hub, node: SimulatedNode, pem: str, reason: str
) -> None:
    hub.connect(node)
    with pytest.raises(IdentityError) as caught:
        hub.fleet.identify(NODE_ID, pem)
    assert caught.value.reason == reason
    hub.fleet.offer_identity(NODE_ID, pem)
    assert hub.counted("identities_total", verdict=reason) == 1
    wire = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.ACCEPTED


def test_at_renewal_both_leaves_are_known_and_the_oldest_goes_first(hub: Hub) -> None:
    leaves = [hub.ca.issue(now_ms=NOW_MS + day * DAY_MS, key=key_named(f"key {day}")) for day in range(-3, 0)]
    for leaf in leaves:
        hub.fleet.identify(NODE_ID, leaf.leaf_pem)
    outcomes = [
        hub.fleet.offer_manifest(NODE_ID, leaf.manifest(issued_at_ms=NOW_MS + at), "broker").outcome
        for at, leaf in enumerate(leaves)
    ]
    assert outcomes == [Outcome.PENDING, Outcome.ACCEPTED, Outcome.ACCEPTED]


# --- leaves that are known already, and two at once ---------------------------------------------------


def test_a_leaf_that_was_verified_is_not_verified_again(hub: Hub, node: SimulatedNode) -> None:
    first = hub.fleet.identify(NODE_ID, node.leaf_pem)
    hub.fleet.change_trust([ELSEWHERE.root_pem], frozenset())  # nothing would chain to it
    assert hub.fleet.identify(NODE_ID, node.leaf_pem) is first
    assert hub.fleet.identify(NODE_ID, "text around it\n" + node.leaf_pem + node.root_pem) is first
    with pytest.raises(IdentityError, match="chain"):
        hub.fleet.identify(NODE_ID, hub.ca.issue().leaf_pem)


def test_an_identity_message_that_is_repeated_is_not_verified_again(
    hub: Hub, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = Calls(monkeypatch, relay.fleet.leaves, "verify_leaf")
    chain = node.leaf_pem + hub.ca.root_pem
    hub.fleet.offer_identity(NODE_ID, chain)
    once = verified.count
    for _ in range(3):
        hub.fleet.offer_identity(NODE_ID, chain)
    assert verified.count == once > 0
    assert hub.counted("identities_total", verdict="accepted") == 1
    assert hub.counted("identities_total", verdict="unchanged") == 3


def test_an_identity_message_is_verified_again_once_roots_or_revocations_have_changed(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    hub.fleet.change_trust([hub.ca.root_pem], frozenset({node.kid}))
    hub.fleet.drop_leaves(lambda leaf: leaf.kid == node.kid)
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.counted("identities_total", verdict="revoked") == 1


def test_a_rejected_identity_message_is_judged_again_each_time(hub: Hub) -> None:
    for _ in range(2):
        hub.fleet.offer_identity(NODE_ID, ELSEWHERE.issue(NODE_ID).leaf_pem)
    assert hub.counted("identities_total", verdict="chain") == 2


def test_a_leaf_that_is_known_and_has_run_out_is_refused(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.identify(NODE_ID, node.leaf_pem)
    hub.clock.advance(90 * DAY_MS)
    with pytest.raises(IdentityError, match="validity"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)


def test_a_leaf_that_is_known_of_one_node_is_not_known_of_another(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.identify(NODE_ID, node.leaf_pem)
    hub.fleet.identify(OTHER_NODE_ID, hub.ca.issue(OTHER_NODE_ID).leaf_pem)
    with pytest.raises(IdentityError, match="id_mismatch"):
        hub.fleet.identify(OTHER_NODE_ID, node.leaf_pem)


def accepted(hub: Hub, leaf: SimulatedNode) -> bool:
    wire = leaf.manifest(issued_at_ms=hub.clock.advance(1))
    return hub.fleet.offer_manifest(leaf.node_id, wire, "broker").outcome is Outcome.ACCEPTED


def renewed(hub: Hub, node: SimulatedNode) -> SimulatedNode:
    return hub.ca.issue(key=node.key, now_ms=NOW_MS + 1000)


def test_at_renewal_one_message_brings_both_leaves(hub: Hub, node: SimulatedNode) -> None:
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem + node.leaf_pem + node.root_pem)
    assert accepted(hub, node)
    assert accepted(hub, fresh)
    assert hub.counted("identities_total", verdict="accepted") == 1


def test_the_root_behind_a_leaf_is_taken_for_no_leaf_and_causes_no_alarm(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem + node.root_pem)
    assert accepted(hub, node)
    assert audited_refusals(hub) == []
    assert hub.lines.entries("identity not accepted") == []


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(SimulatedCa().issue(OTHER_NODE_ID).leaf_pem, id="another node's"),
        pytest.param(ELSEWHERE.issue().leaf_pem, id="of another root"),
        pytest.param("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", id="garbage"),
    ],
)
def test_what_stands_behind_a_good_leaf_is_believed_by_itself_alone(
    hub: Hub, node: SimulatedNode, second: str
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem + second)
    assert accepted(hub, node)
    assert [known.node_id for known in hub.nodes_of(TENANT)] == [NODE_ID]
    assert not accepted(hub, ELSEWHERE.issue())


def test_behind_a_leaf_that_is_not_believed_nothing_is_read(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, ELSEWHERE.issue().leaf_pem + node.leaf_pem)
    assert hub.nodes_of(TENANT) == []
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, "chain")]


def test_a_manifest_of_the_older_of_two_leaves_that_waited_is_taken_in(hub: Hub, node: SimulatedNode) -> None:
    wire = node.manifest()
    hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    hub.fleet.offer_identity(NODE_ID, renewed(hub, node).leaf_pem + node.leaf_pem)
    assert hub.nodes_of(TENANT)[0].mark == HighWaterMark(NOW_MS, etag_of(wire))


# --- what is no longer believed -----------------------------------------------------------------------


def bar(hub: Hub, *leaves: SimulatedNode) -> None:
    """Revoke the leaves, as the watch does."""
    kids = frozenset(leaf.kid for leaf in leaves)
    hub.fleet.change_trust([hub.ca.root_pem], kids)
    hub.fleet.drop_leaves(lambda leaf: leaf.kid in kids)


def test_a_node_whose_leaf_is_barred_is_gone_and_says_why(hub: Hub, node: SimulatedNode) -> None:
    other = hub.ca.issue(OTHER_NODE_ID)
    hub.connect(node)
    hub.connect(other)
    bar(hub, node)
    assert {name.split(".")[1] for name in listed(hub)} == {OTHER_NODE_ID}
    for name in (ECHO_NAME, METRICS_NAME, f"gpio.{NODE_ID}.led.set"):
        assert failure(hub, name) is Failure.ATTESTATION_FAILED
        assert failure(hub, name, OTHER_TENANT) is Failure.SAFETY_DENIED
    assert hub.fleet.signer_of(NODE_ID) is None


def test_what_a_barred_leaf_shows_or_signs_is_refused(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    bar(hub, node)
    with pytest.raises(IdentityError, match="revoked"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)
    wire = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, wire, "session").reason is ManifestReason.REVOKED
    hub.fleet.tombstone(NODE_ID)
    assert failure(hub, ECHO_NAME) is Failure.ATTESTATION_FAILED


def test_another_leaf_brings_a_barred_node_back(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    bar(hub, node)
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
    assert failure(hub, ECHO_NAME) is Failure.ATTESTATION_FAILED
    assert accepted(hub, fresh)
    assert ECHO_NAME in listed(hub)
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    hub.fleet.tombstone(NODE_ID)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND


def test_a_manifest_of_the_other_leaf_outlives_the_one_that_is_barred(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem + node.leaf_pem)
    assert accepted(hub, fresh)
    bar(hub, node)
    assert ECHO_NAME in listed(hub)
    assert hub.fleet.signer_of(NODE_ID) == fresh.identity(NOW_MS + 1000)


def test_a_leaf_that_waits_without_a_manifest_is_forgotten_too(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
    bar(hub, fresh)
    assert not accepted(hub, fresh)
    assert ECHO_NAME in listed(hub)
    assert accepted(hub, node)


def test_a_leaf_of_a_root_that_is_not_believed_any_more_is_refused(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.change_trust([ELSEWHERE.root_pem], frozenset())
    with pytest.raises(IdentityError, match="chain"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)
    assert hub.fleet.identify(NODE_ID, ELSEWHERE.issue().leaf_pem).node_id == NODE_ID


def test_who_signed_is_known_while_the_manifest_is_in_force(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.fleet.signer_of(NODE_ID) is None
    hub.announce(node)
    assert hub.fleet.signer_of(NODE_ID) == node.identity()


def test_a_manifest_ends_with_the_leaf_that_signed_it(hub: Hub) -> None:
    left_ms = TTL_MS // 3
    node = hub.ca.issue(now_ms=NOW_MS + left_ms - 90 * DAY_MS)
    hub.connect(node)
    hub.clock.advance(left_ms - 1)
    assert ECHO_NAME in listed(hub)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).node_id == NODE_ID
    hub.clock.advance(1)
    assert listed(hub) == []
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID
