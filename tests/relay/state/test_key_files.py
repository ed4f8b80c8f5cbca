"""The relay's own private keys as files."""

import os
import stat
from pathlib import Path

import pytest

from relay.state.key_files import KeyFileError, load_or_create_key, read_key
from schemas.error_roots import StateError
from tests.fakes.disk import full_disk


def test_a_key_is_made_once_and_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "state" / "token.key"
    key = load_or_create_key(path, os.urandom)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert load_or_create_key(path, os.urandom) == key
    assert read_key(path) == key
    assert load_or_create_key(tmp_path / "other.key", os.urandom) != key


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    load_or_create_key(path, os.urandom)
    path.chmod(0o640)
    for use in (read_key, lambda path: load_or_create_key(path, os.urandom)):
        with pytest.raises(PermissionError, match="chmod 600"):
            use(path)


@pytest.mark.parametrize("content", [b"", b"secret words", b"\xfe\xff"])
def test_a_damaged_key_is_an_error_that_names_the_file_and_shows_nothing_of_it(
    tmp_path: Path, content: bytes
) -> None:
    path = tmp_path / "token.key"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(KeyFileError, match=r"token\.key is damaged: it holds no key: restore it") as caught:
        load_or_create_key(path, os.urandom)
    assert isinstance(caught.value, StateError)
    assert "secret" not in str(caught.value)
    assert "0xfe" not in str(caught.value)
    assert path.read_bytes() == content


def test_a_key_that_is_not_there_is_read_by_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_key(tmp_path / "token.key")


def test_a_full_disk_leaves_no_key(tmp_path: Path) -> None:
    path = tmp_path / "token.key"
    with full_disk(), pytest.raises(OSError, match=r"token\.key|File too large"):
        load_or_create_key(path, os.urandom)
    assert not path.exists()
