"""``relay ca backup`` and ``relay ca restore``."""

from pathlib import Path

import pyrage  # type: ignore[import-untyped]  # the library brings no types
import pytest

from schemas.files import PRIVATE, write_atomic
from tests.fakes.command_files import mode
from tests.fakes.relay_command import RelayCommand as Relay


def backup_key(tmp_path: Path) -> tuple[Path, str]:
    """Return an identity file as age-keygen writes it, and its recipient."""
    identity = pyrage.x25519.Identity.generate()
    file = tmp_path / "identity"
    write_atomic(file, f"# public key: {identity.to_public()}\n{identity}\n", PRIVATE)
    return file, str(identity.to_public())


def test_a_backup_is_encrypted_and_restored_into_an_empty_directory(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    relay("ca", "init")
    identity, recipient = backup_key(tmp_path)
    made = relay("ca", "backup", tmp_path / "backup", "--recipient", recipient)
    assert (made.code, made.out) == (0, "")
    assert mode(tmp_path / "backup") == 0o600
    assert b"PRIVATE KEY" not in (tmp_path / "backup").read_bytes()
    state.rename(tmp_path / "lost")
    restored = relay("ca", "restore", tmp_path / "backup", "--identity", identity)
    assert (restored.code, restored.out) == (0, "")
    assert "revoked since" in restored.err
    for name in ("root.pem", "root.key", "ledger.jsonl"):
        assert (state / "ca" / name).read_bytes() == (tmp_path / "lost" / "ca" / name).read_bytes()
    again = relay("ca", "restore", tmp_path / "backup", "--identity", identity)
    assert again.code == 3
    assert "is not empty" in again.error


# Each costs two derivations of a key, seconds and a gigabyte by design.
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param(("file", "environment"), id="file-environment"),
        pytest.param(("environment", "file"), id="environment-file", marks=pytest.mark.long),
    ],
)
@pytest.mark.integration
def test_a_passphrase_is_read_from_where_others_cannot_see_it(
    relay: Relay, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, str]
) -> None:
    def options(way: str) -> list[str | Path]:
        if way == "file":
            monkeypatch.delenv("EDGE_BACKUP_PASSPHRASE", raising=False)
            return ["--passphrase-file", tmp_path / "passphrase"]
        monkeypatch.setenv("EDGE_BACKUP_PASSPHRASE", "correct horse")
        return []

    backup, restore = ways
    relay("ca", "init")
    write_atomic(tmp_path / "passphrase", "correct horse\n", PRIVATE)
    assert relay("ca", "backup", tmp_path / "backup", *options(backup)).code == 0
    assert b"PRIVATE KEY" not in (tmp_path / "backup").read_bytes()
    state.rename(tmp_path / "lost")
    assert relay("ca", "restore", tmp_path / "backup", *options(restore)).code == 0
    assert (state / "ca" / "root.key").exists()


def test_a_backup_is_plain_only_when_it_is_told_and_then_says_so(
    relay: Relay, state: Path, tmp_path: Path
) -> None:
    relay("ca", "init")
    refused = relay("ca", "backup", tmp_path / "backup")
    assert refused.code == 2
    assert "passphrase" in refused.error
    assert not (tmp_path / "backup").exists()
    made = relay("ca", "backup", tmp_path / "backup", "--plain")
    assert made.code == 0
    assert "not encrypted" in made.err
    state.rename(tmp_path / "lost")
    unsaid = relay("ca", "restore", tmp_path / "backup", "--identity", backup_key(tmp_path)[0])
    assert unsaid.code == 2
    assert "--plain" in unsaid.error
    assert not state.exists()
    assert relay("ca", "restore", tmp_path / "backup", "--plain").code == 0


def test_a_backup_is_never_overwritten(relay: Relay, tmp_path: Path) -> None:
    relay("ca", "init")
    relay("ca", "backup", tmp_path / "backup", "--plain")
    before = (tmp_path / "backup").read_bytes()
    again = relay("ca", "backup", tmp_path / "backup", "--plain")
    assert again.code == 3
    assert "not overwritten" in again.error
    assert (tmp_path / "backup").read_bytes() == before


def test_a_backup_that_others_can_read_is_not_restored(relay: Relay, state: Path, tmp_path: Path) -> None:
    relay("ca", "init")
    relay("ca", "backup", tmp_path / "backup", "--plain")
    (tmp_path / "backup").chmod(0o644)
    state.rename(tmp_path / "lost")
    refused = relay("ca", "restore", tmp_path / "backup", "--plain")
    assert refused.code == 3
    assert "chmod 600" in refused.error
    assert not state.exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        pytest.param(["backup", "F", "--plain", "--recipient", "age1"], 2, "exclude", id="two ways"),
        pytest.param(["restore", "F", "--plain", "--identity", "F"], 2, "exclude", id="two ways back"),
        pytest.param(["backup", "F", "--recipient", "age1no"], 2, "age1", id="no recipient"),
        pytest.param(["backup", "F", "--passphrase-file", "EMPTY"], 2, "empty", id="an empty passphrase"),
        pytest.param(["backup", "F", "--passphrase-file", "LETTER"], 2, "at least 12", id="one letter"),
        pytest.param(["restore", "F", "--plain"], 3, "No such file", id="no backup"),
    ],
)
def test_what_cannot_be_backed_up_or_restored_is_said_in_one_line(
    relay: Relay, tmp_path: Path, arguments: list[str], code: int, text: str
) -> None:
    relay("ca", "init")
    write_atomic(tmp_path / "empty", "\n", PRIVATE)
    write_atomic(tmp_path / "letter", "a\n", PRIVATE)
    places = {"F": tmp_path / "backup", "EMPTY": tmp_path / "empty", "LETTER": tmp_path / "letter"}
    outcome = relay("ca", *(places.get(argument, argument) for argument in arguments))
    assert outcome.code == code
    assert text in outcome.error
    assert not (tmp_path / "backup").exists()
