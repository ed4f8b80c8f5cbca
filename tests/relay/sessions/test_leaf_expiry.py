from dataclasses import replace
from typing import Any

from relay.sessions.leaf_expiry import LeafExpiry
from relay.sessions.session import NodeSession
from tests.fakes.signer import NOW_MS, SimulatedCa, SimulatedNode

DAY_MS = 86_400_000


class Examined(dict[str, NodeSession]):
    """Sessions by node id, which count how often one is read."""

    def __init__(self, sessions: dict[str, NodeSession]) -> None:
        super().__init__(sessions)
        self.reads = 0

    def __getitem__(self, node_id: str) -> NodeSession:
        self.reads += 1
        return super().__getitem__(node_id)


def session_of(node: SimulatedNode) -> NodeSession:
    unused: Any = None
    return NodeSession("session", "boot", node.identity(), unused, unused)


def watched(*nodes: SimulatedNode) -> tuple[LeafExpiry, Examined]:
    expiry, sessions = LeafExpiry(), Examined({node.node_id: session_of(node) for node in nodes})
    for session in sessions.values():
        expiry.watch(session)
    return expiry, sessions


def test_a_leaf_that_has_expired_is_reported_once_it_has() -> None:
    node = SimulatedCa().issue()
    expiry, sessions = watched(node)
    ends_ms = node.identity().not_after_ms
    assert expiry.expired(sessions, ends_ms - 1) == []
    assert expiry.expired(sessions, ends_ms) == [node.node_id]


def test_no_session_is_examined_before_its_leaf_expires() -> None:
    ca = SimulatedCa()
    expiry, sessions = watched(*(ca.issue(f"01m7xw30dcjkqtrje56azxhj{index:02d}") for index in range(20)))
    for second in range(60):
        assert expiry.expired(sessions, NOW_MS + 1000 * second) == []
    assert sessions.reads == 0


def test_a_leaf_that_has_been_renewed_is_examined_when_the_old_one_expires_and_then_the_new_one() -> None:
    node = SimulatedCa().issue()
    expiry, sessions = watched(node)
    ends_ms = node.identity().not_after_ms
    sessions[node.node_id].identity = replace(node.identity(), not_after_ms=ends_ms + DAY_MS)
    assert expiry.expired(sessions, ends_ms) == []
    assert expiry.expired(sessions, ends_ms + DAY_MS) == [node.node_id]


def test_after_the_clock_was_set_back_a_leaf_that_is_not_valid_yet_is_reported() -> None:
    node = SimulatedCa().issue()
    expiry, sessions = watched(node)
    assert expiry.expired(sessions, NOW_MS) == []
    assert expiry.expired(sessions, node.identity().not_before_ms - 1) == [node.node_id]


def test_a_session_that_has_ended_is_not_reported() -> None:
    node = SimulatedCa().issue()
    expiry, sessions = watched(node)
    sessions.clear()
    assert expiry.expired(sessions, node.identity().not_after_ms) == []
