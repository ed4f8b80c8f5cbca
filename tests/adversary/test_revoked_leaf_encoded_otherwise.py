"""Attacker: the holder of a leaf that was revoked. Tried: the same leaf with another kid.

The kid is the digest of a certificate's bytes, so other bytes of the same certificate would have another:
lengths that are not the shortest, bytes behind it, a signature to which the order of the group was added; or
another certificate under the same issuer and serial number. What must happen: every one of them is refused.
"""

from pathlib import Path

import pytest

from relay.pki.issuing import issue_leaf
from schemas.certificates import IdentityError, verify_leaf
from schemas.identity import certificates_in, first_certificate_in, kid_of, serial_of, to_pem
from tests.fakes.hub import Hub
from tests.fakes.real_ca import RealCa
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedNode, key_named

ORDER = 2**252 + 27742317777372353535851937790883648493


def with_long_length(der: bytes) -> bytes:
    size = int.from_bytes(der[2:4], "big")
    return der[:1] + b"\x83" + size.to_bytes(3, "big") + der[4:]


def with_bytes_behind(der: bytes) -> bytes:
    return der + b"\0"


def with_a_larger_signature(der: bytes) -> bytes:
    scalar = int.from_bytes(der[-32:], "little") + ORDER
    return der[:-32] + scalar.to_bytes(32, "little")


@pytest.mark.parametrize("encoded", [with_long_length, with_bytes_behind, with_a_larger_signature])
def test_the_same_certificate_in_other_bytes_is_none(hub: Hub, tmp_path: Path, encoded: object) -> None:
    ca = RealCa(hub, tmp_path / "ca")
    node = ca.node()
    (der,) = certificates_in(node.leaf_pem)
    assert callable(encoded)
    other = to_pem([encoded(der)])
    assert kid_of(first_certificate_in(other)) != node.kid
    with pytest.raises(IdentityError):
        verify_leaf(other, ca.ca.roots(), NOW_MS)


def twin_of(node: SimulatedNode, ca: RealCa) -> SimulatedNode:
    """Return ``node`` with another certificate of the same issuer and serial number."""
    serial = serial_of(first_certificate_in(node.leaf_pem))
    root = ca.ca.root_file
    key = ca.ca._signer().key  # noqa: SLF001 - what no attacker has: the worst case
    pem = issue_leaf(
        root.read_text(),
        key,
        node_id=NODE_ID,
        tenant=TENANT,
        public_key=node.public_key,
        now_ms=NOW_MS,
        valid_days=89,
        serial=serial,
    )
    return SimulatedNode(NODE_ID, TENANT, key_named(f"node {NODE_ID}"), pem, node.root_pem)


def test_another_certificate_of_the_same_issuer_and_serial_number_is_refused(
    hub: Hub, tmp_path: Path
) -> None:
    ca = RealCa(hub, tmp_path / "ca")
    node = ca.node()
    twin = twin_of(node, ca)
    assert twin.kid != node.kid
    assert hub.fleet.identify(NODE_ID, twin.leaf_pem).kid == twin.kid
    hub.fleet.drop_leaves(lambda leaf: leaf.kid == twin.kid)
    ca.ca.revoke(NODE_ID)
    records = ca.ca.records()
    kids = frozenset(records.revoked)
    hub.fleet.change_trust(ca.ca.roots(), kids)
    assert hub.fleet.identify(NODE_ID, twin.leaf_pem).kid == twin.kid  # by kid alone it would pass
    hub.fleet.drop_leaves(lambda leaf: leaf.kid == twin.kid)
    hub.fleet.change_trust(ca.ca.roots(), kids | records.revoked_as(ca.ca.roots()))
    with pytest.raises(IdentityError, match="revoked"):
        hub.fleet.identify(NODE_ID, twin.leaf_pem)
