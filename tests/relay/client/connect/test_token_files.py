from pathlib import Path

import pytest

from relay.client.connect.errors import ConnectError
from relay.client.connect.token_files import check_token_file, keep_token
from schemas.files import ExposedFileError


def test_a_token_is_kept_where_only_this_user_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "edge-kubelet" / "edge.token"
    keep_token(file, "  a.b.c\n")
    assert check_token_file(file) == file
    assert file.read_text() == "a.b.c\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("text", ["", "two words", "x" * 8193])
def test_what_is_no_token_is_not_kept_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConnectError) as refused:
        keep_token(tmp_path / "edge.token", text)
    assert not text or text not in str(refused.value)
    assert not (tmp_path / "edge.token").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "edge.token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConnectError, match=r"edge\.token holds no token"):
        check_token_file(file)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "edge.token"
    file.write_text("a.b.c")
    file.chmod(0o644)
    with pytest.raises(ExposedFileError):
        check_token_file(file)
