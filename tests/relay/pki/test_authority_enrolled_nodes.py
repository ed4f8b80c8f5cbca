"""Nodes that enrol with a join token, and renew: with their own key alone, and in bounded number."""

import base64
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from nacl.signing import SigningKey

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError, IdTakenError
from schemas.certificates import make_csr, verify_leaf
from tests.fakes.clock import FakeClock
from tests.fakes.issuing_authority import (
    CSR,
    JOIN_ID,
    KEY,
    OTHER_JOIN_ID,
    OTHER_KEY,
    authority,
    kid_of,
    ledger,
)
from tests.fakes.signer import DAY_MS, LOW_ORDER_KEYS, NODE_ID, NOW_MS, OTHER_NODE_ID

# --- enrolling ----------------------------------------------------------------------------------------


def test_an_enrolled_node_is_bound_to_tenant_key_and_join_token(ca: CertificateAuthority) -> None:
    identity = verify_leaf(ca.enrol(CSR, "acme", JOIN_ID), ca.roots(), NOW_MS)
    assert (identity.node_id, identity.tenant) == (NODE_ID, "acme")
    assert ca.in_force()[NODE_ID].join_id == ledger(ca)[0]["join_id"] == JOIN_ID


def test_a_node_that_lost_the_answer_is_given_another(ca: CertificateAuthority) -> None:
    first = kid_of(ca.enrol(CSR, "acme", JOIN_ID))
    second = kid_of(ca.enrol(CSR, "acme", JOIN_ID))
    assert first != second
    assert ca.revoked_kids() == frozenset()
    assert ca.in_force()[NODE_ID].kid == second


def enrolled(ca: CertificateAuthority) -> None:
    ca.enrol(CSR, "acme", JOIN_ID)


def issued(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")


def revoked(ca: CertificateAuthority) -> None:
    enrolled(ca)
    ca.revoke(NODE_ID)


def renewed(ca: CertificateAuthority) -> None:
    enrolled(ca)
    ca.renew(CSR, NODE_ID)


def replaced(ca: CertificateAuthority) -> None:
    enrolled(ca)
    ca.issue(CSR, "acme", replace=True)


@pytest.mark.parametrize(
    ("before", "key", "tenant", "join_id"),
    [
        pytest.param(enrolled, OTHER_KEY, "acme", JOIN_ID, id="another key"),
        pytest.param(enrolled, KEY, "acme", OTHER_JOIN_ID, id="another join token"),
        pytest.param(enrolled, KEY, "globex", JOIN_ID, id="another tenant"),
        pytest.param(issued, KEY, "acme", JOIN_ID, id="issued by the operator"),
        pytest.param(revoked, KEY, "acme", JOIN_ID, id="revoked"),
        pytest.param(revoked, OTHER_KEY, "acme", OTHER_JOIN_ID, id="revoked, and another key"),
        pytest.param(renewed, KEY, "acme", JOIN_ID, id="renewed since"),
        pytest.param(replaced, KEY, "acme", JOIN_ID, id="replaced by the operator since"),
    ],
)
def test_an_id_that_was_ever_issued_is_not_enrolled_again(
    ca: CertificateAuthority,
    before: Callable[[CertificateAuthority], None],
    key: SigningKey,
    tenant: str,
    join_id: str,
) -> None:
    before(ca)
    entries = ledger(ca)
    with pytest.raises(IdTakenError, match=NODE_ID):
        ca.enrol(make_csr(key, NODE_ID), tenant, join_id)
    assert ledger(ca) == entries


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_a_request_for_a_key_of_low_order_gets_nothing(ca: CertificateAuthority, low: bytes) -> None:
    ca.issue(CSR, "acme")
    own = bytes(KEY.verify_key)
    body = base64.b64decode("".join(CSR.splitlines()[1:-1])).replace(own, low)
    csr = ssl.DER_cert_to_PEM_cert(body).replace("CERTIFICATE", "CERTIFICATE REQUEST")
    uses: list[Callable[[], str]] = [
        lambda: ca.issue(csr, "acme", replace=True),
        lambda: ca.enrol(csr, "acme", JOIN_ID),
        lambda: ca.renew(csr, NODE_ID),
    ]
    for use in uses:
        with pytest.raises(AuthorityError, match="low_order_key"):
            use()
    assert len(ledger(ca)) == 1


def test_a_request_with_anothers_key_proves_nothing(ca: CertificateAuthority) -> None:
    own, other = bytes(KEY.verify_key), bytes(OTHER_KEY.verify_key)
    body = base64.b64decode("".join(CSR.splitlines()[1:-1])).replace(own, other)
    csr = ssl.DER_cert_to_PEM_cert(body).replace("CERTIFICATE", "CERTIFICATE REQUEST")
    with pytest.raises(AuthorityError, match="no_proof_of_possession"):
        ca.enrol(csr, "acme", JOIN_ID)


# --- renewing -----------------------------------------------------------------------------------------


def test_a_renewed_leaf_is_another_and_the_old_one_stays_valid(tmp_path: Path) -> None:
    clock = FakeClock(NOW_MS)
    ca = authority(tmp_path / "ca", clock)
    ca.create()
    old = verify_leaf(ca.enrol(CSR, "acme", JOIN_ID), ca.roots(), NOW_MS)
    clock.advance(60 * DAY_MS)
    new = verify_leaf(ca.renew(CSR, NODE_ID), ca.roots(), clock())
    assert (new.node_id, new.tenant, new.public_key) == (old.node_id, old.tenant, old.public_key)
    assert new.kid != old.kid
    assert new.not_after_ms == old.not_after_ms + 60 * DAY_MS
    assert ca.revoked_kids() == frozenset()
    assert ca.in_force()[NODE_ID].kid == new.kid


def retired(ca: CertificateAuthority) -> None:
    enrolled(ca)
    renewed = kid_of(ca.renew(CSR, NODE_ID))
    assert renewed in ca.revoke(NODE_ID, "retired")


def nothing(_: CertificateAuthority) -> None:
    pass


@pytest.mark.parametrize(
    ("before", "csr"),
    [
        pytest.param(nothing, CSR, id="a node that never was"),
        pytest.param(retired, CSR, id="a retired node"),
        pytest.param(enrolled, make_csr(OTHER_KEY, NODE_ID), id="another key"),
        pytest.param(enrolled, make_csr(KEY, OTHER_NODE_ID), id="another node, the same key"),
        pytest.param(enrolled, "", id="no request"),
    ],
)
def test_what_is_not_the_nodes_own_is_not_renewed(
    ca: CertificateAuthority, before: Callable[[CertificateAuthority], None], csr: str
) -> None:
    before(ca)
    ca.issue(make_csr(KEY, OTHER_NODE_ID), "globex")
    entries = ledger(ca)
    with pytest.raises(AuthorityError):
        ca.renew(csr, NODE_ID)
    assert ledger(ca) == entries


def test_after_a_replacement_only_the_new_key_is_renewed(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")
    new = make_csr(OTHER_KEY, NODE_ID)
    ca.issue(new, "globex", replace=True)
    with pytest.raises(AuthorityError, match="with the key that it has"):
        ca.renew(CSR, NODE_ID)
    assert verify_leaf(ca.renew(new, NODE_ID), ca.roots(), NOW_MS).tenant == "globex"


def test_an_expired_leaf_is_not_renewed(tmp_path: Path) -> None:
    clock = FakeClock(NOW_MS)
    ca = authority(tmp_path / "ca", clock)
    ca.create()
    ca.issue(CSR, "acme")
    clock.advance(90 * DAY_MS)
    with pytest.raises(AuthorityError, match="has no certificate in force"):
        ca.renew(CSR, NODE_ID)


def test_a_node_cannot_fill_the_ledger(ca: CertificateAuthority) -> None:
    ca.enrol(CSR, "acme", JOIN_ID)
    for _ in range(31):
        ca.enrol(CSR, "acme", JOIN_ID)
    size = len(ledger(ca))
    uses: list[Callable[[], str]] = [
        lambda: ca.enrol(CSR, "acme", JOIN_ID),
        lambda: ca.renew(CSR, NODE_ID),
    ]
    for use in uses:
        with pytest.raises(AuthorityError, match="32 certificates in force"):
            use()
    assert len(ledger(ca)) == size == 32
    ca.revoke(ca.in_force()[NODE_ID].kid)
    ca.renew(CSR, NODE_ID)
