import os
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityStateError
from relay.state.merging import SharedLedger
from schemas.certificates import make_csr
from schemas.identity import first_certificate_in, kid_of
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.shared import shared as shared_ledger
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

KID = "ab" * 32
ENTRY = {"kid": KID, "revoked_ms": NOW_MS, "serial": "1f"}


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def ca(tmp_path: Path, clock: FakeClock) -> CertificateAuthority:
    authority = CertificateAuthority(tmp_path / "ca", clock, os.urandom)
    authority.create()
    return authority


@pytest.fixture
def shared(ca: CertificateAuthority, clock: FakeClock) -> SharedLedger:
    return shared_ledger("revocation", ca.ledger, clock)


def lines(ca: CertificateAuthority) -> list[str]:
    return ca.ledger.path.read_text("ascii").splitlines()


def test_what_was_revoked_here_is_shared_with_its_serial_number_and_without_its_reason(
    ca: CertificateAuthority, shared: SharedLedger, registry: SchemaRegistry
) -> None:
    leaf = ca.issue(make_csr(key_named("node"), NODE_ID), "acme")
    kid = kid_of(first_certificate_in(leaf))
    ca.revoke(NODE_ID, "stolen from the shed")
    missing = shared.settle({}, frozenset())
    serial, end_ms = ca.records().serial_of(kid), ca.records().leaves_of(NODE_ID)[0].not_after_ms
    entry = {"kid": kid, "revoked_ms": NOW_MS, "serial": f"{serial:x}", "not_after_ms": end_ms}
    assert missing == {kid: entry}
    assert registry.load("cluster.revocation@1.0.0").is_valid(missing[kid])
    assert shared.form.key_of(missing[kid]) == kid
    assert shared.settle({}, frozenset({kid})) == {}


def test_what_was_revoked_elsewhere_is_revoked_here_once_by_kid_and_by_serial_number(
    ca: CertificateAuthority, shared: SharedLedger
) -> None:
    before = len(lines(ca))
    for _ in range(2):
        assert shared.settle({KID: ENTRY}, frozenset({KID})) == {}
    assert len(lines(ca)) == before + 1
    restarted = CertificateAuthority(ca.ledger.path.parent, FakeClock(NOW_MS), os.urandom)
    assert restarted.revoked_kids() == {KID}
    assert restarted.records().revoked_serials() == [0x1F]
    assert restarted.records().copy().revoked_serials() == [0x1F]


def test_what_arrived_is_shared_again_as_it_was(shared: SharedLedger) -> None:
    bare = {"kid": "cd" * 32, "revoked_ms": NOW_MS}
    assert shared.settle({KID: ENTRY, "cd" * 32: bare}, frozenset()) == {KID: ENTRY, "cd" * 32: bare}


def test_without_the_ledger_nothing_is_taken(ca: CertificateAuthority, shared: SharedLedger) -> None:
    ca.ledger.path.unlink()
    with pytest.raises(AuthorityStateError, match="is missing"):
        shared.settle({KID: ENTRY}, frozenset())
    assert not ca.ledger.path.exists()


def test_what_has_expired_is_shared_no_more_also_where_the_certificate_is_not_known(
    ca: CertificateAuthority, shared: SharedLedger, clock: FakeClock
) -> None:
    """An entry that the servers have removed at its end would else be appended again, for good."""
    ca.issue(make_csr(key_named("node"), NODE_ID), "acme")
    (own,) = ca.revoke(NODE_ID)
    end_ms = ca.records().leaves_of(NODE_ID)[0].not_after_ms
    told, endless = "cd" * 32, "ef" * 32
    arrived = {
        told: {"kid": told, "revoked_ms": NOW_MS, "not_after_ms": end_ms},
        endless: {"kid": endless, "revoked_ms": NOW_MS},
    }
    lacking = shared.settle(arrived, frozenset())
    assert {kid: shared.form.end_ms_of(entry) for kid, entry in lacking.items()} == {
        own: end_ms,
        told: end_ms,
        endless: None,
    }
    clock.advance(end_ms - NOW_MS)
    assert shared.settle({}, frozenset()).keys() == {endless}
    assert ca.revoked_kids() == {own, told, endless}
    assert ca.records().copy().end_ms_of(told) == end_ms
