import os
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityStateError
from relay.pki.shared_revocations import SharedRevocations
from schemas.certificates import make_csr
from schemas.identity import certificates_in, kid_of
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

KID = "ab" * 32
ENTRY = {"kid": KID, "revoked_ms": NOW_MS, "serial": "1f"}


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    authority = CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), os.urandom)
    authority.create()
    return authority


@pytest.fixture
def shared(ca: CertificateAuthority) -> SharedRevocations:
    return SharedRevocations(ca.ledger)


def lines(ca: CertificateAuthority) -> list[str]:
    return ca.ledger.path.read_text("ascii").splitlines()


def test_what_was_revoked_here_is_shared_with_its_serial_number_and_without_its_reason(
    ca: CertificateAuthority, shared: SharedRevocations, registry: SchemaRegistry
) -> None:
    leaf = ca.issue(make_csr(key_named("node"), NODE_ID), "acme")
    kid = kid_of(certificates_in(leaf)[0])
    ca.revoke(NODE_ID, "stolen from the shed")
    missing = shared.settle({}, frozenset())
    serial = ca.records().serial_of(kid)
    assert missing == {kid: {"kid": kid, "revoked_ms": NOW_MS, "serial": f"{serial:x}"}}
    assert registry.load("cluster.revocation@1.0.0").is_valid(missing[kid])
    assert shared.key_of(missing[kid]) == kid
    assert shared.settle({}, frozenset({kid})) == {}


def test_what_was_revoked_elsewhere_is_revoked_here_once_by_kid_and_by_serial_number(
    ca: CertificateAuthority, shared: SharedRevocations
) -> None:
    before = len(lines(ca))
    for _ in range(2):
        assert shared.settle({KID: ENTRY}, frozenset({KID})) == {}
    assert len(lines(ca)) == before + 1
    restarted = CertificateAuthority(ca.ledger.path.parent, FakeClock(NOW_MS), os.urandom)
    assert restarted.revoked_kids() == {KID}
    assert restarted.records().revoked_serials() == [0x1F]
    assert restarted.records().copy().revoked_serials() == [0x1F]


def test_what_arrived_is_shared_again_as_it_was(shared: SharedRevocations) -> None:
    bare = {"kid": "cd" * 32, "revoked_ms": NOW_MS}
    assert shared.settle({KID: ENTRY, "cd" * 32: bare}, frozenset()) == {KID: ENTRY, "cd" * 32: bare}


def test_without_the_ledger_nothing_is_taken(ca: CertificateAuthority, shared: SharedRevocations) -> None:
    ca.ledger.path.unlink()
    with pytest.raises(AuthorityStateError, match="is missing"):
        shared.settle({KID: ENTRY}, frozenset())
    assert not ca.ledger.path.exists()
