import pytest

from kubelet.identity.verification import verify_manifest
from schemas.manifest import MAX_MANIFEST_BYTES, etag_of
from schemas.trust import TrustedManifest
from tests.fakes.signer import (
    DAY_MS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedCa,
    SimulatedNode,
)


def test_a_good_manifest_is_found_good(node: SimulatedNode) -> None:
    wire = node.manifest()
    manifest = verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS)
    assert isinstance(manifest, TrustedManifest)
    assert manifest.etag == etag_of(wire)
    assert manifest.expires_at_ms == NOW_MS + TTL_MS
    identity = manifest.identity
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
    assert verify_manifest(wire, node.leaf_pem, node.root_pem, NOW_MS) == reason


@pytest.mark.parametrize(
    ("now_ms", "reason"),
    [
        pytest.param(NOW_MS + TTL_MS - 1, None, id="to its last moment"),
        pytest.param(NOW_MS + TTL_MS, "expired", id="and no longer"),
        pytest.param(NOW_MS - 5 * 60_000 + 1, None, id="not long before its time"),
    ],
)
def test_a_manifest_is_good_for_its_time(node: SimulatedNode, now_ms: int, reason: str | None) -> None:
    found = verify_manifest(node.manifest(), node.leaf_pem, node.root_pem, now_ms)
    assert (found if isinstance(found, str) else None) == reason


def test_a_manifest_of_another_leaf_is_found_out(ca: SimulatedCa, node: SimulatedNode) -> None:
    other = ca.issue(OTHER_NODE_ID)
    assert (
        verify_manifest(other.manifest(), node.leaf_pem, node.root_pem, NOW_MS)
        == "signed by another leaf than the one given"
    )


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
    assert verify_manifest(node.manifest(), leaf_pem, root_pem, now_ms) == reason
