"""Manifests that wait for their leaf."""

from relay.fleet.pending_manifests import PARKED_FOR_MS, PendingManifests
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID


def test_what_waits_is_taken_once() -> None:
    parking = PendingManifests(list[str]().append)
    assert parking.put(NODE_ID, b"wire", NOW_MS)
    assert parking.take(OTHER_NODE_ID, NOW_MS) is None
    assert parking.take(NODE_ID, NOW_MS + PARKED_FOR_MS - 1) == b"wire"
    assert parking.take(NODE_ID, NOW_MS) is None


def test_of_one_node_the_newest_waits() -> None:
    parking = PendingManifests(list[str]().append)
    parking.put(NODE_ID, b"old", NOW_MS)
    parking.put(NODE_ID, b"new", NOW_MS)
    assert parking.take(NODE_ID, NOW_MS) == b"new"


def test_what_has_waited_too_long_is_gone() -> None:
    parking = PendingManifests(list[str]().append)
    parking.put(NODE_ID, b"wire", NOW_MS)
    assert parking.take(NODE_ID, NOW_MS + PARKED_FOR_MS) is None


def test_memory_is_bounded_and_given_back() -> None:
    parking = PendingManifests(list[str]().append, max_bytes=10)
    assert parking.put(NODE_ID, b"x" * 10, NOW_MS)
    assert not parking.put(OTHER_NODE_ID, b"y", NOW_MS)
    # In the place of its own there is room for as much.
    assert parking.put(NODE_ID, b"z" * 10, NOW_MS)
    parking.sweep(NOW_MS + PARKED_FOR_MS - 1)
    assert not parking.put(OTHER_NODE_ID, b"y", NOW_MS)
    parking.sweep(NOW_MS + PARKED_FOR_MS)
    assert parking.put(OTHER_NODE_ID, b"y" * 10, NOW_MS)
    parking.take(OTHER_NODE_ID, NOW_MS)
    assert parking.put(NODE_ID, b"x" * 10, NOW_MS)


def test_of_what_its_leaf_never_came_for_the_node_is_told() -> None:
    given_up: list[str] = []
    parking = PendingManifests(given_up.append, max_bytes=10)
    parking.put(NODE_ID, b"old", NOW_MS)
    parking.put(NODE_ID, b"old", NOW_MS)
    assert given_up == []
    parking.put(NODE_ID, b"new", NOW_MS)
    assert given_up == [NODE_ID]
    parking.put(OTHER_NODE_ID, b"too large for it", NOW_MS)
    assert given_up == [NODE_ID, OTHER_NODE_ID]
    parking.sweep(NOW_MS + PARKED_FOR_MS)
    assert given_up == [NODE_ID, OTHER_NODE_ID, NODE_ID]
    parking.put(NODE_ID, b"late", NOW_MS)
    assert parking.take(NODE_ID, NOW_MS + PARKED_FOR_MS) is None
    assert given_up == [NODE_ID, OTHER_NODE_ID, NODE_ID, NODE_ID]
