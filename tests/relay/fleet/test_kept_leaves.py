"""What is kept of a leaf that was verified counts for its very bytes, and only as long as a verdict would."""

import base64
from dataclasses import replace

import pytest

from relay.fleet.leaves import FleetTrust, KeptLeaves, root_validities
from relay.fleet.replay_marks import KeptLeaf
from schemas.certificates import IdentityError, verify_leaf
from schemas.identity import first_certificate_in, kid_of, to_pem
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.trust import TrustRules
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa, key_named

CA, ELSEWHERE = SimulatedCa(), SimulatedCa("elsewhere")
NODE = CA.issue()
KEPT = KeptLeaf.of(NODE.identity())
ROOTS = [CA.root_pem]


@pytest.fixture
def trust(registry: SchemaRegistry) -> FleetTrust:
    return FleetTrust(TrustRules(registry, KindRegistry()), ROOTS, frozenset(), KeptLeaves([KEPT]))


def test_a_leaf_that_was_kept_has_the_identity_that_verifying_it_gives() -> None:
    assert KeptLeaves([KEPT]).recall(NODE.leaf_pem, ROOTS, NOW_MS) == verify_leaf(
        NODE.leaf_pem, ROOTS, NOW_MS
    )
    chain = "text\n" + NODE.leaf_pem + CA.root_pem
    assert KeptLeaves([KEPT]).recall(chain, [ELSEWHERE.root_pem, *ROOTS], NOW_MS) == NODE.identity()


def test_it_is_not_verified_and_not_kept_again(trust: FleetTrust, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relay.fleet.leaves.verify_leaf", None)  # to call it would fail
    kept: list[KeptLeaf] = []
    trust = replace(trust, kept=KeptLeaves([KEPT], kept.append))
    assert trust.identify(NODE_ID, NODE.leaf_pem, None, NOW_MS) == NODE.identity()
    assert kept == []


def test_a_leaf_that_is_new_is_verified_and_kept(trust: FleetTrust) -> None:
    kept: list[KeptLeaf] = []
    trust = replace(trust, kept=KeptLeaves([], kept.append))
    trust.identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)
    assert kept == [KEPT]


def test_one_that_is_rejected_is_not_kept(trust: FleetTrust) -> None:
    kept: list[KeptLeaf] = []
    trust = replace(trust, kept=KeptLeaves([], kept.append))
    for pem in (ELSEWHERE.issue().leaf_pem, CA.issue(OTHER_NODE_ID).leaf_pem):
        with pytest.raises(IdentityError):
            trust.identify(NODE_ID, pem, None, NOW_MS)
    assert kept == []


def test_one_that_was_revoked_since_is_rejected(trust: FleetTrust) -> None:
    with pytest.raises(IdentityError, match="revoked"):
        trust.changed(ROOTS, frozenset({NODE.kid})).identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)


def test_one_whose_root_is_not_trusted_any_more_is_rejected(trust: FleetTrust) -> None:
    with pytest.raises(IdentityError, match="chain"):
        trust.changed([ELSEWHERE.root_pem], frozenset()).identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)


def test_one_of_another_node_is_rejected(trust: FleetTrust) -> None:
    with pytest.raises(IdentityError, match="id_mismatch"):
        trust.identify(OTHER_NODE_ID, NODE.leaf_pem, None, NOW_MS)


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
