import json
import os
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from relay.state.join_tokens import JoinError, JoinRefusedError, JoinState, JoinTokens, digest_of
from relay.state.ledger import LedgerError
from schemas.enrolment import JoinToken
from schemas.identity import first_certificate_in
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa

ROOT = SimulatedCa().root_pem
HOUR_S = 3600
UNKNOWN = "01HZX9K3M4P7Q8R9S0T1V2W3XY"
BOUND_S = 60


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "join_tokens.jsonl"


@pytest.fixture
def tokens(path: Path, clock: FakeClock) -> JoinTokens:
    return JoinTokens(path, clock, os.urandom)


# --- making -------------------------------------------------------------------------------------------


def test_a_token_names_the_root_and_is_found_by_its_id(tokens: JoinTokens) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    assert JoinToken.parse(token.text()) == token
    assert token.fingerprint == sha256(first_certificate_in(ROOT)).digest()
    grant = tokens.find(token.id)
    assert grant is not None
    assert (grant.key, grant.tenant, grant.uses) == (token.key, "acme", 1)
    assert grant.expires_at_ms == NOW_MS + HOUR_S * 1000


def test_no_two_tokens_are_alike(tokens: JoinTokens) -> None:
    made = [tokens.create("acme", HOUR_S, 1, ROOT) for _ in range(3)]
    assert len({token.id for token in made}) == len({token.key for token in made}) == 3


@pytest.mark.parametrize(("ttl_s", "uses"), [(1, 1), (30 * 86_400, 10_000)])
def test_the_bounds_are_allowed(tokens: JoinTokens, ttl_s: int, uses: int) -> None:
    assert tokens.find(tokens.create("acme", ttl_s, uses, ROOT).id) is not None


@pytest.mark.parametrize(
    ("tenant", "ttl_s", "uses"),
    [
        pytest.param("acme", 0, 1, id="no time"),
        pytest.param("acme", -1, 1, id="time that has passed"),
        pytest.param("acme", 30 * 86_400 + 1, 1, id="more than 30 days"),
        pytest.param("acme", HOUR_S, 0, id="no node"),
        pytest.param("acme", HOUR_S, 10_001, id="too many nodes"),
        pytest.param("", HOUR_S, 1, id="no tenant"),
        pytest.param("Acme", HOUR_S, 1, id="no tenant's name"),
        pytest.param("acme\n", HOUR_S, 1, id="a line feed"),
        pytest.param("unenrolled", HOUR_S, 1, id="the tenant of who has none"),
        pytest.param("\x1b[31m", HOUR_S, 1, id="control characters"),
    ],
)
def test_a_token_out_of_bounds_is_not_made(
    tokens: JoinTokens, path: Path, tenant: str, ttl_s: int, uses: int
) -> None:
    with pytest.raises(JoinError) as caught:
        tokens.create(tenant, ttl_s, uses, ROOT)
    assert str(caught.value).isprintable()
    assert not path.exists()


# --- spending -----------------------------------------------------------------------------------------


def test_a_token_for_one_node_is_used_up_by_one_that_may_come_again(tokens: JoinTokens) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    tokens.spend(token.id, NODE_ID)
    tokens.spend(token.id, NODE_ID)
    with pytest.raises(JoinRefusedError):
        tokens.spend(token.id, OTHER_NODE_ID)
    [grant] = tokens.all()
    assert grant.node_ids == (NODE_ID,)
    assert tokens.find(token.id) is not None


def test_a_token_counts_nodes_and_not_attempts(tokens: JoinTokens) -> None:
    token = tokens.create("acme", HOUR_S, 3, ROOT)
    for node_id in ("a", "b", "a", "c", "b", "a"):
        tokens.spend(token.id, node_id)
    with pytest.raises(JoinRefusedError):
        tokens.spend(token.id, "d")
    assert tokens.all()[0].node_ids == ("a", "b", "c")


def test_what_is_spent_on_one_token_is_not_spent_on_another(tokens: JoinTokens) -> None:
    first, second = (tokens.create("acme", HOUR_S, 1, ROOT) for _ in range(2))
    tokens.spend(first.id, NODE_ID)
    tokens.spend(second.id, OTHER_NODE_ID)
    assert [grant.node_ids for grant in tokens.all()] == [(NODE_ID,), (OTHER_NODE_ID,)]


def expire(tokens: JoinTokens, token: JoinToken, clock: FakeClock) -> None:
    assert tokens.find(token.id) is not None
    clock.advance(HOUR_S * 1000)


def revoke(tokens: JoinTokens, token: JoinToken, _: FakeClock) -> None:
    assert tokens.revoke(token.id)


@pytest.mark.parametrize("end", [expire, revoke])
@pytest.mark.parametrize("spent", [False, True])
def test_a_token_that_has_ended_is_neither_found_nor_spent(
    tokens: JoinTokens,
    clock: FakeClock,
    end: Callable[[JoinTokens, JoinToken, FakeClock], None],
    spent: bool,  # noqa: FBT001 - a column of the table
) -> None:
    token = tokens.create("acme", HOUR_S, 2, ROOT)
    if spent:
        tokens.spend(token.id, NODE_ID)
    end(tokens, token, clock)
    assert tokens.find(token.id) is None
    with pytest.raises(JoinRefusedError):
        tokens.spend(token.id, NODE_ID)
    assert tokens.all()[0].node_ids == ((NODE_ID,) if spent else ())


def test_a_token_is_good_until_its_last_millisecond(tokens: JoinTokens, clock: FakeClock) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    clock.advance(HOUR_S * 1000 - 1)
    assert tokens.find(token.id) is not None
    clock.advance(1)
    assert tokens.find(token.id) is None


def test_a_token_that_was_never_made_is_not_found(tokens: JoinTokens) -> None:
    tokens.create("acme", HOUR_S, 1, ROOT)
    assert tokens.find(UNKNOWN) is None
    with pytest.raises(JoinRefusedError):
        tokens.spend(UNKNOWN, NODE_ID)
    with pytest.raises(JoinError) as caught:
        tokens.revoke("\x1b[31m")
    assert str(caught.value).isprintable()


def test_revoking_twice_is_as_good_as_once(tokens: JoinTokens, path: Path) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    assert tokens.revoke(token.id)
    before = path.read_bytes()
    assert not tokens.revoke(token.id)
    assert path.read_bytes() == before


def test_a_token_of_another_relay_is_revoked_where_it_may_be_one(tokens: JoinTokens, path: Path) -> None:
    with pytest.raises(JoinError, match="there is no join token"):
        tokens.revoke(UNKNOWN)
    with pytest.raises(JoinError, match="not the id of a join token"):
        tokens.revoke(f"ekj1.{UNKNOWN}", made_here=False)
    assert not path.exists()
    assert tokens.revoke(UNKNOWN, made_here=False)
    assert not tokens.revoke(UNKNOWN, made_here=False)
    assert tokens.ledger.read().revoked == {digest_of(UNKNOWN): NOW_MS}
    assert tokens.all() == []


_SPENDER = """
import os
import sys
from pathlib import Path
from relay.state.join_tokens import JoinRefusedError, JoinTokens

path, token, own, now_ms = sys.argv[1:]
tokens = JoinTokens(Path(path), lambda: int(now_ms), os.urandom)
count = 0
for number in range(20):
    try:
        tokens.spend(token, f"{own}-{number}")
    except JoinRefusedError:
        continue
    count += 1
print(count)
"""


@pytest.mark.integration
def test_processes_that_spend_at_once_do_not_spend_more_than_there_is(tokens: JoinTokens, path: Path) -> None:
    token = tokens.create("acme", HOUR_S, 25, ROOT)
    command = [sys.executable, "-P", "-c", _SPENDER, str(path), token.id]
    processes = [
        subprocess.Popen([*command, name, str(NOW_MS)], stdout=subprocess.PIPE) for name in ("a", "b", "c")
    ]
    spent = [int(process.communicate(timeout=BOUND_S)[0]) for process in processes]
    assert sum(spent) == 25
    assert len(tokens.all()[0].node_ids) == len(set(tokens.all()[0].node_ids)) == 25


def test_a_full_disk_neither_makes_nor_spends(tokens: JoinTokens, path: Path) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    before = path.read_bytes()
    with full_disk(len(before) + 10):
        with pytest.raises(OSError, match=path.name):
            tokens.create("acme", HOUR_S, 1, ROOT)
        with pytest.raises(OSError, match=path.name):
            tokens.spend(token.id, NODE_ID)
    assert path.read_bytes() == before
    tokens.spend(token.id, OTHER_NODE_ID)


# --- looking ------------------------------------------------------------------------------------------


def test_the_state_of_a_token_is_what_has_become_of_it(tokens: JoinTokens, clock: FakeClock) -> None:
    made = [tokens.create("acme", ttl_s, 1, ROOT) for ttl_s in (HOUR_S, HOUR_S, HOUR_S, 1)]
    tokens.spend(made[1].id, NODE_ID)
    tokens.revoke(made[2].id)
    clock.advance(1000)
    states = [grant.state(clock()) for grant in tokens.all()]
    assert states == [JoinState.OPEN, JoinState.USED_UP, JoinState.REVOKED, JoinState.EXPIRED]


def test_nothing_that_is_shown_of_a_token_holds_its_key(tokens: JoinTokens) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    secret = token.text().split(".")[2]
    [grant] = tokens.all()
    shown = repr(grant) + json.dumps(grant.facts(NOW_MS))
    assert token.id in shown
    assert secret not in shown
    assert repr(token.key) not in shown
    assert token.key.hex() not in shown


# --- what can be wrong with the file ------------------------------------------------------------------


def damaged(entry: dict[str, Any], **members: object) -> str:
    return json.dumps({**entry, **members})


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda _: "damaged", id="no JSON"),
        pytest.param(lambda _: "{}", id="no action"),
        pytest.param(lambda entry: damaged(entry, action="extend"), id="an unknown action"),
        pytest.param(lambda entry: damaged(entry, key=""), id="an empty key"),
        pytest.param(lambda entry: damaged(entry, key="AA"), id="a short key"),
        pytest.param(lambda entry: damaged(entry, key=7), id="a key that is a number"),
        pytest.param(lambda entry: damaged(entry, uses=None), id="any number of nodes"),
        pytest.param(lambda entry: damaged(entry, expires_at_ms="never"), id="no end"),
        pytest.param(lambda _: json.dumps({"action": "revoke", "id": UNKNOWN}), id="another's end"),
        pytest.param(lambda _: json.dumps({"action": "revoke_other", "ts_ms": 0, "token": ""}), id="of none"),
    ],
)
def test_a_damaged_file_admits_no_node(
    tokens: JoinTokens, path: Path, damage: Callable[[dict[str, Any]], str]
) -> None:
    token = tokens.create("acme", HOUR_S, 1, ROOT)
    with path.open("a") as file:
        file.write(damage(json.loads(path.read_text())) + "\n")
    for use in (lambda: tokens.find(token.id), lambda: tokens.spend(token.id, NODE_ID), tokens.all):
        with pytest.raises(LedgerError, match=rf"{path.name} is damaged: line 2") as caught:
            use()
        assert token.text().split(".")[2] not in str(caught.value)
