"""The history of a fleet is bounded, and says from when on it is complete."""

from relay.fleet.node_index import KEPT, FleetChange, FleetChanges, NodeChange


def test_changes_of_a_tenant_are_kept_in_order_and_the_oldest_is_dropped_first() -> None:
    changes = FleetChanges(started_ms=100)
    for number in range(KEPT + 2):
        changes.record("acme", FleetChange(1000 + number, f"node {number}", NodeChange.CAME))
    kept = changes.since("acme", 0)
    assert len(kept) == KEPT
    assert (kept[0].at_ms, kept[-1].at_ms) == (1002, 1001 + KEPT)
    assert changes.complete_since_ms("acme") == 1002
    assert changes.since("acme", 1001 + KEPT) == kept[-1:]


def test_a_tenant_without_changes_has_a_complete_and_empty_history() -> None:
    changes = FleetChanges(started_ms=100)
    changes.record("globex", FleetChange(1000, "node", NodeChange.CAME))
    assert changes.since("acme", 0) == []
    assert changes.complete_since_ms("acme") == 100
