"""The CA: what it issues, enrols, renews and revokes, what other processes see of it, and its backup."""

import base64
import os
import ssl
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from nacl.signing import SigningKey

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import (
    AuthorityError,
    AuthorityOptionError,
    AuthorityStateError,
    CertificateRefusedError,
    IdTakenError,
    UnknownTargetError,
)
from relay.state.ledger import LedgerError
from schemas.certificates import make_csr, verify_leaf
from schemas.error_roots import OperatorError, PeerError, StateError
from schemas.identity_files import IdentityFiles
from tests.fakes.clock import FakeClock
from tests.fakes.real_ca import (
    CSR,
    JOIN_ID,
    KEY,
    OTHER_JOIN_ID,
    OTHER_KEY,
    authority,
    kid_of,
    ledger,
    mode,
    revoked_in,
    serial_of,
)
from tests.fakes.server_ca import server_key_named
from tests.fakes.signer import DAY_MS, LOW_ORDER_KEYS, NODE_ID, NOW_MS, OTHER_NODE_ID


class Rival:
    """Does ``work`` in a thread of its own, which begins when random bytes are first drawn.

    A serial number is drawn between looking into the ledger and writing to it.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._refused = False
        self._thread = Thread(target=self._run)

    def _run(self) -> None:
        try:
            self._work()
        except AuthorityError:
            self._refused = True

    def random_bytes(self, count: int) -> bytes:
        if not self._thread.ident:
            self._thread.start()
            self._thread.join(0.1)
        return os.urandom(count)

    def is_refused(self) -> bool:
        self._thread.join()
        return self._refused


# --- the root -----------------------------------------------------------------------------------------


def test_a_root_is_not_made_while_the_clock_reads_a_time_before_the_first_credible_one(
    tmp_path: Path,
) -> None:
    clock = FakeClock(1_700_000_000_000 - 1)
    ca = authority(tmp_path / "ca", clock)
    with pytest.raises(AuthorityError, match="set the clock"):
        ca.create()
    assert [path.name for path in (tmp_path / "ca").iterdir()] == ["ledger.jsonl"]
    clock.advance(1)
    ca.create()


def test_the_key_of_the_root_is_for_its_owner_alone(ca: CertificateAuthority) -> None:
    assert mode(ca.root_file.with_name("root.key")) == 0o600
    assert mode(ca.root_file.parent) == 0o700


def test_of_two_who_make_a_root_at_once_one_does(tmp_path: Path) -> None:
    rival = Rival(lambda: authority(tmp_path / "ca").create())
    CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), rival.random_bytes).create()
    assert rival.is_refused()
    assert authority(tmp_path / "ca").can_issue()


def test_two_authorities_have_different_roots(ca: CertificateAuthority, tmp_path: Path) -> None:
    other = authority(tmp_path / "other")
    other.create()
    assert other.root_pem() != ca.root_pem()


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda ca, _: ca.root_pem(), id="root"),
        pytest.param(lambda ca, _: ca.issue(CSR, "acme"), id="issue"),
        pytest.param(lambda ca, path: ca.issue_mock(1, path, "acme"), id="mock"),
        pytest.param(lambda ca, _: ca.in_force(), id="who is in force"),
        pytest.param(lambda ca, _: ca.revoked_kids(), id="who is revoked"),
        pytest.param(lambda ca, _: ca.crl_pem(), id="list"),
        pytest.param(lambda ca, _: ca.stamp, id="stamp"),
    ],
)
def test_without_a_root_the_error_says_how_to_make_one(tmp_path: Path, use: Any) -> None:
    with pytest.raises(AuthorityError, match="relay ca init"):
        use(authority(tmp_path / "nothing"), tmp_path)


# --- issuing ------------------------------------------------------------------------------------------


def test_the_ledger_binds_the_id_to_tenant_and_key(ca: CertificateAuthority) -> None:
    pem = ca.issue(CSR, "acme")
    assert ledger(ca) == [
        {
            "action": "issue",
            "ts_ms": NOW_MS,
            "node_id": NODE_ID,
            "tenant": "acme",
            "public_key": bytes(KEY.verify_key).hex(),
            "kid": kid_of(pem),
            "serial": f"{serial_of(pem):x}",
            "not_after_ms": NOW_MS + 90 * DAY_MS,
        }
    ]


def test_replace_revokes_the_leaf_in_force_and_issues_a_new_one(ca: CertificateAuthority) -> None:
    roots = [ca.root_pem()]
    first = verify_leaf(ca.issue(CSR, "acme"), roots, NOW_MS)
    second = verify_leaf(ca.issue(make_csr(OTHER_KEY, NODE_ID), "acme", replace=True), roots, NOW_MS)
    third = verify_leaf(ca.issue(CSR, "acme", replace=True), roots, NOW_MS)
    assert ca.revoked_kids() == {first.kid, second.kid}
    assert third.kid not in ca.revoked_kids()


def test_who_asks_while_another_is_being_served_finds_the_id_taken(
    tmp_path: Path, ca: CertificateAuthority
) -> None:
    rival = Rival(lambda: authority(tmp_path / "ca").issue(make_csr(OTHER_KEY, NODE_ID), "globex"))
    CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), rival.random_bytes).issue(CSR, "acme")
    assert rival.is_refused()
    assert [entry["tenant"] for entry in ledger(ca)] == ["acme"]


@pytest.mark.parametrize("revoked", [False, True], ids=["in force", "revoked"])
def test_a_node_that_is_replaced_keeps_its_tenant(ca: CertificateAuthority, *, revoked: bool) -> None:
    ca.issue(CSR, "acme")
    if revoked:
        ca.revoke(NODE_ID)
    assert verify_leaf(ca.issue(CSR, replace=True), ca.roots(), NOW_MS).tenant == "acme"
    assert ca.records().moved_leaves() == {}


def test_a_node_comes_to_another_tenant_when_that_is_named(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")
    moved = verify_leaf(ca.issue(CSR, "globex", replace=True), ca.roots(), NOW_MS)
    assert moved.tenant == "globex"
    kept = verify_leaf(ca.issue(CSR, replace=True), ca.roots(), NOW_MS)
    assert kept.tenant == "globex"
    assert {kid: leaf.tenant for kid, leaf in ca.records().moved_leaves().items()} == {moved.kid: "globex"}


def test_a_new_node_is_in_the_default_tenant(ca: CertificateAuthority) -> None:
    assert verify_leaf(ca.issue(CSR), ca.roots(), NOW_MS).tenant == "default"


def test_a_failed_replacement_leaves_the_old_leaf_in_force(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")
    with pytest.raises(AuthorityError):
        ca.issue(CSR, "NOT A TENANT", replace=True)
    assert ca.revoked_kids() == frozenset()


# --- mocks --------------------------------------------------------------------------------------------


def test_mock_identities_are_whole_and_trusted(ca: CertificateAuthority, tmp_path: Path) -> None:
    node_ids = ca.issue_mock(3, tmp_path / "mocks", "acme")
    assert len(set(node_ids)) == 3
    for node_id in node_ids:
        identity = IdentityFiles(tmp_path / "mocks" / node_id).read()
        believed = verify_leaf(identity.leaf_pem, [ca.root_pem()], NOW_MS)
        assert (believed.node_id, believed.tenant, believed.kid) == (node_id, "acme", identity.kid)
        assert mode(tmp_path / "mocks" / node_id / "node.key") == 0o600
    assert [entry["node_id"] for entry in ledger(ca)] == node_ids


def test_mock_identities_take_no_sync_of_the_disk_each(
    ca: CertificateAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    ca.issue_mock(1, tmp_path / "one", "acme")
    of_one = len(synced)
    synced.clear()
    ca.issue_mock(20, tmp_path / "twenty", "acme")
    assert len(synced) <= of_one


# --- who looks on -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda ca: ca.issue(make_csr(OTHER_KEY, OTHER_NODE_ID), "acme"), id="issue"),
        pytest.param(lambda ca: ca.renew(CSR, NODE_ID), id="renew"),
        pytest.param(lambda ca: ca.revoke(NODE_ID), id="revoke"),
        pytest.param(lambda ca: ca.rotate_root(), id="rotate"),
    ],
)
def test_the_stamp_differs_after_every_change_by_another_process(
    ca: CertificateAuthority, tmp_path: Path, change: Callable[[CertificateAuthority], object]
) -> None:
    ca.issue(CSR, "acme")
    before = ca.stamp
    assert ca.stamp == before
    change(authority(tmp_path / "ca"))
    assert ca.stamp != before


# --- a backup -----------------------------------------------------------------------------------------


def test_nothing_is_issued_while_the_files_of_the_authority_are_read(
    rotated: tuple[CertificateAuthority, str],
) -> None:
    ca, _ = rotated
    issued: list[str] = []
    other = Thread(target=lambda: issued.append(authority(ca.root_file.parent).issue(CSR, "acme")))
    with ca.unchanged() as files:
        other.start()
        assert sorted(file.name for file in files) == [
            *("ledger.jsonl", "previous.key", "previous.pem", "root.key", "root.pem"),
            *("server-cross.pem", "server-root.key", "server-root.pem"),
        ]
        other.join(0.05)
        assert not issued
    other.join(60)
    assert issued


# --- enrolling ----------------------------------------------------------------------------------------


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


# --- renewing -----------------------------------------------------------------------------------------


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


ROOTS = (OperatorError, PeerError, StateError)


@pytest.mark.parametrize(
    ("error", "root"),
    [
        (AuthorityStateError, StateError),
        (AuthorityOptionError, OperatorError),
        (UnknownTargetError, OperatorError),
        (CertificateRefusedError, PeerError),
        (IdTakenError, PeerError),
        (LedgerError, StateError),
    ],
)
def test_each_error_is_the_fault_of_one(error: type[Exception], root: type[Exception]) -> None:
    assert [each for each in ROOTS if issubclass(error, each)] == [root]
    assert error is LedgerError or issubclass(error, AuthorityError)
