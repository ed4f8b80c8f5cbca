"""What the node is sent when relays lease it one after the other, on a clock that the test moves."""

import pytest

from relay.cluster.shared_leases import SharedLeases
from schemas.errors import Failure, ToolError
from schemas.payloads import TelemetryLease
from schemas.ulids import UlidSource
from tests.fakes.cluster import HeldNodes
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID

CAP_ID = "metrics"


class Stage:
    """One node, which is connected, and the leases that it is sent."""

    def __init__(self) -> None:
        self.seconds = Seconds()
        self.nodes = HeldNodes(UlidSource(lambda: 0, bytes))
        self.nodes.connect(NODE_ID)
        self.leases = SharedLeases(self.nodes, self.seconds)

    def ask(self, relay: str, interval_ms: int, ttl_s: int = 30, include: list[str] | None = None) -> None:
        lease: TelemetryLease = {"cap_id": CAP_ID, "interval_ms": interval_ms, "ttl_ms": ttl_s * 1000}
        if include is not None:
            lease["include"] = include
        self.leases.ask(relay, NODE_ID, lease)

    def sent(self) -> list[tuple[int, int, list[str] | None]]:
        """Return interval, seconds and parts of what was sent since the last time."""
        found, self.nodes.sent = self.nodes.sent, []
        return [
            (lease["interval_ms"], round(lease["ttl_ms"] / 1000), lease.get("include"))
            for _, _, lease in found
        ]


@pytest.fixture
def stage() -> Stage:
    return Stage()


def test_the_shortest_interval_and_all_parts_are_sent_for_as_long_as_the_longest_lease(stage: Stage) -> None:
    stage.ask("A", 60_000, 180, ["cpu"])
    stage.ask("B", 1000, 30, ["mem"])
    stage.ask("C", 5000)
    assert stage.sent() == [
        (60_000, 180, ["cpu"]),
        (1000, 180, ["cpu", "mem"]),
        (1000, 180, None),
    ]


def test_a_lease_that_has_lapsed_counts_no_more(stage: Stage) -> None:
    stage.ask("A", 60_000, 180)
    stage.ask("B", 1000)
    stage.seconds.now += 31
    assert list(stage.leases.relays_of(NODE_ID, CAP_ID)) == ["A"]
    stage.ask("A", 60_000, 180)
    assert stage.sent()[-1] == (60_000, 180, None)


def test_the_last_that_ends_ends_the_nodes(stage: Stage) -> None:
    stage.ask("A", 1000)
    stage.ask("B", 1000)
    stage.ask("A", 1000, 0)
    stage.leases.relay_gone("B")
    assert stage.sent()[2:] == [(1000, 30, None), (1000, 0, None)]
    stage.ask("B", 1000, 0)  # told again: the node may not have been told
    assert stage.sent() == [(1000, 0, None)]


def test_what_was_not_sent_is_as_if_it_had_not_been_asked(stage: Stage) -> None:
    stage.ask("A", 5000)
    stage.nodes.refusals = [ToolError(Failure.RATE_LIMITED), ToolError(Failure.RATE_LIMITED)]
    for relay in ("A", "B"):
        with pytest.raises(ToolError):
            stage.ask(relay, 1000)
    stage.ask("C", 10_000)
    assert stage.sent() == [(5000, 30, None), (5000, 30, None)]
    assert set(stage.leases.relays_of(NODE_ID, CAP_ID)) == {"A", "C"}


def test_an_end_that_was_not_sent_is_an_end(stage: Stage) -> None:
    stage.ask("A", 5000)
    stage.nodes.refusals = [ToolError(Failure.RATE_LIMITED)]
    with pytest.raises(ToolError):
        stage.ask("A", 5000, 0)
    assert not stage.leases.relays_of(NODE_ID, CAP_ID)


def test_a_node_that_connects_has_no_lease(stage: Stage) -> None:
    stage.ask("A", 1000)
    stage.leases.node_changed(NODE_ID)
    assert not stage.leases.relays_of(NODE_ID, CAP_ID)
