"""Uses and revocations of join tokens, as the relays of a fleet have them: none of them tells a token."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.state.join_tokens import MAX_TTL_S, JoinRefusedError, JoinState, JoinTokens, digest_of
from schemas.keys import base64url
from tests.fakes.clock import FakeClock
from tests.fakes.shared import shared
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedCa

ROOT = SimulatedCa().root_pem
NONE: frozenset[str] = frozenset()
HOUR_S = 3600


@dataclass
class Side:
    """A relay's file of join tokens, as far as it is shared."""

    path: Path
    clock: FakeClock

    def __post_init__(self) -> None:
        self.tokens = JoinTokens(self.path, self.clock, os.urandom)
        self.uses = shared("join_token_use", self.tokens.ledger, self.clock, issues=True)
        self.revocations = shared("join_token_revocation", self.tokens.ledger, self.clock)

    def token(self, uses: int = 1) -> str:
        """Make a token; return its id."""
        return self.tokens.create(TENANT, HOUR_S, uses, ROOT).id

    def used(self, join_id: str) -> int:
        (grant,) = [grant for grant in self.tokens.all() if grant.id == join_id]
        return grant.used


@pytest.fixture
def one(tmp_path: Path) -> Side:
    return Side(tmp_path / "one.jsonl", FakeClock(NOW_MS))


def restored(one: Side) -> Side:
    """Return another relay that has the file as it is now."""
    shutil.copy2(one.path, path := one.path.with_name("restored.jsonl"))
    return Side(path, one.clock)


def test_a_use_is_shared_until_the_token_expires_and_a_revocation_until_any_would_without_the_token(
    one: Side,
) -> None:
    token = one.tokens.create(TENANT, HOUR_S, 2, ROOT)
    one.tokens.spend(token.id, NODE_ID)
    ((key, use),) = one.uses.settle({}, NONE).items()
    assert (use["node_id"], one.uses.form.end_ms_of(use)) == (NODE_ID, NOW_MS + HOUR_S * 1000)
    # It comes back, and is the one that was spent.
    assert one.uses.settle({key: use}, frozenset({key})) == {}
    assert one.used(token.id) == 1
    one.tokens.revoke(token.id)
    (revocation,) = one.revocations.settle({}, NONE).values()
    assert one.revocations.form.end_ms_of(revocation) == NOW_MS + MAX_TTL_S * 1000
    for secret in (token.id, token.key.hex(), base64url(token.key)):
        assert secret not in repr((use, revocation))


def test_a_token_is_revoked_by_a_relay_that_does_not_have_it(one: Side, tmp_path: Path) -> None:
    join_id, other = one.token(), Side(tmp_path / "other.jsonl", one.clock)
    other.tokens.revoke(join_id, made_here=False)
    entries = other.revocations.settle({}, NONE)
    assert one.revocations.settle(entries, frozenset(entries)) == {}
    assert one.tokens.find(join_id) is None


def test_a_file_of_an_older_backup_learns_what_was_revoked_since(one: Side) -> None:
    before = one.token()
    older = restored(one)
    since = one.token()
    for join_id in (before, since):
        one.tokens.revoke(join_id)
    entries = one.revocations.settle({}, NONE)
    assert older.revocations.settle(entries, frozenset(entries)) == {}
    assert older.tokens.find(before) is None
    assert older.tokens.ledger.read().revoked.keys() == {digest_of(before), digest_of(since)}


def test_what_was_used_elsewhere_is_used_here_and_admits_no_node(one: Side) -> None:
    join_id = one.token()
    other = restored(one)
    one.tokens.spend(join_id, NODE_ID)
    entries = one.uses.settle({}, NONE)
    other.uses.settle(entries, frozenset(entries))
    (grant,) = other.tokens.all()
    assert grant.state(NOW_MS) is JoinState.USED_UP
    for node_id in (NODE_ID, OTHER_NODE_ID):
        with pytest.raises(JoinRefusedError):
            other.tokens.spend(join_id, node_id)


@pytest.mark.parametrize("uses", [1, 2])
def test_of_two_nodes_that_were_given_one_use_the_second_gets_a_free_one_if_there_is_one(
    one: Side, uses: int
) -> None:
    join_id = one.token(uses)
    other = restored(one)
    one.tokens.spend(join_id, NODE_ID)
    other.tokens.spend(join_id, OTHER_NODE_ID)
    first, refused = one.uses.settle({}, NONE), other.uses.settle({}, NONE)
    assert first.keys() == refused.keys()
    second = other.uses.settle(first, frozenset(first))
    assert [(use["use"], use["node_id"]) for use in second.values()] == [(2, OTHER_NODE_ID)][: uses - 1]
    one.uses.settle(second, frozenset({*first, *second}))
    assert (one.used(join_id), other.used(join_id)) == (uses, 2)


def test_uses_of_unknown_expired_and_revoked_tokens_and_those_beyond_its_number_are_nothing_to_a_relay(
    one: Side,
) -> None:
    before = one.token()
    other = restored(one)
    later, revoked = one.token(), one.token()
    for join_id in (before, later, revoked):
        one.tokens.spend(join_id, NODE_ID)
    one.tokens.revoke(revoked)
    entries = one.uses.settle({}, NONE)
    assert len(entries) == 2
    beyond = [entry | {"use": 2} for entry in entries.values()]
    other.uses.settle({other.uses.form.key_of(entry): entry for entry in beyond}, NONE)
    assert other.used(before) == 0
    other.uses.settle(entries, frozenset(entries))
    assert [grant.used for grant in other.tokens.all()] == [1]
    one.clock.advance(HOUR_S * 1000)
    assert one.uses.settle({}, NONE) == {}
