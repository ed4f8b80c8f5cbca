from pathlib import Path

import pytest

from relay.client.credentials import RenewableToken, TokenMissingError, check_token_file, keep_token
from schemas.files import ExposedFileError


def token_file(directory: Path, text: str | bytes, mode: int = 0o600) -> Path:
    file = directory / "token"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    file.chmod(mode)
    return file


def test_the_token_is_in_the_file_or_else_in_the_environment(tmp_path: Path) -> None:
    environment = {"EDGE_TOKEN": " from-the-environment\n"}
    assert RenewableToken.find(token_file(tmp_path, "from-the-file\n"), environment).text == "from-the-file"
    assert RenewableToken.find(None, environment).text == "from-the-environment"


def test_a_token_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    with pytest.raises(ExposedFileError, match="chmod 600"):
        RenewableToken.find(token_file(tmp_path, "secret", 0o644), {})


@pytest.mark.parametrize("text", ["", "two words", "line\nbreak", "größe", b"\xff", "x" * 8193])
def test_what_is_no_token_is_said_without_showing_it(tmp_path: Path, text: str | bytes) -> None:
    with pytest.raises(TokenMissingError) as caught:
        RenewableToken.find(token_file(tmp_path, text), {})
    assert str(caught.value) == f"{tmp_path / 'token'} holds no token"


def test_without_any_token_it_is_said_where_one_is_looked_for() -> None:
    with pytest.raises(TokenMissingError, match=r"--token-file, or in EDGE_TOKEN"):
        RenewableToken.find(None, {})


def test_a_file_is_looked_at_again_and_the_environment_is_not(tmp_path: Path) -> None:
    file = token_file(tmp_path, "old")
    token = RenewableToken.find(file, {})
    assert not token.is_newer_than("old")
    file.write_text("new\n")
    assert token.is_newer_than("old")
    assert token.text == "new"
    # Another request has found it already.
    assert token.is_newer_than("old")
    assert not token.is_newer_than("new")
    assert "--token-file" in token.advice
    fixed = RenewableToken.find(None, {"EDGE_TOKEN": "old"})
    assert not fixed.is_newer_than("old")
    assert "EDGE_TOKEN" in fixed.advice


@pytest.mark.parametrize("damage", ["gone", "empty", "exposed"])
def test_a_file_that_is_being_replaced_leaves_the_token_as_it_was(tmp_path: Path, damage: str) -> None:
    file = token_file(tmp_path, "old")
    token = RenewableToken.find(file, {})
    if damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_text("")
    else:
        file.write_text("new")
        file.chmod(0o644)
    assert not token.is_newer_than("old")
    assert token.text == "old"


def test_a_token_is_kept_where_only_this_user_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "edge-kubelet" / "edge.token"
    keep_token(file, "  a.b.c\n")
    assert check_token_file(file) == file
    assert file.read_text() == "a.b.c\n"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("text", ["", "two words", "x" * 8193])
def test_what_is_no_token_is_not_kept_and_not_repeated(tmp_path: Path, text: str) -> None:
    with pytest.raises(TokenMissingError) as refused:
        keep_token(tmp_path / "edge.token", text)
    assert not text or text not in str(refused.value)
    assert not (tmp_path / "edge.token").exists()


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"a b"])
def test_a_file_without_a_token_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "edge.token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(TokenMissingError, match=r"edge\.token holds no token"):
        check_token_file(file)


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "edge.token"
    file.write_text("a.b.c")
    file.chmod(0o644)
    with pytest.raises(ExposedFileError):
        check_token_file(file)
