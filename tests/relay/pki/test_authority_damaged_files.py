"""What the CA does with files that are damaged, lost, readable by others, or of an older version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError
from schemas.certificates import make_csr, verify_leaf
from tests.fakes.disk import full_disk
from tests.fakes.issuing_authority import CSR, KEY, OTHER_KEY, authority, files, kid_of, ledger, revoked_in
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID


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


@pytest.mark.parametrize("content", [b"", b"no root", b"\xff\xfe"])
def test_a_root_that_verifies_no_certificate_is_an_error(ca: CertificateAuthority, content: bytes) -> None:
    ca.root_file.write_bytes(content)
    with pytest.raises(AuthorityError, match=r"root\.pem is damaged"):
        ca.root_pem()


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
