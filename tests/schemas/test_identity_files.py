import stat
from pathlib import Path

import pytest

from schemas.certificates import make_csr, self_signed_leaf
from schemas.files import PUBLIC, write_atomic
from schemas.identity_files import IdentityFiles, IdentityFilesError
from schemas.keys import verifies
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa, key_named

CA = SimulatedCa()
NODE = CA.issue()
OTHER = CA.issue(OTHER_NODE_ID)
SELF_SIGNED = self_signed_leaf(NODE.key, NODE_ID, NOW_MS, 90, 5)
CSR = make_csr(NODE.key, NODE_ID)


@pytest.fixture
def fresh(tmp_path: Path) -> IdentityFiles:
    """Return an identity as it is made: self-signed, without a root."""
    files = IdentityFiles(tmp_path / "state" / "identity")
    files.write(NODE_ID, NODE.key, SELF_SIGNED, CSR)
    return files


@pytest.fixture
def enrolled(fresh: IdentityFiles) -> IdentityFiles:
    fresh.install(NODE.leaf_pem, CA.root_pem)
    return fresh


def test_a_fresh_identity_is_read_back(fresh: IdentityFiles) -> None:
    identity = fresh.read()
    assert identity.node_id == NODE_ID
    assert identity.key == NODE.key
    assert identity.leaf_pem == identity.chain_pem == SELF_SIGNED
    assert identity.root_pem is None


def test_an_enrolled_identity_has_the_leaf_and_the_root_of_its_ca(enrolled: IdentityFiles) -> None:
    identity = enrolled.read()
    assert identity.node_id == NODE_ID
    assert identity.key == NODE.key
    assert identity.leaf_pem == NODE.leaf_pem
    assert identity.root_pem == CA.root_pem
    assert identity.chain_pem == NODE.leaf_pem + CA.root_pem


def test_the_kid_is_that_of_the_leaf_in_use(fresh: IdentityFiles) -> None:
    before = fresh.read().kid
    fresh.install(NODE.leaf_pem, CA.root_pem)
    assert fresh.read().kid == NODE.kid != before


def test_what_an_identity_signs_verifies_under_its_leaf(enrolled: IdentityFiles) -> None:
    assert verifies(NODE.identity().public_key, b"message", enrolled.read().sign(b"message"))


def test_an_identity_does_not_show_its_secret(enrolled: IdentityFiles) -> None:
    identity = enrolled.read()
    assert repr(identity) == str(identity) == f"NodeIdentity({NODE_ID})"


def test_the_key_is_private_and_all_else_is_public(enrolled: IdentityFiles) -> None:
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in enrolled.root.iterdir()}
    assert modes == {
        "node_id": 0o644,
        "node.key": 0o600,
        "node.csr": 0o644,
        "leaf.pem": 0o644,
        "root.pem": 0o644,
    }
    assert stat.S_IMODE(enrolled.root.stat().st_mode) == 0o700


def test_the_files_hold_what_their_names_say(enrolled: IdentityFiles) -> None:
    assert enrolled.node_id.read_text() == NODE_ID + "\n"
    assert enrolled.csr.read_text() == CSR
    assert enrolled.key.read_text().startswith("-----BEGIN PRIVATE KEY-----\n")
    assert enrolled.root_certificate.read_text() == CA.root_pem


def test_a_request_is_only_written_when_there_is_one(tmp_path: Path) -> None:
    files = IdentityFiles(tmp_path)
    files.write(NODE_ID, NODE.key, SELF_SIGNED)
    assert not files.csr.exists()
    assert files.read().node_id == NODE_ID


def test_an_identity_exists_when_its_key_is_there_and_only_then(fresh: IdentityFiles) -> None:
    assert fresh.exists()
    fresh.key.unlink()
    assert not fresh.exists()
    for path in fresh.root.iterdir():
        path.unlink()
    assert not fresh.exists()
    fresh.key.write_text("")
    assert fresh.exists()


def test_where_there_is_no_directory_there_is_no_identity(tmp_path: Path) -> None:
    assert not IdentityFiles(tmp_path / "missing").exists()


class PowerCutError(Exception):
    """The machine stops here."""


def cut_after(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``count`` more files be written, and then nothing."""
    left = [None] * count

    def writing(path: Path, content: str | bytes, mode: int = PUBLIC) -> None:
        if not left:
            raise PowerCutError
        left.pop()
        write_atomic(path, content, mode)

    monkeypatch.setattr("schemas.identity_files.write_atomic", writing)


@pytest.mark.parametrize("written", range(4))
def test_an_identity_that_was_not_wholly_written_does_not_exist_and_can_be_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int
) -> None:
    files = IdentityFiles(tmp_path)
    with monkeypatch.context() as until_power_is_back:
        cut_after(written, until_power_is_back)
        with pytest.raises(PowerCutError):
            files.write(NODE_ID, NODE.key, SELF_SIGNED, CSR)
    assert len(list(tmp_path.iterdir())) == written
    assert not files.exists()
    with pytest.raises(IdentityFilesError, match="is missing: run `edge-kubelet init`"):
        files.read()
    files.write(OTHER_NODE_ID, OTHER.key, OTHER.leaf_pem)
    assert files.exists()
    assert files.read().node_id == OTHER_NODE_ID


def test_an_identity_exists_when_all_four_of_its_files_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise the test before this one would stop at another file than it names.
    cut_after(4, monkeypatch)
    IdentityFiles(tmp_path).write(NODE_ID, NODE.key, SELF_SIGNED, CSR)
    assert IdentityFiles(tmp_path).exists()


def test_an_identity_that_was_half_replaced_by_another_is_not_used(
    fresh: IdentityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_after(2, monkeypatch)
    with pytest.raises(PowerCutError):
        fresh.write(OTHER_NODE_ID, OTHER.key, OTHER.leaf_pem)
    with pytest.raises(IdentityFilesError, match="is not for the key"):
        fresh.read()


@pytest.mark.parametrize(
    "leaf",
    [
        pytest.param(OTHER.leaf_pem, id="another-nodes"),
        pytest.param(CA.issue(key=key_named("the key before")).leaf_pem, id="its-own-for-another-key"),
        pytest.param(CA.root_pem, id="the-root"),
        pytest.param(CA.root_pem + NODE.leaf_pem, id="the-root-first"),
        pytest.param(
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", id="bytes-that-are-no-leaf"
        ),
    ],
)
def test_a_leaf_that_is_not_for_the_key_is_not_used(enrolled: IdentityFiles, leaf: str) -> None:
    enrolled.leaf.write_text(leaf)
    with pytest.raises(IdentityFilesError) as caught:
        enrolled.read()
    assert str(caught.value) == f"{enrolled.leaf} is not for the key in {enrolled.key}"


def test_a_leaf_may_be_followed_by_its_root(enrolled: IdentityFiles) -> None:
    enrolled.leaf.write_text(NODE.leaf_pem + CA.root_pem)
    assert enrolled.read().kid == NODE.kid


@pytest.mark.parametrize("name", ["node_id", "node.key", "leaf.pem"])
def test_a_missing_file_is_named_with_what_to_do(fresh: IdentityFiles, name: str) -> None:
    (fresh.root / name).unlink()
    with pytest.raises(IdentityFilesError) as caught:
        fresh.read()
    assert str(caught.value) == f"{fresh.root / name} is missing: run `edge-kubelet init`"


def test_the_request_is_not_needed_to_read_an_identity(fresh: IdentityFiles) -> None:
    fresh.csr.unlink()
    assert fresh.read().node_id == NODE_ID


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644], ids=oct)
def test_a_key_that_others_can_read_is_not_used(fresh: IdentityFiles, mode: int) -> None:
    fresh.key.chmod(mode)
    with pytest.raises(IdentityFilesError, match="can be read by others: chmod 600"):
        fresh.read()


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        pytest.param("node_id", b"", "node_id holds no node id", id="an-empty-id"),
        pytest.param(
            "node_id", NODE_ID.upper().encode(), "node_id holds no node id", id="an-id-in-upper-case"
        ),
        pytest.param("node_id", b"pi-kitchen\n", "node_id holds no node id", id="a-name-for-an-id"),
        pytest.param("node_id", b"\xff\xfe", "is damaged: it is not text", id="an-id-that-is-no-text"),
        pytest.param("node.key", b"", "not an Ed25519 private key", id="an-empty-key"),
        pytest.param("node.key", bytes(119), "not an Ed25519 private key", id="a-key-of-zeros"),
        pytest.param("node.key", b"\xff\xfe", "is damaged: it is not text", id="a-key-that-is-no-text"),
        pytest.param("leaf.pem", b"", "leaf.pem holds no certificate", id="an-empty-leaf"),
        pytest.param("leaf.pem", CSR.encode(), "leaf.pem holds no certificate", id="a-request-for-a-leaf"),
        pytest.param(
            "leaf.pem",
            b"-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n",
            "leaf.pem holds no certificate",
            id="a-leaf-that-is-not-base64",
        ),
        pytest.param("leaf.pem", b"\xff\xfe", "is damaged: it is not text", id="a-leaf-that-is-no-text"),
        pytest.param("root.pem", b"\xff\xfe", "is damaged: it is not text", id="a-root-that-is-no-text"),
    ],
)
def test_a_damaged_file_is_an_error_that_says_so(
    fresh: IdentityFiles, name: str, content: bytes, text: str
) -> None:
    path = fresh.root / name
    path.touch()
    path.write_bytes(content)
    with pytest.raises(IdentityFilesError, match=text) as caught:
        fresh.read()
    assert str(fresh.root) in str(caught.value)
    assert caught.value.__context__ is None or caught.value.__suppress_context__


@pytest.mark.parametrize("name", ["node_id", "node.key", "leaf.pem", "root.pem"])
def test_a_directory_in_the_place_of_a_file_is_an_error_of_ours(fresh: IdentityFiles, name: str) -> None:
    path = fresh.root / name
    path.unlink(missing_ok=True)
    path.mkdir(mode=0o700)
    with pytest.raises(IdentityFilesError, match="directory"):
        fresh.read()


def test_white_space_around_the_id_does_not_matter(fresh: IdentityFiles) -> None:
    fresh.node_id.write_text(f"  {NODE_ID}\r\n")
    assert fresh.read().node_id == NODE_ID


# --- going on with another leaf -----------------------------------------------------------------------


def test_a_renewed_identity_shows_the_new_leaf_the_one_before_and_the_roots(enrolled: IdentityFiles) -> None:
    identity, fresh = enrolled.read(), CA.issue(key=NODE.key)
    identity.renew(fresh.leaf_pem, CA.root_pem)
    assert identity.kid == fresh.kid
    assert identity.chain_pem == fresh.leaf_pem + NODE.leaf_pem + CA.root_pem
    assert verifies(NODE.identity().public_key, b"message", identity.sign(b"message"))


def test_of_several_renewals_the_last_two_leaves_are_shown(enrolled: IdentityFiles) -> None:
    identity = enrolled.read()
    second, third = CA.issue(key=NODE.key), CA.issue(key=NODE.key)
    for leaf in (second, third):
        identity.renew(leaf.leaf_pem, CA.root_pem)
    assert identity.chain_pem == third.leaf_pem + second.leaf_pem + CA.root_pem
    assert NODE.leaf_pem not in identity.chain_pem


def test_after_a_restart_only_the_leaf_in_the_file_is_shown(enrolled: IdentityFiles) -> None:
    identity, fresh = enrolled.read(), CA.issue(key=NODE.key)
    identity.renew(fresh.leaf_pem, CA.root_pem)
    enrolled.install(fresh.leaf_pem, CA.root_pem)
    again = enrolled.read()
    assert again.previous_leaf_pem == ""
    assert again.chain_pem == fresh.leaf_pem + CA.root_pem
