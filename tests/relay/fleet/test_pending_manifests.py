"""Manifests that wait for their leaf."""

from relay.fleet.inventory import PENDING_FOR_MS, PendingManifests
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID


def test_what_waits_is_taken_once() -> None:
    manifests = PendingManifests(list[str]().append)
    assert manifests.put(NODE_ID, b"wire", NOW_MS)
    assert manifests.take(OTHER_NODE_ID, NOW_MS) is None
    assert manifests.take(NODE_ID, NOW_MS + PENDING_FOR_MS - 1) == b"wire"
    assert manifests.take(NODE_ID, NOW_MS) is None


def test_of_one_node_the_newest_waits() -> None:
    manifests = PendingManifests(list[str]().append)
    manifests.put(NODE_ID, b"old", NOW_MS)
    manifests.put(NODE_ID, b"new", NOW_MS)
    assert manifests.take(NODE_ID, NOW_MS) == b"new"


def test_what_has_waited_too_long_is_gone() -> None:
    manifests = PendingManifests(list[str]().append)
    manifests.put(NODE_ID, b"wire", NOW_MS)
    assert manifests.take(NODE_ID, NOW_MS + PENDING_FOR_MS) is None


def test_memory_is_bounded_and_given_back() -> None:
    manifests = PendingManifests(list[str]().append, max_bytes=10)
    assert manifests.put(NODE_ID, b"x" * 10, NOW_MS)
    assert not manifests.put(OTHER_NODE_ID, b"y", NOW_MS)
    # In place of its own, as much fits.
    assert manifests.put(NODE_ID, b"z" * 10, NOW_MS)
    manifests.sweep(NOW_MS + PENDING_FOR_MS - 1)
    assert not manifests.put(OTHER_NODE_ID, b"y", NOW_MS)
    manifests.sweep(NOW_MS + PENDING_FOR_MS)
    assert manifests.put(OTHER_NODE_ID, b"y" * 10, NOW_MS)
    manifests.take(OTHER_NODE_ID, NOW_MS)
    assert manifests.put(NODE_ID, b"x" * 10, NOW_MS)


def test_of_what_its_leaf_never_came_for_the_node_is_told() -> None:
    dropped: list[str] = []
    manifests = PendingManifests(dropped.append, max_bytes=10)
    manifests.put(NODE_ID, b"old", NOW_MS)
    manifests.put(NODE_ID, b"old", NOW_MS)
    assert dropped == []
    manifests.put(NODE_ID, b"new", NOW_MS)
    assert dropped == [NODE_ID]
    manifests.put(OTHER_NODE_ID, b"too large for it", NOW_MS)
    assert dropped == [NODE_ID, OTHER_NODE_ID]
    manifests.sweep(NOW_MS + PENDING_FOR_MS)
    assert dropped == [NODE_ID, OTHER_NODE_ID, NODE_ID]
    manifests.put(NODE_ID, b"late", NOW_MS)
    assert manifests.take(NODE_ID, NOW_MS + PENDING_FOR_MS) is None
    assert dropped == [NODE_ID, OTHER_NODE_ID, NODE_ID, NODE_ID]
