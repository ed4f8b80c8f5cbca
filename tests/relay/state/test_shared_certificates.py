"""What the relays of a fleet know of each other's certificates, by kid and by serial number."""

from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityStateError
from relay.state.merging import SharedLedger
from schemas.certificates import make_csr
from tests.fakes.clock import FakeClock
from tests.fakes.real_ca import authority, created
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, key_named

KID = "ab" * 32
ENTRY = {"kid": KID, "revoked_ms": NOW_MS, "serial": "1f"}
NONE: frozenset[str] = frozenset()


@pytest.fixture
def revocations(ca: CertificateAuthority, clock: FakeClock) -> SharedLedger:
    return shared("revocation", ca.ledger, clock)


def test_what_was_issued_is_recorded_elsewhere_as_it_was_but_for_the_join_token(
    ca: CertificateAuthority, clock: FakeClock, tmp_path: Path
) -> None:
    csr = make_csr(key_named("node"), NODE_ID)
    ca.enrol(csr, "acme", "the join token")
    clock.advance(1)
    ca.renew(csr, NODE_ID)
    ca.issue_client("relay", "urn:edge-kubelet:relay", bytes(key_named("relay").verify_key), 90)
    entries = shared("leaf", ca.ledger, clock, issues=True).settle({}, NONE)
    other = created(tmp_path / "other", clock)
    # Their order in the stream is that of any relay that has appended them.
    shared("leaf", other.ledger, clock).settle(dict(reversed(list(entries.items()))), frozenset(entries))
    told, known = ca.records().leaves_of(NODE_ID), other.records().leaves_of(NODE_ID)
    assert [leaf.facts() | {"join_id": None} for leaf in told] == [leaf.facts() for leaf in known]
    assert [leaf.public_key for leaf in told] == [leaf.public_key for leaf in known]
    assert set(other.revoke(NODE_ID)) == set(entries)
    assert set(other.records().revoked_serials()) == {leaf.serial for leaf in told}


def test_what_was_revoked_here_is_shared_with_its_serial_number_and_without_its_reason(
    ca: CertificateAuthority, revocations: SharedLedger
) -> None:
    ca.issue(make_csr(key_named("node"), NODE_ID), "acme")
    (kid,) = ca.revoke(NODE_ID, "stolen from the shed")
    serial, end_ms = ca.records().serial_of(kid), ca.records().leaves_of(NODE_ID)[0].not_after_ms
    entry = {"kid": kid, "revoked_ms": NOW_MS, "serial": f"{serial:x}", "not_after_ms": end_ms}
    assert revocations.settle({}, NONE) == {kid: entry}


def test_what_was_revoked_elsewhere_is_revoked_here_by_kid_and_by_serial_number_and_shared_as_it_was(
    ca: CertificateAuthority, revocations: SharedLedger
) -> None:
    bare = {"kid": "cd" * 32, "revoked_ms": NOW_MS}
    assert revocations.settle({KID: ENTRY, "cd" * 32: bare}, NONE) == {KID: ENTRY, "cd" * 32: bare}
    restarted = authority(ca.ledger.path.parent)
    assert restarted.revoked_kids() == {KID, "cd" * 32}
    assert restarted.records().revoked_serials() == [0x1F]
    assert restarted.records().copy().revoked_serials() == [0x1F]


def test_without_the_ledger_nothing_is_taken(ca: CertificateAuthority, revocations: SharedLedger) -> None:
    ca.ledger.path.unlink()
    with pytest.raises(AuthorityStateError, match="is missing"):
        revocations.settle({KID: ENTRY}, NONE)
    assert not ca.ledger.path.exists()


def test_what_has_expired_is_shared_no_more_also_where_the_certificate_is_not_known(
    ca: CertificateAuthority, revocations: SharedLedger, clock: FakeClock
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
    lacking = revocations.settle(arrived, NONE)
    ends = {kid: revocations.form.end_ms_of(entry) for kid, entry in lacking.items()}
    assert ends == {own: end_ms, told: end_ms, endless: None}
    clock.advance(end_ms - NOW_MS)
    assert revocations.settle({}, NONE).keys() == {endless}
    assert ca.revoked_kids() == {own, told, endless}
    assert ca.records().copy().end_ms_of(told) == end_ms
