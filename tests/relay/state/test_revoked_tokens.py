import stat
from pathlib import Path

import pytest

from relay.state.ledger import LedgerError
from relay.state.tokens import RevokedTokens, is_jti


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "revoked_tokens.jsonl"


def test_what_was_revoked_stays_revoked(path: Path) -> None:
    RevokedTokens(path).revoke("a", 1)
    RevokedTokens(path).revoke("b/c=", 2)
    assert RevokedTokens(path).jtis() == {"a", "b/c="}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_revoked_before_the_first_time(path: Path) -> None:
    assert RevokedTokens(path).jtis() == frozenset()
    assert not path.exists()


def test_who_watches_sees_a_revocation_and_no_change_when_it_is_repeated(path: Path) -> None:
    tokens = RevokedTokens(path)
    before = tokens.ledger.stamp
    RevokedTokens(path).revoke("a", 1)
    after = tokens.ledger.stamp
    assert after != before
    RevokedTokens(path).revoke("a", 2)
    assert tokens.ledger.stamp == after


@pytest.mark.parametrize("content", ["no entry\n", "[]\n", "{}\n", '{"jti":1}\n', '{"jti":null}\n'])
def test_a_damaged_list_is_an_error_and_never_an_empty_one(path: Path, content: str) -> None:
    path.write_text(content)
    tokens = RevokedTokens(path)
    with pytest.raises(LedgerError, match=path.name):
        tokens.jtis()
    with pytest.raises(LedgerError, match=path.name):
        tokens.revoke("a", 1)
    assert path.read_text() == content


@pytest.mark.parametrize("text", ["01m7xw30dc", "a b/+=:", "x" * 128])
def test_a_jti_is_printable_ascii(text: str) -> None:
    assert is_jti(text)


@pytest.mark.parametrize("text", ["", "x" * 129, "a\n", "\x1b[31m", "caf\xe9", "\udce9"])
def test_other_text_is_no_jti(text: str) -> None:
    assert not is_jti(text)
