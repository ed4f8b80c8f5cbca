"""A rotation of the CA's root, and files of it that are damaged: certificates, keys, the ledger."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError, AuthorityOptionError
from schemas.certificates import is_endorsed, make_csr, verify_leaf
from schemas.identity import certificates_in, first_certificate_in
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.real_ca import (
    CSR,
    KEY,
    OTHER_KEY,
    authority,
    files,
    kid_of,
    ledger,
    mode,
    revoked_in,
    serial_of,
)
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID


def common_name(root: str) -> str:
    return x509.load_pem_x509_certificate(root.encode()).subject.rfc4514_string()


def test_a_rotation_makes_another_root_with_a_name_of_its_own(
    rotated: tuple[CertificateAuthority, str],
) -> None:
    ca, old = rotated
    assert ca.roots() == [ca.root_pem(), old]
    names = [common_name(root) for root in ca.roots()]
    assert len(set(names)) == 2
    assert all(re.fullmatch(r"CN=edge-kubelet root [0-9a-f]{8}", name) for name in names)
    for name in ("root.key", "previous.key"):
        assert mode(ca.root_file.with_name(name)) == 0o600
    assert ledger(ca)[-1] == {
        "action": "rotate",
        "ts_ms": NOW_MS,
        "root": kid_of(ca.root_pem()),
        "previous": kid_of(old),
        "previous_until_ms": NOW_MS + 90 * DAY_MS,
    }


def test_a_new_root_is_endorsed_with_the_key_of_the_old_one(
    rotated: tuple[CertificateAuthority, str], clock: FakeClock
) -> None:
    ca, old = rotated
    endorsement = ca.endorsement()
    assert endorsement is not None
    assert is_endorsed(first_certificate_in(ca.root_pem()), certificates_in(old), endorsement)
    clock.advance(90 * DAY_MS)  # later than any renewal
    assert ca.endorsement() == endorsement


def test_the_name_of_a_root_is_that_of_its_key(ca: CertificateAuthority) -> None:
    root = x509.load_pem_x509_certificate(ca.root_pem().encode())
    key_id = root.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value.digest.hex()
    assert common_name(ca.root_pem()) == f"CN=edge-kubelet root {key_id[:8]}"


def test_leaves_are_of_the_new_root_and_the_broker_s_other_clients_of_the_oldest_that_is_trusted(
    rotated: tuple[CertificateAuthority, str], clock: FakeClock
) -> None:
    ca, old = rotated
    new = ca.root_pem()
    assert verify_leaf(ca.issue(CSR, "acme"), [new], NOW_MS).node_id == NODE_ID

    def issuer() -> str:
        pem = ca.issue_client("edge-relay", "urn:x", bytes(OTHER_KEY.verify_key), 90)
        return x509.load_pem_x509_certificate(pem.encode()).issuer.rfc4514_string()

    assert issuer() == common_name(old)
    clock.advance(90 * DAY_MS)
    assert issuer() == common_name(new)


def test_the_old_root_is_trusted_until_its_time_is_up(
    rotated: tuple[CertificateAuthority, str], clock: FakeClock
) -> None:
    ca, old = rotated
    clock.advance(90 * DAY_MS - 1)
    assert ca.roots() == [ca.root_pem(), old]
    stamp = ca.stamp
    clock.advance(1)
    assert ca.roots() == [ca.root_pem()]
    assert ca.stamp != stamp


def test_there_is_no_rotation_within_a_rotation(
    rotated: tuple[CertificateAuthority, str], clock: FakeClock
) -> None:
    ca, _ = rotated
    before = files(ca)
    clock.advance(90 * DAY_MS - 1)
    with pytest.raises(AuthorityError, match="still trusted"):
        ca.rotate_root()
    assert files(ca) == before
    clock.advance(1)
    second = ca.root_pem()
    ca.rotate_root()
    assert ca.roots() == [ca.root_pem(), second]


@pytest.mark.parametrize("days", [-1, 0, 3651])
def test_an_overlap_out_of_bounds_changes_nothing(ca: CertificateAuthority, days: int) -> None:
    before = files(ca)
    for rotate in (ca.rotate_root, ca.servers.rotate):
        with pytest.raises(AuthorityOptionError, match="1 to 3650 days"):
            rotate(days)
    assert files(ca) == before


def test_without_the_old_roots_key_there_is_no_rotation(ca: CertificateAuthority) -> None:
    ca.root_file.with_name("root.key").unlink()
    before = files(ca)
    with pytest.raises(AuthorityError, match=r"root\.key"):
        ca.rotate_root()
    assert files(ca) == before


def test_each_trusted_root_has_its_list_and_each_names_all(
    rotated: tuple[CertificateAuthority, str], clock: FakeClock
) -> None:
    ca, old = rotated
    serial = serial_of(ca.issue(CSR, "acme"))
    ca.revoke(NODE_ID)
    assert revoked_in(ca.crl_pem()) == [{serial}, {serial}]
    lists = ca.crl_pem().split("-----END X509 CRL-----\n")[:2]
    issuers = [
        x509.load_pem_x509_crl(f"{text}-----END X509 CRL-----\n".encode()).issuer.rfc4514_string()
        for text in lists
    ]
    assert issuers == [common_name(ca.root_pem()), common_name(old)]
    clock.advance(90 * DAY_MS)
    assert revoked_in(ca.crl_pem()) == [{serial}]


@pytest.mark.parametrize("step", range(5))
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rotation_may_be_cut_short_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, when: str
) -> None:
    clock = FakeClock(NOW_MS)
    ca = authority(tmp_path / "ca", clock)
    ca.create()
    old = ca.root_pem()
    ca.issue(CSR, "acme")
    replace, steps = Path.replace, iter(range(100))

    def is_sound() -> None:
        """Everything is in place for who looks just now: the old root, and a key to each."""
        other = authority(tmp_path / "ca", clock)
        assert old in other.roots()
        assert other.can_issue()
        assert len(revoked_in(other.crl_pem())) == len(other.roots())

    def cut(self: Path, target: Path) -> Path:
        is_sound()
        here = next(steps) == step
        if here and when == "before":
            raise KeyboardInterrupt
        moved = replace(self, target)
        is_sound()
        if here:
            raise KeyboardInterrupt
        return moved

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", cut)
        with pytest.raises(KeyboardInterrupt):
            ca.rotate_root()
    is_sound()
    if ca.root_pem() == old:
        ca.rotate_root()
    else:
        with pytest.raises(AuthorityError, match="still trusted"):
            ca.rotate_root()
    second = ca.root_pem()
    assert ca.roots() == [second, old]
    ca.issue_client("edge-relay", "urn:x", bytes(OTHER_KEY.verify_key), 90)
    clock.advance(90 * DAY_MS)
    ca.rotate_root()
    assert ca.roots() == [ca.root_pem(), second]
    assert ca.can_issue()
    ca.issue_client("edge-relay", "urn:x", bytes(OTHER_KEY.verify_key), 90)


@pytest.mark.parametrize("name", ["root.key", "root.pem", "ledger.jsonl"])
@pytest.mark.parametrize(
    "content", [pytest.param(b"damaged\n", id="text"), pytest.param(b"\xff\xfe\x00\n", id="bytes")]
)
def test_a_damaged_file_is_an_error_that_names_it(
    ca: CertificateAuthority, name: str, content: bytes
) -> None:
    damaged = ca.root_file.with_name(name)
    damaged.touch(mode=0o600)
    damaged.write_bytes(content)
    with pytest.raises(AuthorityError, match=name):
        ca.issue(CSR, "acme")


def test_a_key_that_others_can_read_is_not_used(ca: CertificateAuthority) -> None:
    ca.root_file.with_name("root.key").chmod(0o644)
    with pytest.raises(PermissionError, match=r"root\.key"):
        ca.issue(make_csr(KEY, OTHER_NODE_ID), "acme")


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({}, id="no action"),
        pytest.param({"action": "forgive", "kid": "0" * 64}, id="an action of another version"),
        pytest.param({"action": "issue", "node_id": NODE_ID}, id="an issue of nothing"),
        pytest.param({"action": "revoke", "node_id": NODE_ID}, id="a revocation of nothing"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda ca: ca.issue(CSR, "acme"), id="issue"),
        pytest.param(lambda ca: ca.revoke(NODE_ID), id="revoke"),
        pytest.param(lambda ca: ca.revoked_kids(), id="kids"),
        pytest.param(lambda ca: ca.crl_pem(), id="list"),
    ],
)
def test_an_entry_that_is_not_understood_stops_everything(
    ca: CertificateAuthority, entry: dict[str, Any], use: Callable[[CertificateAuthority], object]
) -> None:
    # It may say that a leaf is void.
    with ca.root_file.with_name("ledger.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")
    with pytest.raises(AuthorityError, match=r"ledger\.jsonl is damaged: line 1"):
        use(ca)


def test_without_its_ledger_an_authority_forgets_no_node_but_stops(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")
    ca.revoke(NODE_ID)
    ca.root_file.with_name("ledger.jsonl").unlink()
    uses: list[Callable[[], object]] = [
        ca.revoked_kids,
        ca.crl_pem,
        lambda: ca.issue(CSR, "acme"),
        lambda: ca.revoke(NODE_ID),
    ]
    for use in uses:
        with pytest.raises(AuthorityError, match=r"ledger\.jsonl is missing: restore it"):
            use()
    assert not ca.root_file.with_name("ledger.jsonl").exists()


def test_a_ledger_of_the_first_version_is_still_understood(ca: CertificateAuthority) -> None:
    old = {
        "ts_ms": NOW_MS - DAY_MS,
        "action": "issue",
        "node_id": NODE_ID,
        "tenant": "acme",
        "public_key": bytes(KEY.verify_key).hex(),
        "kid": "a" * 64,
    }
    revoked = {"ts_ms": NOW_MS, "action": "revoke", "node_id": OTHER_NODE_ID, "kid": "b" * 64}
    lines = [old, {**old, "node_id": OTHER_NODE_ID, "kid": "b" * 64}, revoked]
    ca.root_file.with_name("ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert ca.revoked_kids() == {"b" * 64}
    assert list(ca.in_force()) == [NODE_ID]
    assert ca.in_force()[NODE_ID].not_after_ms == NOW_MS + 89 * DAY_MS
    assert revoked_in(ca.crl_pem()) == [set()]
    renewed = verify_leaf(ca.renew(CSR, NODE_ID), ca.roots(), NOW_MS)
    assert (renewed.tenant, renewed.public_key) == ("acme", bytes(KEY.verify_key))


def test_a_full_disk_neither_issues_nor_revokes(ca: CertificateAuthority) -> None:
    kid = kid_of(ca.issue(CSR, "acme"))
    before = files(ca)
    with full_disk(len(before["ledger.jsonl"]) + 40):
        for use in (
            lambda: ca.issue(CSR, "acme", replace=True),
            lambda: ca.revoke(NODE_ID),
            lambda: ca.renew(CSR, NODE_ID),
            ca.rotate_root,
        ):
            with pytest.raises(OSError, match=r"ledger\.jsonl"):
                use()
    assert files(ca) == before
    assert ca.revoke(NODE_ID) == [kid]


def test_a_key_that_is_another_roots_is_not_used(ca: CertificateAuthority, tmp_path: Path) -> None:
    other = authority(tmp_path / "other")
    other.create()
    other.root_file.with_name("root.key").replace(ca.root_file.with_name("root.key"))
    with pytest.raises(AuthorityError, match=r"root\.key is not the key of its root"):
        ca.issue(CSR, "acme")
    assert ledger(ca) == []
    assert not ca.can_issue()


def test_without_its_key_the_authority_is_still_believed_and_issues_nothing(ca: CertificateAuthority) -> None:
    ca.issue(CSR, "acme")
    key = ca.root_file.with_name("root.key")
    key.rename(key.with_name("elsewhere"))
    assert not ca.can_issue()
    assert ca.roots() == [ca.root_pem()]
    assert list(ca.in_force()) == [NODE_ID]
    with pytest.raises(AuthorityError, match=r"root\.key"):
        ca.issue(make_csr(OTHER_KEY, OTHER_NODE_ID), "acme")
    key.with_name("elsewhere").rename(key)
    assert ca.can_issue()
    key.chmod(0o640)
    assert not ca.can_issue()
