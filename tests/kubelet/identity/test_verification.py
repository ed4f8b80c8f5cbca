import pytest

from kubelet.identity.verification import verify_manifest
from schemas.manifest import MAX_MANIFEST_BYTES, etag_of
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


def test_a_good_manifest_is_found_good(node: SimulatedNode) -> None:
    wire = node.manifest()
    finding = verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS)
    assert finding.reason is None
    assert finding.manifest is not None
    assert finding.manifest.etag == etag_of(wire)
    assert finding.manifest.expires_at_ms == NOW_MS + TTL_MS
    identity = finding.manifest.identity
    assert (identity.node_id, identity.tenant, identity.kid) == (NODE_ID, TENANT, node.kid)


@pytest.mark.parametrize(
    ("wire", "reason"),
    [
        pytest.param(b"", "not_json", id="nothing"),
        pytest.param(b"\xff", "not_json", id="not text"),
        pytest.param(b'{"node_id":"a","node_id":"a"}', "not_json", id="a key twice"),
        pytest.param(b" " * (MAX_MANIFEST_BYTES + 1), "not_json", id="too large"),
        pytest.param(b"[]", "schema", id="a list"),
        pytest.param(b"7", "schema", id="a number"),
        pytest.param(b'{"node_id":7}', "schema", id="an id that is a number"),
        pytest.param(b'{"node_id":{"$ref":"x"}}', "schema", id="an id that is an object"),
    ],
)
def test_what_is_no_manifest_is_found_out(node: SimulatedNode, wire: bytes, reason: str) -> None:
    finding = verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS)
    assert (finding.manifest, finding.reason) == (None, reason)


def test_a_manifest_that_was_changed_is_found_out(node: SimulatedNode) -> None:
    wire = node.manifest().replace(b'"max_concurrency":4', b'"max_concurrency":5')
    assert verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS).reason == "signature"


def test_a_manifest_that_is_spelled_differently_is_found_out(node: SimulatedNode) -> None:
    wire = node.manifest() + b" "
    assert verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS).reason == "not_canonical"


@pytest.mark.parametrize(
    ("now_ms", "reason"),
    [
        pytest.param(NOW_MS + TTL_MS - 1, None, id="to its last moment"),
        pytest.param(NOW_MS + TTL_MS, "expired", id="and no longer"),
        pytest.param(NOW_MS - 5 * 60_000 + 1, None, id="not long before its time"),
    ],
)
def test_a_manifest_is_good_for_its_time(node: SimulatedNode, now_ms: int, reason: str | None) -> None:
    assert verify_manifest(node.manifest(), node.leaf_pem, node.root_pem, now_ms).reason == reason


def test_a_manifest_of_another_leaf_is_found_out(ca: SimulatedCa, node: SimulatedNode) -> None:
    other = ca.issue(OTHER_NODE_ID)
    finding = verify_manifest(other.manifest(), node.leaf_pem, node.root_pem, NOW_MS)
    assert finding.reason == "signed by another leaf than the one given"


def test_a_manifest_in_the_name_of_another_node_is_found_out(node: SimulatedNode) -> None:
    wire = node.manifest(node_id=OTHER_NODE_ID)
    assert verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS).reason == "id_mismatch"


def test_a_manifest_that_another_key_signed_is_found_out(node: SimulatedNode) -> None:
    wire = node.manifest(signer=key_named("a stranger"))
    assert verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS).reason == "signature"


@pytest.mark.parametrize(
    ("leaf", "root", "now_ms", "reason"),
    [
        pytest.param("", None, NOW_MS, "identity: bad_certificate", id="no leaf"),
        pytest.param("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", None, NOW_MS,
                     "identity: bad_certificate", id="not a leaf"),
        pytest.param(None, SimulatedCa("other").root_pem, NOW_MS, "identity: chain", id="another root"),
        pytest.param(None, "", NOW_MS, "identity: chain", id="no root"),
        pytest.param(None, None, NOW_MS + 91 * DAY_MS, "identity: validity", id="a leaf that is over"),
    ],
)  # fmt: skip
def test_an_identity_that_does_not_hold_proves_nothing(
    node: SimulatedNode, leaf: str | None, root: str | None, now_ms: int, reason: str
) -> None:
    leaf_pem = node.leaf_pem if leaf is None else leaf
    root_pem = node.root_pem if root is None else root
    finding = verify_manifest(node.manifest(), leaf_pem, root_pem, now_ms)
    assert (finding.manifest, finding.reason) == (None, reason)
