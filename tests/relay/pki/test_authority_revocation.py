"""What the CA revokes: nodes, single certificates and those of servers, and the list of them."""

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError, UnknownTargetError
from schemas.certificates import make_csr, verify_leaf
from tests.fakes.issuing_authority import CSR, OTHER_KEY, kid_of, ledger, revoked_in, serial_of
from tests.fakes.server_ca import server_key_named
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

SERVER_KEY = server_key_named("a broker").public_key()


# --- revoking -----------------------------------------------------------------------------------------


def test_revoking_a_node_revokes_every_leaf_that_it_has(ca: CertificateAuthority) -> None:
    kids = [kid_of(ca.issue(CSR, "acme")), kid_of(ca.renew(CSR, NODE_ID)), kid_of(ca.renew(CSR, NODE_ID))]
    other = kid_of(ca.issue(make_csr(OTHER_KEY, OTHER_NODE_ID), "acme"))
    assert ca.revoke(NODE_ID, "stolen") == kids
    assert ca.revoked_kids() == set(kids)
    assert [entry for entry in ledger(ca) if entry["action"] == "revoke"] == [
        {"action": "revoke", "ts_ms": NOW_MS, "node_id": NODE_ID, "kid": kid, "reason": "stolen"}
        for kid in kids
    ]
    assert {node_id: leaf.kid for node_id, leaf in ca.in_force().items()} == {OTHER_NODE_ID: other}
    assert ca.revoke(NODE_ID) == []


@pytest.mark.parametrize("digits", [64, 16])
def test_revoking_a_kid_revokes_that_one(ca: CertificateAuthority, digits: int) -> None:
    first, second = kid_of(ca.issue(CSR, "acme")), kid_of(ca.renew(CSR, NODE_ID))
    assert ca.revoke(second[:digits]) == [second]
    assert ca.in_force()[NODE_ID].kid == first
    assert ca.revoke(second[:digits]) == []
    assert ca.revoke(NODE_ID) == [first]
    assert ca.in_force() == {}


@pytest.mark.parametrize(
    "target",
    ["", NODE_ID, NODE_ID.upper(), "0" * 64, "0" * 16, "KID", "KID:15", "KID:upper", "*", "\x1b[31m"],
)
def test_what_was_never_issued_cannot_be_revoked(ca: CertificateAuthority, target: str) -> None:
    kid = kid_of(ca.issue(make_csr(OTHER_KEY, OTHER_NODE_ID), "acme"))
    special = {"KID": kid + "0", "KID:15": kid[:15], "KID:upper": kid.upper() if kid.upper() != kid else ""}
    with pytest.raises(UnknownTargetError) as caught:
        ca.revoke(special.get(target, target))
    assert str(caught.value).isprintable()
    assert ca.revoked_kids() == frozenset()


def test_a_revoked_id_is_free_to_the_operator_alone(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")
    ca.revoke(NODE_ID)
    with pytest.raises(AuthorityError, match=f"{NODE_ID} was revoked: say --replace"):
        ca.issue(CSR, "acme")
    identity = verify_leaf(ca.issue(CSR, "acme", replace=True), ca.roots(), NOW_MS)
    assert ca.in_force()[NODE_ID].kid == identity.kid


def test_replacing_revokes_what_was_renewed_too(ca: CertificateAuthority) -> None:
    kids = {kid_of(ca.issue(CSR, "acme")), kid_of(ca.renew(CSR, NODE_ID))}
    ca.issue(make_csr(OTHER_KEY, NODE_ID), "acme", replace=True)
    assert ca.revoked_kids() == kids


def test_the_list_of_the_revoked_names_every_revoked_serial(ca: CertificateAuthority) -> None:
    good, bad = ca.issue(make_csr(OTHER_KEY, OTHER_NODE_ID), "acme"), ca.issue(CSR, "acme")
    assert revoked_in(ca.crl_pem()) == [set()]
    ca.revoke(NODE_ID)
    assert revoked_in(ca.crl_pem()) == [{serial_of(bad)}]
    assert serial_of(good) != serial_of(bad)


# --- servers ------------------------------------------------------------------------------------------


def test_a_servers_certificate_can_be_revoked_by_its_kid(ca: CertificateAuthority) -> None:
    pem = ca.servers.issue("mqtt.example", ["mqtt.example", "127.0.0.1"], SERVER_KEY, 397)
    assert ca.in_force() == {}
    assert ca.revoke(kid_of(pem)) == [kid_of(pem)]
    assert ca.revoked_kids() == {kid_of(pem)}
    assert revoked_in(ca.crl_pem()) == [{serial_of(pem)}]


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        pytest.param(NODE_ID, ["mqtt.example"], id="a node's name"),
        pytest.param(NODE_ID, [NODE_ID], id="a node's name, and host"),
        pytest.param("mqtt.example", [], id="no host"),
        pytest.param("mqtt.example", ["*.example"], id="any host"),
        pytest.param("a/b", ["mqtt.example"], id="a name that is none"),
        pytest.param("\x1b[31m", ["mqtt.example"], id="control characters"),
        pytest.param("a" * 60 + ".example", ["mqtt.example"], id="a long name"),
    ],
)
def test_a_server_cannot_have_every_name(ca: CertificateAuthority, name: str, hosts: list[str]) -> None:
    with pytest.raises(AuthorityError) as caught:
        ca.servers.issue(name, hosts, SERVER_KEY, 397)
    assert str(caught.value).isprintable()
    assert ledger(ca) == []
