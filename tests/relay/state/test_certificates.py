from dataclasses import replace
from typing import Any

import pytest

from relay.state.certificates import CaRecords, IssuedLeaf, IssuedServer, rotation
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID

LEAF = IssuedLeaf(NODE_ID, "acme", "a" * 64, bytes(32), 2**127 + 1, NOW_MS + DAY_MS, NOW_MS, None)
NEWER = replace(LEAF, kid="b" * 64, serial=2, join_id="the join token")
OTHER = replace(LEAF, node_id=OTHER_NODE_ID, kid="a" * 16 + "c" * 48, serial=3)
SERVER = IssuedServer("mqtt.example", "d" * 64, 4, NOW_MS + DAY_MS, NOW_MS)


def revocation(kid: str) -> dict[str, Any]:
    return {"action": "revoke", "ts_ms": NOW_MS, "node_id": NODE_ID, "kid": kid, "reason": "stolen"}


def records(*entries: IssuedLeaf | IssuedServer | dict[str, Any]) -> CaRecords:
    return CaRecords(entry if isinstance(entry, dict) else entry.entry() for entry in entries)


@pytest.mark.parametrize("issued", [LEAF, NEWER, SERVER])
def test_a_record_is_read_back_as_it_was(issued: IssuedLeaf | IssuedServer) -> None:
    assert records(issued).issued == {issued.kid: issued}


def test_a_serial_number_is_written_so_that_every_program_can_read_it() -> None:
    assert LEAF.entry()["serial"] == "8" + "0" * 30 + "1"


def test_the_newest_unrevoked_leaf_is_in_force() -> None:
    assert records(LEAF, NEWER, OTHER, SERVER).in_force() == {NODE_ID: NEWER, OTHER_NODE_ID: OTHER}
    assert records(LEAF, NEWER, revocation(NEWER.kid)).in_force() == {NODE_ID: LEAF}
    revoked = records(LEAF, revocation(LEAF.kid))
    assert revoked.in_force() == {}
    assert revoked.was_issued(NODE_ID)
    assert not revoked.was_issued(OTHER_NODE_ID)


def test_a_revocation_is_final_wherever_it_is_in_the_ledger() -> None:
    assert records(revocation(LEAF.kid), LEAF).in_force() == {}
    assert records(LEAF, revocation(LEAF.kid), LEAF).in_force() == {}
    assert records(revocation("f" * 64)).revoked == {"f" * 64: NOW_MS}


def test_what_is_named_by_node_or_kid_is_what_can_be_revoked() -> None:
    all_of_them = records(LEAF, NEWER, OTHER, SERVER, revocation(NEWER.kid))
    assert all_of_them.find(NODE_ID) == [LEAF]
    assert all_of_them.find(LEAF.kid) == [LEAF]
    assert all_of_them.find(NEWER.kid) == []
    assert all_of_them.find(SERVER.kid[:16]) == [SERVER]
    assert all_of_them.find(SERVER.name) is None


def test_a_beginning_that_two_kids_share_names_neither() -> None:
    assert records(LEAF, OTHER).find("a" * 16) is None
    assert records(LEAF, OTHER).find("a" * 17) == [LEAF]


def test_the_revoked_serials_are_those_on_record() -> None:
    first_version = {name: value for name, value in OTHER.entry().items() if name != "serial"}
    all_of_them = records(LEAF, SERVER, first_version, *map(revocation, (LEAF.kid, OTHER.kid, "f" * 64)))
    assert all_of_them.revoked_serials() == [LEAF.serial]


def test_a_state_is_one_word_or_two() -> None:
    known = records(LEAF, NEWER, revocation(LEAF.kid))
    assert known.state(LEAF, NOW_MS) == known.state(LEAF, LEAF.not_after_ms) == "revoked"
    assert known.state(NEWER, NEWER.not_after_ms - 1) == "in force"
    assert known.state(NEWER, NEWER.not_after_ms) == "expired"


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"action": None}, id="no action"),
        pytest.param({"action": "unrevoke", "kid": LEAF.kid}, id="an unknown action"),
        pytest.param({**LEAF.entry(), "public_key": "xy"}, id="no hex"),
        pytest.param({**LEAF.entry(), "public_key": 7}, id="no text"),
        pytest.param({**LEAF.entry(), "serial": 7}, id="a serial that is a number"),
        pytest.param({**LEAF.entry(), "not_after_ms": None}, id="no end"),
        pytest.param({"action": "revoke", "ts_ms": NOW_MS}, id="no kid"),
    ],
)
def test_an_entry_that_is_none_is_an_error(entry: dict[str, Any]) -> None:
    with pytest.raises((KeyError, ValueError, TypeError, AttributeError)):
        records(LEAF, entry)


def test_what_a_copy_takes_in_does_not_show_in_the_original() -> None:
    original = records(LEAF)
    other = original.copy()
    for entry in (NEWER.entry(), SERVER.entry(), revocation(LEAF.kid)):
        other.apply(entry)
    assert (original.issued, original.revoked, original.unrevoked(NODE_ID)) == ({LEAF.kid: LEAF}, {}, [LEAF])
    assert other.unrevoked(NODE_ID) == [NEWER]


def test_what_programs_get_names_holder_and_times_and_no_key() -> None:
    times = {"issued_ms": NOW_MS, "not_after_ms": NOW_MS + DAY_MS}
    join = {"tenant": "acme", "join_id": "the join token"}
    assert NEWER.facts() == {"node_id": NODE_ID, "kid": NEWER.kid, **times, **join}
    assert SERVER.facts() == {"name": "mqtt.example", "kid": SERVER.kid, **times}
    assert (LEAF.name, LEAF.tenant) == (NODE_ID, "acme")
    assert (SERVER.name, SERVER.tenant) == ("mqtt.example", None)


def test_the_tenant_of_a_node_is_that_of_its_newest_leaf_revoked_or_not() -> None:
    moved = replace(NEWER, tenant="globex")
    assert records(LEAF, moved, revocation(moved.kid)).tenant_of(NODE_ID) == "globex"
    assert records(LEAF).tenant_of(OTHER_NODE_ID) is None


def test_a_leaf_for_another_tenant_than_the_one_before_it_has_moved() -> None:
    moved = replace(NEWER, tenant="globex")
    assert records(LEAF, OTHER, moved).moved_leaves() == {moved.kid: moved}
    assert records(LEAF, NEWER, OTHER).moved_leaves() == {}


def test_a_rotation_changes_no_certificate() -> None:
    entry = rotation("new", "old", NOW_MS + DAY_MS, NOW_MS)
    assert entry["action"] == "rotate"
    assert records(LEAF, entry).issued == {LEAF.kid: LEAF}


def test_a_node_is_retired_while_all_its_leaves_are_revoked() -> None:
    assert (
        records(LEAF, NEWER, OTHER, revocation(LEAF.kid), revocation(SERVER.kid), SERVER).retired_nodes()
        == set()
    )
    assert records(LEAF, NEWER, revocation(LEAF.kid), revocation(NEWER.kid)).retired_nodes() == {NODE_ID}
    assert records(LEAF, revocation(LEAF.kid), NEWER).retired_nodes() == set()


def test_every_node_has_the_tenant_of_its_newest_leaf() -> None:
    moved = replace(NEWER, tenant="globex")
    assert records(LEAF, OTHER, moved).tenants() == {NODE_ID: "globex", OTHER_NODE_ID: "acme"}
    assert list(records(LEAF, OTHER, moved).leaves_of(NODE_ID)) == [LEAF, moved]
    assert list(records(LEAF).leaves_of(OTHER_NODE_ID)) == []
