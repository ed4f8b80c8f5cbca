import json
import os
import stat
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from relay.ca import AuthorityError, CertificateAuthority
from schemas.certificates import make_csr, verify_leaf
from schemas.identity_files import IdentityFiles
from tests.fakes.clock import FakeClock
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, key_named

KEY = key_named("the node")
OTHER_KEY = key_named("another node")
CSR = make_csr(KEY, NODE_ID)
YEAR_MS = 365 * DAY_MS


def authority(directory: Path, clock: FakeClock | None = None) -> CertificateAuthority:
    return CertificateAuthority(directory, clock or FakeClock(NOW_MS), os.urandom)


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    ca = authority(tmp_path / "ca")
    ca.create()
    return ca


def ledger(ca: CertificateAuthority) -> list[dict[str, Any]]:
    text = ca.root_file.with_name("ledger.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# --- the root -----------------------------------------------------------------------------------------


def test_the_key_of_the_root_is_for_its_owner_alone(ca: CertificateAuthority) -> None:
    assert mode(ca.root_file.with_name("root.key")) == 0o600
    assert mode(ca.root_file.parent) == 0o700


@pytest.mark.parametrize("lost", [pytest.param(None, id="whole"), pytest.param("root.key", id="key offline")])
def test_a_root_is_never_overwritten(ca: CertificateAuthority, lost: str | None) -> None:
    before = ca.root_pem()
    if lost is not None:
        ca.root_file.with_name(lost).unlink()
    with pytest.raises(AuthorityError, match="holds a CA already"):
        ca.create()
    assert ca.root_pem() == before


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
    ],
)
def test_without_a_root_the_error_says_how_to_make_one(tmp_path: Path, use: Any) -> None:
    with pytest.raises(AuthorityError, match="relay ca init"):
        use(authority(tmp_path / "nothing"), tmp_path)


# --- issuing ------------------------------------------------------------------------------------------


def test_a_leaf_names_node_and_tenant_and_chains_to_the_root(ca: CertificateAuthority) -> None:
    identity = verify_leaf(ca.issue(CSR, "acme"), [ca.root_pem()], NOW_MS)
    assert (identity.node_id, identity.tenant) == (NODE_ID, "acme")
    assert identity.public_key == bytes(KEY.verify_key)
    assert identity.not_after_ms == NOW_MS + 90 * DAY_MS


def test_the_ledger_binds_the_id_to_tenant_and_key(ca: CertificateAuthority) -> None:
    kid = verify_leaf(ca.issue(CSR, "acme"), [ca.root_pem()], NOW_MS).kid
    assert ledger(ca) == [
        {
            "ts_ms": NOW_MS,
            "action": "issue",
            "node_id": NODE_ID,
            "tenant": "acme",
            "public_key": bytes(KEY.verify_key).hex(),
            "kid": kid,
        }
    ]


@pytest.mark.parametrize(
    "csr",
    [
        pytest.param(CSR, id="the same request"),
        pytest.param(make_csr(OTHER_KEY, NODE_ID), id="somebody else's key"),
    ],
)
def test_an_id_that_was_issued_is_not_issued_again(ca: CertificateAuthority, csr: str) -> None:
    ca.issue(CSR, "acme")
    before = ledger(ca)
    with pytest.raises(AuthorityError, match=f"{NODE_ID} has a certificate: say --replace"):
        ca.issue(csr, "acme")
    assert ledger(ca) == before
    assert ca.revoked_kids() == frozenset()


def test_replace_revokes_the_leaf_in_force_and_issues_a_new_one(ca: CertificateAuthority) -> None:
    roots = [ca.root_pem()]
    first = verify_leaf(ca.issue(CSR, "acme"), roots, NOW_MS)
    second = verify_leaf(ca.issue(make_csr(OTHER_KEY, NODE_ID), "acme", replace=True), roots, NOW_MS)
    third = verify_leaf(ca.issue(CSR, "acme", replace=True), roots, NOW_MS)
    assert ca.revoked_kids() == {first.kid, second.kid}
    assert third.kid not in ca.revoked_kids()


def test_replacing_what_was_never_issued_revokes_nothing(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme", replace=True)
    assert ca.revoked_kids() == frozenset()


def test_revocations_are_still_known_to_the_next_process(ca: CertificateAuthority, tmp_path: Path) -> None:
    ca.issue(CSR, "acme")
    ca.issue(CSR, "acme", replace=True)
    assert authority(tmp_path / "ca").revoked_kids() == ca.revoked_kids()
    assert len(ca.revoked_kids()) == 1


def test_who_asks_while_another_is_being_served_finds_the_id_taken(
    tmp_path: Path, ca: CertificateAuthority
) -> None:
    refused: list[str] = []

    def ask_too() -> None:
        try:
            authority(tmp_path / "ca").issue(make_csr(OTHER_KEY, NODE_ID), "globex")
        except AuthorityError as error:
            refused.append(str(error))

    rival = Thread(target=ask_too)

    def random_bytes(count: int) -> bytes:
        # The serial number is drawn between looking into the ledger and writing to it.
        rival.start()
        rival.join(0.1)
        return os.urandom(count)

    CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), random_bytes).issue(CSR, "acme")
    rival.join()
    assert len(refused) == 1
    assert [entry["tenant"] for entry in ledger(ca)] == ["acme"]


@pytest.mark.parametrize(
    ("csr", "reason"),
    [
        pytest.param("", "not_a_request", id="empty"),
        pytest.param("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n", "not_a_request", id="cut off"),
        pytest.param(CSR.replace("M", "N", 1), "not_a_request", id="damaged"),
        pytest.param("\u202e" + CSR, "not_a_request", id="not ASCII"),
        pytest.param(make_csr(KEY, "root"), "not_a_node_id", id="another kind of name"),
    ],
)
def test_a_request_that_proves_nothing_is_refused(ca: CertificateAuthority, csr: str, reason: str) -> None:
    with pytest.raises(AuthorityError, match=reason):
        ca.issue(csr, "acme")
    assert ca.revoked_kids() == frozenset()


@pytest.mark.parametrize("tenant", ["", "Acme", "a/b", "x" * 64, "acme:node:x"])
def test_a_tenant_that_is_not_of_its_form_gets_no_leaf(ca: CertificateAuthority, tenant: str) -> None:
    with pytest.raises(AuthorityError, match="not issued for tenant"):
        ca.issue(CSR, tenant)
    ca.issue(CSR, "acme")


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


# --- what can be wrong with the files -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["root.key", "root.pem", "ledger.jsonl"])
@pytest.mark.parametrize(
    "content", [pytest.param(b"damaged\n", id="text"), pytest.param(b"\xff\xfe\x00", id="bytes")]
)
def test_a_damaged_file_is_an_error_that_names_it(
    ca: CertificateAuthority, name: str, content: bytes
) -> None:
    damaged = ca.root_file.with_name(name)
    damaged.touch(mode=0o600)
    damaged.write_bytes(content)
    with pytest.raises(AuthorityError, match=name):
        ca.issue(CSR, "acme")


@pytest.mark.parametrize("content", [b"", b"no root", b"\xff\xfe"])
def test_a_root_that_would_vouch_for_nobody_is_an_error(ca: CertificateAuthority, content: bytes) -> None:
    ca.root_file.write_bytes(content)
    with pytest.raises(AuthorityError, match=r"root\.pem is damaged"):
        ca.root_pem()


def test_a_key_that_others_can_read_is_not_used(ca: CertificateAuthority) -> None:
    ca.root_file.with_name("root.key").chmod(0o644)
    with pytest.raises(PermissionError, match=r"root\.key"):
        ca.issue(make_csr(KEY, OTHER_NODE_ID), "acme")
