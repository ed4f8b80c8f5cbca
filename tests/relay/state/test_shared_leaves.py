import os
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from schemas.certificates import make_csr
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, key_named

NONE: frozenset[str] = frozenset()


def made(directory: Path, clock: FakeClock) -> CertificateAuthority:
    authority = CertificateAuthority(directory / "ca", clock, os.urandom)
    authority.create()
    return authority


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(NOW_MS)


@pytest.fixture
def ca(tmp_path: Path, clock: FakeClock) -> CertificateAuthority:
    """The one with the key, which has issued two leaves to one node."""
    authority = made(tmp_path / "ca", clock)
    csr = make_csr(key_named("node"), NODE_ID)
    authority.enrol(csr, "acme", "the join token")
    clock.advance(1)
    authority.renew(csr, NODE_ID)
    return authority


@pytest.fixture
def other(tmp_path: Path, clock: FakeClock) -> CertificateAuthority:
    return made(tmp_path / "other", clock)


def test_what_was_issued_is_recorded_elsewhere_as_it_was_but_for_the_join_token(
    ca: CertificateAuthority, other: CertificateAuthority, registry: SchemaRegistry
) -> None:
    leaves = shared("leaf", ca.ledger, FakeClock(NOW_MS), issues=True)
    entries = leaves.settle({}, NONE)
    assert all(registry.load("cluster.leaf@1.0.0").is_valid(entry) for entry in entries.values())
    assert [leaves.form.key_of(entry) for entry in entries.values()] == list(entries)
    takes = shared("leaf", other.ledger, FakeClock(NOW_MS), issues=False)
    for _ in range(2):
        # Their order in the stream is that of any relay that has appended them.
        assert takes.settle(dict(reversed(list(entries.items()))), frozenset(entries)) == {}
    told, known = ca.records().leaves_of(NODE_ID), other.records().leaves_of(NODE_ID)
    assert [leaf.facts() | {"join_id": None} for leaf in told] == [leaf.facts() for leaf in known]
    assert [leaf.public_key for leaf in told] == [leaf.public_key for leaf in known]
    assert set(other.revoke(NODE_ID)) == set(entries)
    assert set(ca.records().revoked_serials()) == set()
    assert set(other.records().revoked_serials()) == {leaf.serial for leaf in told}


def test_servers_certificates_are_not_shared(ca: CertificateAuthority) -> None:
    ca.issue_client("relay", "urn:edge-kubelet:relay", bytes(key_named("relay").verify_key), 90)
    assert len(shared("leaf", ca.ledger, FakeClock(NOW_MS), issues=True).settle({}, NONE)) == 2


def test_whom_the_ca_issues_to_is_not_decided_by_what_arrives(ca: CertificateAuthority) -> None:
    before = ca.ledger.path.read_bytes()
    foreign = {
        "kid": "ab" * 32,
        "node_id": OTHER_NODE_ID,
        "tenant": "acme",
        "public_key": "cd" * 32,
        "issued_ms": NOW_MS,
        "not_after_ms": NOW_MS + 1_000_000,
    }
    shared("leaf", ca.ledger, FakeClock(NOW_MS), issues=True).settle(
        {"ab" * 32: foreign}, frozenset({"ab" * 32})
    )
    assert ca.ledger.path.read_bytes() == before


def test_a_relay_without_the_key_shares_none(ca: CertificateAuthority) -> None:
    assert shared("leaf", ca.ledger, FakeClock(NOW_MS), issues=False).settle({}, NONE) == {}


def test_a_leaf_that_has_expired_is_shared_no_more(ca: CertificateAuthority, clock: FakeClock) -> None:
    leaves = shared("leaf", ca.ledger, clock, issues=True)
    end_ms = max(leaves.form.end_ms_of(entry) or 0 for entry in leaves.settle({}, NONE).values())
    clock.advance(end_ms - 1 - clock())
    assert leaves.settle({}, NONE)
    clock.advance(1)
    assert leaves.settle({}, NONE) == {}
