import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.state.join_tokens import JoinRefusedError, JoinState, JoinTokens
from relay.state.merging import AT_ONCE
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
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
    issues: bool = True

    def __post_init__(self) -> None:
        self.tokens = JoinTokens(self.path, self.clock, os.urandom)
        self.shared = shared("join_token_use", self.tokens.ledger, self.clock, issues=self.issues)

    def token(self, uses: int = 1) -> str:
        """Make a token; return its id."""
        return self.tokens.create(TENANT, HOUR_S, uses, ROOT).id

    def restored(self, path: Path) -> "Side":
        """Return another relay that has the file as it is now."""
        shutil.copy2(self.path, path)
        return Side(path, self.clock)

    def used(self, join_id: str) -> int:
        (grant,) = [grant for grant in self.tokens.all() if grant.id == join_id]
        return grant.used


@pytest.fixture
def one(tmp_path: Path) -> Side:
    return Side(tmp_path / "one.jsonl", FakeClock(NOW_MS))


def test_a_use_is_shared_until_it_is_known_without_the_token(one: Side, registry: SchemaRegistry) -> None:
    token = one.tokens.create(TENANT, HOUR_S, 2, ROOT)
    assert one.shared.settle({}, NONE) == {}
    one.tokens.spend(token.id, NODE_ID)
    ((key, entry),) = one.shared.settle({}, NONE).items()
    assert registry.load("cluster.join_token_use@1.0.0").is_valid(entry)
    assert key == one.shared.form.key_of(entry)
    assert entry["node_id"] == NODE_ID
    assert one.shared.form.end_ms_of(entry) == NOW_MS + HOUR_S * 1000
    for secret in (token.id, token.key.hex(), base64url(token.key)):
        assert secret not in repr(entry)
    # It comes back, and is the one that was spent.
    assert one.shared.settle({key: entry}, frozenset({key})) == {}
    assert one.shared.settle({}, NONE) == {key: entry}
    assert one.used(token.id) == 1
    lines = one.path.read_bytes()
    one.shared.settle({key: entry}, frozenset({key}))
    assert one.path.read_bytes() == lines


def test_what_was_used_elsewhere_is_used_here_and_admits_no_node(one: Side, tmp_path: Path) -> None:
    join_id = one.token()
    restored = one.restored(tmp_path / "restored.jsonl")
    one.tokens.spend(join_id, NODE_ID)
    entries = one.shared.settle({}, NONE)
    restored.shared.settle(entries, frozenset(entries))
    (grant,) = restored.tokens.all()
    assert grant.state(NOW_MS) is JoinState.USED_UP
    for node_id in (NODE_ID, OTHER_NODE_ID):
        with pytest.raises(JoinRefusedError):
            restored.tokens.spend(join_id, node_id)


def test_of_two_nodes_that_were_given_one_use_the_second_gets_a_free_one(one: Side, tmp_path: Path) -> None:
    join_id = one.token(uses=2)
    restored = one.restored(tmp_path / "restored.jsonl")
    one.tokens.spend(join_id, NODE_ID)
    restored.tokens.spend(join_id, OTHER_NODE_ID)
    first, refused = one.shared.settle({}, NONE), restored.shared.settle({}, NONE)
    assert first.keys() == refused.keys()
    ((key, entry),) = restored.shared.settle(first, frozenset(first)).items()
    assert (entry["use"], entry["node_id"]) == (2, OTHER_NODE_ID)
    one.shared.settle({key: entry}, frozenset({*first, key}))
    assert [side.used(join_id) for side in (one, restored)] == [2, 2]


def test_where_no_use_is_free_none_is_shared(one: Side, tmp_path: Path) -> None:
    join_id = one.token()
    restored = one.restored(tmp_path / "restored.jsonl")
    one.tokens.spend(join_id, NODE_ID)
    restored.tokens.spend(join_id, OTHER_NODE_ID)
    first = one.shared.settle({}, NONE)
    assert restored.shared.settle(first, frozenset(first)) == {}
    assert restored.used(join_id) == 2


def test_uses_of_unknown_expired_and_revoked_tokens_are_nothing_to_a_relay(one: Side, tmp_path: Path) -> None:
    before = one.token()
    restored = one.restored(tmp_path / "restored.jsonl")
    later, revoked = one.token(), one.token()
    for join_id in (before, later, revoked):
        one.tokens.spend(join_id, NODE_ID)
    one.tokens.revoke(revoked)
    entries = one.shared.settle({}, NONE)
    assert len(entries) == 2
    restored.shared.settle(entries, frozenset(entries))
    assert [grant.used for grant in restored.tokens.all()] == [1]
    one.clock.advance(HOUR_S * 1000)
    assert one.shared.settle({}, NONE) == {}


def test_a_use_that_a_token_does_not_have_is_nothing_to_a_relay(one: Side, tmp_path: Path) -> None:
    join_id = one.token()
    restored = one.restored(tmp_path / "restored.jsonl")
    one.tokens.spend(join_id, NODE_ID)
    (entry,) = one.shared.settle({}, NONE).values()
    other = entry | {"use": 2}
    restored.shared.settle({restored.shared.form.key_of(other): other}, NONE)
    assert restored.used(join_id) == 0


def test_a_relay_without_the_cas_key_takes_and_shares_none(one: Side, tmp_path: Path) -> None:
    join_id = one.token()
    one.tokens.spend(join_id, NODE_ID)
    entries = one.shared.settle({}, NONE)
    other = Side(tmp_path / "other.jsonl", FakeClock(NOW_MS), issues=False)
    assert other.shared.settle(entries, frozenset(entries)) == {}
    assert not other.path.exists()


def test_of_many_uses_some_are_shared_at_a_time(one: Side) -> None:
    join_id = one.token(uses=AT_ONCE + 1)
    for number in range(AT_ONCE + 1):
        one.tokens.spend(join_id, f"{number:026}")
    first = one.shared.settle({}, NONE)
    second = one.shared.settle(first, frozenset(first))
    assert (len(first), len(second)) == (AT_ONCE, 1)
