"""Manifests that a fleet accepts, and what it lists by them."""

import asyncio
from pathlib import Path

import pytest

import relay.fleet.leaves
from relay.auth.permissions import Rights
from relay.fleet.fleet import GRACE_MS
from relay.fleet.inventory import PENDING_FOR_MS
from relay.fleet.node_record import Where
from schemas.errors import Failure
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.trust import HighWaterMark, ManifestReason, Outcome
from tests.fakes.background import in_background
from tests.fakes.fleet_tools import ECHO_NAME, METRICS_NAME, OTHER_TENANT, READ_ONLY, failure, listed
from tests.fakes.hub import Hub
from tests.fakes.signer import (
    ECHO,
    METRICS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedNode,
    key_named,
)
from tests.fakes.view_stage import Calls

# --- manifests ----------------------------------------------------------------------------------------


def test_a_manifest_before_its_leaf_waits_for_it(hub: Hub, node: SimulatedNode) -> None:
    assert hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker").outcome is Outcome.PENDING
    assert failure(hub, ECHO_NAME) is Failure.SAFETY_DENIED
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).canonical == ECHO_NAME


def test_a_manifest_waits_half_a_minute_and_no_longer(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    hub.clock.advance(PENDING_FOR_MS)
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND


def test_the_newest_manifest_that_waits_is_the_one_that_counts(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    newer = node.manifest(issued_at_ms=NOW_MS + 1, capabilities=[METRICS])
    hub.fleet.offer_manifest(NODE_ID, newer, "broker")
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.nodes_of(TENANT)[0].mark == HighWaterMark(NOW_MS + 1, etag_of(newer))


def test_a_new_manifest_replaces_the_tools_of_the_one_before(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]
    hub.announce(node, issued_at_ms=NOW_MS + 1, capabilities=[ECHO])
    assert listed(hub) == [ECHO_NAME]
    assert failure(hub, METRICS_NAME) is Failure.NAME_UNKNOWN


def test_a_rejected_manifest_leaves_the_one_in_force(hub: Hub, node: SimulatedNode) -> None:
    wire = hub.connect(node)
    forged = node.manifest(issued_at_ms=NOW_MS + 1, signer=key_named("a thief"), capabilities=[ECHO])
    assert hub.fleet.offer_manifest(NODE_ID, forged, "broker").reason is ManifestReason.SIGNATURE
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]
    assert hub.nodes_of(TENANT)[0].mark == HighWaterMark(NOW_MS, etag_of(wire))
    assert hub.lines.entries("manifest rejected")[0]["reason"] == "signature"


def test_manifests_are_counted_by_verdict_and_way(hub: Hub, node: SimulatedNode) -> None:
    wire = hub.connect(node)
    hub.fleet.offer_manifest(NODE_ID, wire, "session")
    hub.fleet.offer_manifest(NODE_ID, b"{", "broker")
    assert hub.counted("manifests_total", outcome="accepted", way="broker") == 1
    assert hub.counted("manifests_total", outcome="unchanged", way="session") == 1
    assert hub.counted("manifests_total", outcome="rejected", reason="not_json", way="broker") == 1


async def test_after_a_restart_a_leaf_is_not_verified_again_and_may_be_revoked(
    tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Hub(tmp_path, registry)
    node, revoked = before.ca.issue(), before.ca.issue(OTHER_NODE_ID)
    for each in (node, revoked):
        before.announce(each)
    async with in_background(before.marks.run()):
        await asyncio.sleep(0)
    before.close()

    after = Hub(tmp_path, registry, ca=before.ca, revoked={revoked.kid})
    verified = Calls(monkeypatch, relay.fleet.leaves, "verify_leaf")
    for each in (node, revoked):
        after.announce(each)
    assert verified.count == 0
    assert listed(after) == [METRICS_NAME, ECHO_NAME]
    assert after.counted("identities_total", verdict="revoked") == 1
    after.close()


def test_a_tombstone_of_an_unknown_node_changes_nothing(hub: Hub) -> None:
    hub.fleet.tombstone(NODE_ID)
    assert hub.nodes_of(TENANT) == []


def test_after_a_tombstone_the_same_manifest_brings_the_tools_back(hub: Hub, node: SimulatedNode) -> None:
    wire = hub.announce(node)
    hub.fleet.tombstone(NODE_ID)
    assert hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.ACCEPTED
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).canonical == ECHO_NAME


@pytest.mark.parametrize(
    ("etag", "verdict"),
    [pytest.param(None, "fits", id="current"), pytest.param("00" * 32, "unknown_manifest", id="another")],
)
def test_a_heartbeat_informs_and_moves_no_expiry(
    hub: Hub, node: SimulatedNode, etag: str | None, verdict: str
) -> None:
    wire = hub.connect(node)
    hub.fleet.inventory.heartbeat(NODE_ID, etag or etag_of(wire))
    assert hub.counted("heartbeats_total", verdict=verdict) == 1
    hub.clock.advance(TTL_MS)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID


# --- what is listed -----------------------------------------------------------------------------------


def test_a_node_that_never_connected_is_not_listed(hub: Hub, node: SimulatedNode) -> None:
    hub.clock.advance(GRACE_MS)
    hub.announce(node)
    assert listed(hub) == []


def test_after_the_relays_start_what_is_trusted_is_listed_for_a_grace(hub: Hub, node: SimulatedNode) -> None:
    hub.clock.advance(1)
    hub.announce(node)
    hub.clock.advance(GRACE_MS - 2)
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]
    hub.clock.advance(1)
    assert listed(hub) == []


def test_a_node_that_returns_within_the_grace_of_the_start_stays(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    hub.fleet.connection_changed(NODE_ID, Where.HERE)
    hub.clock.advance(GRACE_MS)
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]


def test_what_is_not_trusted_has_no_grace(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    old = node.manifest(issued_at_ms=NOW_MS - TTL_MS, expires_at_ms=NOW_MS)
    assert hub.fleet.offer_manifest(NODE_ID, old, "broker").reason is ManifestReason.EXPIRED
    assert listed(hub) == []
    hub.announce(node)
    hub.fleet.tombstone(NODE_ID)
    assert listed(hub) == []


def test_tools_stay_listed_for_a_grace_after_the_connection_is_lost(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    hub.clock.advance(GRACE_MS - 1)
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]
    hub.clock.advance(1)
    assert listed(hub) == []


def test_the_list_is_sorted_and_holds_the_tenants_own_nodes_only(hub: Hub) -> None:
    hub.connect(hub.ca.issue(OTHER_NODE_ID))
    hub.connect(hub.ca.issue(NODE_ID))
    hub.connect(hub.ca.issue("01hzx9k3m4p7q8r9s0t1v2w3x0", OTHER_TENANT))
    names = listed(hub)
    assert names == sorted(names)
    assert len(names) == 4
    assert all("w3x0" in name for name in listed(hub, OTHER_TENANT))
    assert len(listed(hub, OTHER_TENANT)) == 2


def test_a_node_with_many_tools_is_listed_behind_the_first_of_every_other(hub: Hub) -> None:
    many = [{**ECHO, "cap_id": f"echo{number}"} for number in range(256)]
    hub.connect(hub.ca.issue(NODE_ID), capabilities=many)
    hub.connect(hub.ca.issue(OTHER_NODE_ID), capabilities=[METRICS, ECHO])
    names = listed(hub)
    assert len(set(names)) == len(names) == 258
    assert names == listed(hub)
    first_turn = names[: 64 + 2]
    assert sum(OTHER_NODE_ID in name for name in first_turn) == 2
    assert first_turn == sorted(first_turn)
    for name in names:
        assert hub.fleet.resolve(name, Rights(TENANT, READ_ONLY)).canonical == name
