from pathlib import Path

import pytest

from relay.state.merging import AT_ONCE, SharedLedger
from relay.state.tokens import RevokedTokens
from schemas.registry import SchemaRegistry
from tests.fakes.shared import shared as shared_ledger
from tests.fakes.signer import NOW_MS

FOREIGN = "any text: of another issuer. *>"
ENTRY = {"jti": FOREIGN, "revoked_ms": NOW_MS}


@pytest.fixture
def tokens(tmp_path: Path) -> RevokedTokens:
    return RevokedTokens(tmp_path / "revoked_tokens.jsonl")


@pytest.fixture
def shared(tokens: RevokedTokens) -> SharedLedger:
    return shared_ledger("token_revocation", tokens.ledger)


def test_what_was_revoked_here_is_shared_until_it_is_known(
    tokens: RevokedTokens, shared: SharedLedger, registry: SchemaRegistry
) -> None:
    assert shared.settle({}, frozenset()) == {}
    tokens.revoke(FOREIGN, NOW_MS)
    ((key, entry),) = shared.settle({}, frozenset()).items()
    assert entry == ENTRY
    assert registry.load("cluster.token_revocation@1.0.0").is_valid(entry)
    assert key == shared.form.key_of(entry)
    assert key.isalnum()
    assert shared.settle({}, frozenset({key})) == {}


def test_what_was_revoked_elsewhere_is_revoked_here_once(tmp_path: Path, shared: SharedLedger) -> None:
    key = shared.form.key_of(ENTRY)
    for _ in range(2):
        assert shared.settle({key: ENTRY}, frozenset({key})) == {}
    assert len((tmp_path / "revoked_tokens.jsonl").read_text("ascii").splitlines()) == 1
    assert RevokedTokens(tmp_path / "revoked_tokens.jsonl").times() == {FOREIGN: NOW_MS}


def test_of_many_revocations_some_are_shared_at_a_time(tokens: RevokedTokens, shared: SharedLedger) -> None:
    for number in range(AT_ONCE + 1):
        tokens.revoke(f"jti-{number}", NOW_MS)
    first = shared.settle({}, frozenset())
    second = shared.settle({}, frozenset(first))
    assert (len(first), len(second)) == (AT_ONCE, 1)
    assert not first.keys() & second.keys()


def test_what_can_be_no_jti_has_no_key(shared: SharedLedger) -> None:
    with pytest.raises(ValueError, match="not a jti"):
        shared.form.key_of({"jti": "line\n", "revoked_ms": NOW_MS})
