import os
import shutil
from pathlib import Path

import pytest

from relay.state.join_tokens import MAX_TTL_S, JoinTokens, digest_of
from relay.state.merging import AT_ONCE, SharedLedger
from schemas.enrolment import JoinToken
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.shared import shared as shared_ledger
from tests.fakes.signer import NOW_MS, TENANT, SimulatedCa

ROOT = SimulatedCa().root_pem
NONE: frozenset[str] = frozenset()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "join_tokens.jsonl"


@pytest.fixture
def tokens(path: Path) -> JoinTokens:
    return tokens_in(path)


@pytest.fixture
def shared(tokens: JoinTokens) -> SharedLedger:
    return revocations(tokens)


def revocations(tokens: JoinTokens, clock: FakeClock | None = None) -> SharedLedger:
    return shared_ledger("join_token_revocation", tokens.ledger, clock or FakeClock(NOW_MS))


def tokens_in(path: Path) -> JoinTokens:
    return JoinTokens(path, FakeClock(NOW_MS), os.urandom)


def made(tokens: JoinTokens) -> JoinToken:
    return tokens.create(TENANT, 3600, 1, ROOT)


def test_what_was_revoked_here_is_shared_until_it_is_known_without_the_token(
    tokens: JoinTokens, shared: SharedLedger, registry: SchemaRegistry
) -> None:
    token = made(tokens)
    assert shared.settle({}, NONE) == {}
    tokens.revoke(token.id)
    ((key, entry),) = shared.settle({}, NONE).items()
    assert registry.load("cluster.join_token_revocation@1.0.0").is_valid(entry)
    assert key == shared.form.key_of(entry)
    for secret in (token.id, token.key.hex(), base64url(token.key)):
        assert secret not in repr(entry)
    assert shared.settle({key: entry}, frozenset({key})) == {}


def test_a_token_is_revoked_by_a_relay_that_does_not_have_it(tokens: JoinTokens, tmp_path: Path) -> None:
    token = made(tokens)
    other = tokens_in(tmp_path / "other.jsonl")
    other.revoke(token.id, made_here=False)
    entries = revocations(other).settle({}, NONE)
    assert revocations(tokens).settle(entries, frozenset(entries)) == {}
    assert tokens.find(token.id) is None


def test_a_file_of_an_older_backup_learns_what_was_revoked_since(
    tokens: JoinTokens, shared: SharedLedger, path: Path, tmp_path: Path
) -> None:
    before = made(tokens)
    older = tmp_path / "older.jsonl"
    shutil.copy2(path, older)
    since = made(tokens)
    for token in (before, since):
        tokens.revoke(token.id)
    entries = shared.settle({}, NONE)
    restored = tokens_in(older)
    for _ in range(2):
        assert revocations(restored).settle(entries, frozenset(entries)) == {}
    assert restored.find(before.id) is None
    assert restored.ledger.read().revoked.keys() == {digest_of(before.id), digest_of(since.id)}
    # The servers have lost the stream.
    assert revocations(restored).settle({}, NONE) == entries


def test_of_many_revocations_some_are_shared_at_a_time(tokens: JoinTokens, shared: SharedLedger) -> None:
    for number in range(AT_ONCE + 1):
        tokens.revoke(f"{number:026}", made_here=False)
    first = shared.settle({}, NONE)
    second = shared.settle({}, frozenset(first))
    assert (len(first), len(second)) == (AT_ONCE, 1)
    assert not first.keys() & second.keys()


def test_a_revocation_is_shared_until_no_token_from_before_it_is_good(tokens: JoinTokens) -> None:
    clock = FakeClock(NOW_MS)
    shared = revocations(tokens, clock)
    tokens.revoke(made(tokens).id)
    ((key, entry),) = shared.settle({}, NONE).items()
    clock.advance(MAX_TTL_S * 1000)
    assert shared.form.end_ms_of(entry) == clock()
    assert shared.settle({}, NONE) == {}
    assert key in tokens.ledger.read().revoked
