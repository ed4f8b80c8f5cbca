from pathlib import Path

import pytest

from relay.audit.chain import GENESIS
from relay.audit.verified_head import VerifiedHead, VerifiedHeadError, keep_verified_head, read_verified_head
from schemas.files import UntrustedFileError
from tests.fakes.signer import NOW_MS

HEAD = "a" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit-verified.json"


def test_what_was_kept_is_read_back(path: Path) -> None:
    assert read_verified_head(path) is None
    for head in (HEAD, "b" * 64):
        keep_verified_head(path, head, NOW_MS)
        assert read_verified_head(path) == VerifiedHead(head, NOW_MS)


def test_of_an_audit_without_a_line_nothing_is_kept(path: Path) -> None:
    keep_verified_head(path, GENESIS, NOW_MS)
    assert not path.exists()


DAMAGED = {
    "nothing": b"",
    "no members": b"{}",
    "an array": b"[]",
    "null": b"null",
    "cut": b"{",
    "no text": b"\xff",
    "no time": b'{"head":"a"}',
    "a time without end": b'{"head":"a","verified_at_ms":Infinity}',
    "deep": b"[" * 1000,
    "long": b" " * 2000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_an_error_and_never_one_that_says_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises((VerifiedHeadError, OSError), match=path.name):
        read_verified_head(path)


def test_a_link_is_not_followed(path: Path) -> None:
    keep_verified_head(path.with_name("other"), HEAD, NOW_MS)
    path.symlink_to("other")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        read_verified_head(path)
