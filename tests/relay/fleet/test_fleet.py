import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import relay.fleet.leaves
from relay.auth.permissions import Rights
from relay.fleet.fleet import GRACE_MS
from relay.fleet.name_ledger import NodeName
from relay.fleet.pending_manifests import PENDING_FOR_MS
from schemas.certificates import IdentityError
from schemas.errors import Failure, ToolError
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.verdicts import ManifestReason, Mark, Outcome
from tests.fakes.calls_counted import Calls
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, refusal
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    METRICS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
READ_ONLY = frozenset({"read_only"})
OTHER_TENANT = "globex"


@pytest.fixture
def node(hub: Hub) -> SimulatedNode:
    return hub.ca.issue()


def listed(hub: Hub, tenant: str = TENANT) -> list[str]:
    return [tool.canonical for tool in hub.fleet.selected.listed(Rights(tenant, READ_ONLY))]


def failure(hub: Hub, name: str, tenant: str = TENANT) -> Failure:
    with pytest.raises(ToolError) as caught:
        hub.fleet.resolve(name, Rights(tenant, READ_ONLY))
    return caught.value.failure


# --- identities ---------------------------------------------------------------------------------------


def test_a_leaf_of_the_root_identifies_its_node(hub: Hub, node: SimulatedNode) -> None:
    assert hub.fleet.identify(NODE_ID, node.leaf_pem) == node.identity()


@pytest.mark.parametrize(
    ("pem", "reason"),
    [
        pytest.param("", "bad_certificate", id="nothing"),
        pytest.param("garbage", "bad_certificate", id="garbage"),
        pytest.param(SimulatedCa("elsewhere").issue().leaf_pem, "chain", id="a foreign root"),
        pytest.param(SimulatedCa().issue(OTHER_NODE_ID).leaf_pem, "id_mismatch", id="another node's"),
        pytest.param(SimulatedCa().issue(now_ms=NOW_MS - 91 * DAY_MS).leaf_pem, "validity", id="expired"),
    ],
)
def test_a_leaf_that_proves_nothing_displaces_nothing(
    hub: Hub, node: SimulatedNode, pem: str, reason: str
) -> None:
    hub.connect(node)
    with pytest.raises(IdentityError) as caught:
        hub.fleet.identify(NODE_ID, pem)
    assert caught.value.reason == reason
    hub.fleet.offer_identity(NODE_ID, pem)
    assert hub.counted("identities_total", verdict=reason) == 1
    wire = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.ACCEPTED


def test_a_revoked_leaf_is_refused_and_so_is_what_it_signed(tmp_path: Path, registry: SchemaRegistry) -> None:
    node = SimulatedCa().issue()
    hub = Hub(tmp_path, registry, revoked=[node.kid])
    with pytest.raises(IdentityError, match="revoked"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)
    verdict = hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    assert verdict.reason is ManifestReason.REVOKED
    hub.close()


def test_at_renewal_both_leaves_are_known_and_the_oldest_goes_first(hub: Hub) -> None:
    leaves = [hub.ca.issue(now_ms=NOW_MS + day * DAY_MS, key=key_named(f"key {day}")) for day in range(-3, 0)]
    for leaf in leaves:
        hub.fleet.identify(NODE_ID, leaf.leaf_pem)
    outcomes = [
        hub.fleet.offer_manifest(NODE_ID, leaf.manifest(issued_at_ms=NOW_MS + at), "broker").outcome
        for at, leaf in enumerate(leaves)
    ]
    assert outcomes == [Outcome.PENDING, Outcome.ACCEPTED, Outcome.ACCEPTED]


def test_an_old_leaf_that_is_retained_again_replaces_no_newer_one(hub: Hub) -> None:
    leaves = [hub.ca.issue(now_ms=NOW_MS + day * DAY_MS, key=key_named(f"key {day}")) for day in range(-3, 0)]
    for leaf in reversed(leaves):
        hub.fleet.identify(NODE_ID, leaf.leaf_pem)
    for at, leaf in enumerate(leaves[1:]):
        wire = leaf.manifest(issued_at_ms=NOW_MS + at)
        assert hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.ACCEPTED


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


def test_sweeping_ends_the_wait_of_what_has_waited_too_long(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    hub.clock.advance(PENDING_FOR_MS)
    hub.fleet.sweep()
    hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).node_id == NODE_ID


def test_an_old_leaf_of_another_tenant_does_not_move_the_node(hub: Hub) -> None:
    key = key_named("a node that moved")
    old = hub.ca.issue(NODE_ID, "before", key=key, now_ms=NOW_MS - DAY_MS)
    new = hub.ca.issue(NODE_ID, TENANT, key=key)
    for leaf in (old, new, old):
        hub.fleet.offer_identity(NODE_ID, leaf.leaf_pem)
    assert [node.node_id for node in hub.fleet.nodes_of(TENANT)] == [NODE_ID]
    assert hub.fleet.nodes_of("before") == []


def test_the_newest_manifest_that_waits_is_the_one_that_counts(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    newer = node.manifest(issued_at_ms=NOW_MS + 1, capabilities=[METRICS])
    hub.fleet.offer_manifest(NODE_ID, newer, "broker")
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.fleet.nodes_of(TENANT)[0].mark == Mark(NOW_MS + 1, etag_of(newer))


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
    assert hub.fleet.nodes_of(TENANT)[0].mark == Mark(NOW_MS, etag_of(wire))
    assert hub.lines.entries("manifest rejected")[0]["reason"] == "signature"


def test_a_stale_copy_of_a_connected_node_is_ignored_without_an_alarm(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    old = node.manifest(issued_at_ms=NOW_MS - 1, capabilities=[ECHO])
    assert hub.fleet.offer_manifest(NODE_ID, old, "broker").outcome is Outcome.STALE
    assert hub.lines.entries("manifest rejected") == []
    hub.fleet.set_connected(NODE_ID, connected=False)
    assert hub.fleet.offer_manifest(NODE_ID, old, "broker").reason is ManifestReason.ROLLBACK


def test_manifests_are_counted_by_verdict_and_way(hub: Hub, node: SimulatedNode) -> None:
    wire = hub.connect(node)
    hub.fleet.offer_manifest(NODE_ID, wire, "session")
    hub.fleet.offer_manifest(NODE_ID, b"{", "broker")
    assert hub.counted("manifests_total", outcome="accepted", way="broker") == 1
    assert hub.counted("manifests_total", outcome="unchanged", way="session") == 1
    assert hub.counted("manifests_total", outcome="rejected", reason="not_json", way="broker") == 1


async def test_after_a_restart_an_older_manifest_is_a_rollback(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    before = Hub(tmp_path, registry)
    node = before.ca.issue()
    before.announce(node, issued_at_ms=NOW_MS + 1)
    flushing = asyncio.create_task(before.marks.run())
    await asyncio.sleep(0)
    flushing.cancel()
    with suppress(asyncio.CancelledError):
        await flushing
    before.close()

    after = Hub(tmp_path, registry, ca=before.ca)
    assert failure(after, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND
    after.fleet.offer_identity(NODE_ID, node.leaf_pem)
    older, same = node.manifest(), node.manifest(issued_at_ms=NOW_MS + 1)
    assert after.fleet.offer_manifest(NODE_ID, older, "broker").reason is ManifestReason.ROLLBACK
    assert after.fleet.offer_manifest(NODE_ID, same, "broker").outcome is Outcome.ACCEPTED
    after.close()


async def test_after_a_restart_a_leaf_is_not_verified_again_and_may_be_revoked(
    tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Hub(tmp_path, registry)
    node, revoked = before.ca.issue(), before.ca.issue(OTHER_NODE_ID)
    for each in (node, revoked):
        before.announce(each)
    flushing = asyncio.create_task(before.marks.run())
    await asyncio.sleep(0)
    flushing.cancel()
    with suppress(asyncio.CancelledError):
        await flushing
    before.close()

    after = Hub(tmp_path, registry, ca=before.ca, revoked={revoked.kid})
    verified = Calls(monkeypatch, relay.fleet.leaves, "verify_leaf")
    for each in (node, revoked):
        after.announce(each)
    assert verified.count == 0
    assert listed(after) == [METRICS_NAME, ECHO_NAME]
    assert after.counted("identities_total", verdict="revoked") == 1
    after.close()


def test_a_tombstone_delists_a_node_without_a_session_and_keeps_its_mark(
    hub: Hub, node: SimulatedNode
) -> None:
    wire = hub.announce(node)
    hub.fleet.tombstone(NODE_ID)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND
    assert hub.fleet.nodes_of(TENANT)[0].mark == Mark(NOW_MS, etag_of(wire))


def test_a_tombstone_never_delists_a_node_that_is_connected(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    hub.fleet.tombstone(NODE_ID)
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]


def test_a_tombstone_of_an_unknown_node_changes_nothing(hub: Hub) -> None:
    hub.fleet.tombstone(NODE_ID)
    assert hub.fleet.nodes_of(TENANT) == []


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
    hub.fleet.set_connected(NODE_ID, connected=True)
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
    hub.fleet.set_connected(NODE_ID, connected=False)
    hub.clock.advance(GRACE_MS - 1)
    assert listed(hub) == [METRICS_NAME, ECHO_NAME]
    hub.clock.advance(1)
    assert listed(hub) == []


def test_an_expired_manifest_is_not_listed_though_its_node_is_connected(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.connect(node)
    hub.clock.advance(TTL_MS - 1)
    assert listed(hub) != []
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


def test_nothing_is_listed_for_whom_no_safety_class_is_within_reach(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    assert hub.fleet.selected.listed(Rights(TENANT, frozenset({"reversible", "physical_actuation"}))) == []
    assert hub.fleet.selected.listed(Rights(TENANT, frozenset())) == []


# --- names --------------------------------------------------------------------------------------------


def titles(hub: Hub, tenant: str = TENANT) -> set[str]:
    return {tool.listed()["title"] for tool in hub.fleet.selected.listed(Rights(tenant, READ_ONLY))}


def test_a_label_is_in_the_titles_from_the_first_manifest_on_and_after_it_is_changed(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "greenhouse pi")})
    hub.connect(node)
    assert titles(hub) == {"greenhouse pi: CPU, memory, disks", "greenhouse pi: Echo"}
    before = hub.fleet.selected.version(Rights(TENANT, READ_ONLY))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
    assert titles(hub) == {"barn: CPU, memory, disks", "barn: Echo"}
    assert hub.fleet.selected.version(Rights(TENANT, READ_ONLY)) != before
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).label == "barn"
    hub.fleet.rename({NODE_ID: None})
    assert titles(hub) == {"CPU, memory, disks", "Echo"}


def test_a_tag_changes_no_title_and_no_version(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    before = hub.fleet.selected.version(Rights(TENANT, READ_ONLY))
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "", ("gateway",))})
    assert hub.fleet.selected.version(Rights(TENANT, READ_ONLY)) == before


def test_a_node_that_moves_to_another_tenant_leaves_its_label_behind(hub: Hub) -> None:
    key = key_named("a node that moved")
    old = hub.ca.issue(NODE_ID, OTHER_TENANT, key=key, now_ms=NOW_MS - DAY_MS)
    hub.fleet.rename({NODE_ID: NodeName(OTHER_TENANT, "secret plan")})
    hub.connect(old)
    assert titles(hub, OTHER_TENANT) == {"secret plan: CPU, memory, disks", "secret plan: Echo"}
    hub.fleet.offer_identity(NODE_ID, hub.ca.issue(NODE_ID, TENANT, key=key).leaf_pem)
    assert titles(hub, OTHER_TENANT) == set()
    assert titles(hub) == {"CPU, memory, disks", "Echo"}
    hub.fleet.rename({NODE_ID: NodeName(TENANT, "barn")})
    assert titles(hub) == {"barn: CPU, memory, disks", "barn: Echo"}


# --- resolving ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [ECHO_NAME, ECHO_NAME.replace(".", "-")], ids=["canonical", "dashed"])
def test_both_forms_of_a_name_are_the_same_tool(hub: Hub, node: SimulatedNode, name: str) -> None:
    hub.connect(node)
    assert hub.fleet.resolve(name, Rights(TENANT, READ_ONLY)).canonical == ECHO_NAME


NODE_NAMES = {
    "a verb": f"sysecho.{NODE_ID}.echo.snapshot",
    "a capability": f"sysecho.{NODE_ID}.other.invoke",
    "a verb without a row": f"sys.{NODE_ID}.sysmetrics.subscribe",
}


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, id=f"{what} that the node has not") for what, name in NODE_NAMES.items()),
        pytest.param("", id="empty"),
        pytest.param("echo", id="no name of a tool"),
        pytest.param(ECHO_NAME.upper(), id="upper case"),
        pytest.param(ECHO_NAME + " ", id="with a tail"),
        pytest.param(ECHO_NAME.replace(".", "-", 1), id="mixed"),
        pytest.param("\x1b[31m" * 1000, id="hostile"),
    ],
)
def test_a_name_that_is_none_is_unknown(hub: Hub, node: SimulatedNode, name: str) -> None:
    hub.connect(node)
    assert failure(hub, name) is Failure.NAME_UNKNOWN


def test_a_kind_that_is_not_registered_is_said_so(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    assert failure(hub, f"gpio.{NODE_ID}.echo.invoke") is Failure.KIND_UNSUPPORTED


def test_another_tenants_node_cannot_be_told_from_one_that_exists_nowhere(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.connect(node)
    absent = f"sysecho.{OTHER_NODE_ID}.echo.invoke"
    for name in (ECHO_NAME, *NODE_NAMES.values(), f"gpio.{NODE_ID}.echo.invoke", absent):
        with pytest.raises(ToolError) as caught:
            hub.fleet.resolve(name, Rights(OTHER_TENANT, READ_ONLY))
        assert caught.value.failure is Failure.SAFETY_DENIED
        assert caught.value.detail is None


def test_a_manifest_that_has_expired_or_was_rejected_is_invalid(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND
    hub.fleet.offer_manifest(NODE_ID, b"{}", "broker")
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID
    hub.connect(node)
    hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY))
    hub.clock.advance(TTL_MS)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID


def test_a_node_whose_manifest_is_trusted_can_be_resolved_though_it_is_not_connected(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.announce(node)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).node_id == NODE_ID


def test_no_text_of_a_stranger_gets_into_the_log(hub: Hub, node: SimulatedNode) -> None:
    hub.announce(node)
    hostile: dict[str, Any] = {**ECHO, "cap_id": "\x1b[31m\u202e"}
    hub.fleet.offer_manifest(NODE_ID, node.manifest(capabilities=[hostile]), "broker")
    hub.fleet.offer_identity(NODE_ID, "\x1b[31m")
    text = hub.lines.getvalue()
    assert "[31m" not in text
    assert len(hub.lines.entries()) == 3


# --- leaves that are known already, and two at once ---------------------------------------------------

ELSEWHERE = SimulatedCa("elsewhere")


def test_a_leaf_that_was_verified_is_not_verified_again(hub: Hub, node: SimulatedNode) -> None:
    first = hub.fleet.identify(NODE_ID, node.leaf_pem)
    hub.fleet.change_trust([ELSEWHERE.root_pem], frozenset())  # nothing would chain to it
    assert hub.fleet.identify(NODE_ID, node.leaf_pem) is first
    assert hub.fleet.identify(NODE_ID, "text around it\n" + node.leaf_pem + node.root_pem) is first
    with pytest.raises(IdentityError, match="chain"):
        hub.fleet.identify(NODE_ID, hub.ca.issue().leaf_pem)


def test_an_identity_message_that_is_repeated_is_not_verified_again(
    hub: Hub, node: SimulatedNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified = Calls(monkeypatch, relay.fleet.leaves, "verify_leaf")
    chain = node.leaf_pem + hub.ca.root_pem
    hub.fleet.offer_identity(NODE_ID, chain)
    once = verified.count
    for _ in range(3):
        hub.fleet.offer_identity(NODE_ID, chain)
    assert verified.count == once > 0
    assert hub.counted("identities_total", verdict="accepted") == 1
    assert hub.counted("identities_total", verdict="unchanged") == 3


def test_an_identity_message_is_verified_again_once_roots_or_revocations_have_changed(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    hub.fleet.change_trust([hub.ca.root_pem], frozenset({node.kid}))
    hub.fleet.drop_leaves(lambda leaf: leaf.kid == node.kid)
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.counted("identities_total", verdict="revoked") == 1


def test_a_rejected_identity_message_is_judged_again_each_time(hub: Hub) -> None:
    for _ in range(2):
        hub.fleet.offer_identity(NODE_ID, ELSEWHERE.issue(NODE_ID).leaf_pem)
    assert hub.counted("identities_total", verdict="chain") == 2


def test_a_leaf_that_is_known_and_has_run_out_is_refused(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.identify(NODE_ID, node.leaf_pem)
    hub.clock.advance(90 * DAY_MS)
    with pytest.raises(IdentityError, match="validity"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)


def test_a_leaf_that_is_known_of_one_node_is_not_known_of_another(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.identify(NODE_ID, node.leaf_pem)
    hub.fleet.identify(OTHER_NODE_ID, hub.ca.issue(OTHER_NODE_ID).leaf_pem)
    with pytest.raises(IdentityError, match="id_mismatch"):
        hub.fleet.identify(OTHER_NODE_ID, node.leaf_pem)


@pytest.mark.parametrize(
    "pem",
    [
        pytest.param("", id="nothing"),
        pytest.param("x" * 20_000, id="too much"),
        pytest.param("-----BEGIN CERTIFICATE-----\nAAAAA\n-----END CERTIFICATE-----\n", id="no base64"),
    ],
)
def test_of_a_node_that_is_known_garbage_proves_nothing(hub: Hub, node: SimulatedNode, pem: str) -> None:
    hub.fleet.identify(NODE_ID, node.leaf_pem)
    with pytest.raises(IdentityError, match="bad_certificate"):
        hub.fleet.identify(NODE_ID, pem)


def accepted(hub: Hub, leaf: SimulatedNode) -> bool:
    wire = leaf.manifest(issued_at_ms=hub.clock.advance(1))
    return hub.fleet.offer_manifest(leaf.node_id, wire, "broker").outcome is Outcome.ACCEPTED


def renewed(hub: Hub, node: SimulatedNode) -> SimulatedNode:
    return hub.ca.issue(key=node.key, now_ms=NOW_MS + 1000)


def test_at_renewal_one_message_brings_both_leaves(hub: Hub, node: SimulatedNode) -> None:
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem + node.leaf_pem + node.root_pem)
    assert accepted(hub, node)
    assert accepted(hub, fresh)
    assert hub.counted("identities_total", verdict="accepted") == 1


def test_the_root_behind_a_leaf_is_taken_for_no_leaf_and_causes_no_alarm(
    hub: Hub, node: SimulatedNode
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem + node.root_pem)
    assert accepted(hub, node)
    assert audited_refusals(hub) == []
    assert hub.lines.entries("identity not accepted") == []


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(SimulatedCa().issue(OTHER_NODE_ID).leaf_pem, id="another node's"),
        pytest.param(ELSEWHERE.issue().leaf_pem, id="of another root"),
        pytest.param("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", id="garbage"),
    ],
)
def test_what_stands_behind_a_good_leaf_is_believed_by_itself_alone(
    hub: Hub, node: SimulatedNode, second: str
) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem + second)
    assert accepted(hub, node)
    assert [known.node_id for known in hub.fleet.nodes_of(TENANT)] == [NODE_ID]
    assert not accepted(hub, ELSEWHERE.issue())


def test_behind_a_leaf_that_is_not_believed_nothing_is_read(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, ELSEWHERE.issue().leaf_pem + node.leaf_pem)
    assert hub.fleet.nodes_of(TENANT) == []
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, "chain")]


def test_a_manifest_of_the_older_of_two_leaves_that_waited_is_taken_in(hub: Hub, node: SimulatedNode) -> None:
    wire = node.manifest()
    hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    hub.fleet.offer_identity(NODE_ID, renewed(hub, node).leaf_pem + node.leaf_pem)
    assert hub.fleet.nodes_of(TENANT)[0].mark == Mark(NOW_MS, etag_of(wire))


# --- what is no longer believed -----------------------------------------------------------------------


def bar(hub: Hub, *leaves: SimulatedNode) -> None:
    """Revoke the leaves, as the watch does."""
    kids = frozenset(leaf.kid for leaf in leaves)
    hub.fleet.change_trust([hub.ca.root_pem], kids)
    hub.fleet.drop_leaves(lambda leaf: leaf.kid in kids)


def test_a_node_whose_leaf_is_barred_is_gone_and_says_why(hub: Hub, node: SimulatedNode) -> None:
    other = hub.ca.issue(OTHER_NODE_ID)
    hub.connect(node)
    hub.connect(other)
    bar(hub, node)
    assert {name.split(".")[1] for name in listed(hub)} == {OTHER_NODE_ID}
    for name in (ECHO_NAME, METRICS_NAME, f"gpio.{NODE_ID}.led.set"):
        assert failure(hub, name) is Failure.ATTESTATION_FAILED
        assert failure(hub, name, OTHER_TENANT) is Failure.SAFETY_DENIED
    assert hub.fleet.signer_of(NODE_ID) is None


def test_what_a_barred_leaf_shows_or_signs_is_refused(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    bar(hub, node)
    with pytest.raises(IdentityError, match="revoked"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)
    wire = node.manifest(issued_at_ms=NOW_MS + 1)
    assert hub.fleet.offer_manifest(NODE_ID, wire, "session").reason is ManifestReason.REVOKED
    hub.fleet.tombstone(NODE_ID)
    assert failure(hub, ECHO_NAME) is Failure.ATTESTATION_FAILED


def test_another_leaf_brings_a_barred_node_back(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    bar(hub, node)
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
    assert failure(hub, ECHO_NAME) is Failure.ATTESTATION_FAILED
    assert accepted(hub, fresh)
    assert ECHO_NAME in listed(hub)
    hub.fleet.set_connected(NODE_ID, connected=False)
    hub.fleet.tombstone(NODE_ID)
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_NOT_FOUND


def test_a_manifest_of_the_other_leaf_outlives_the_one_that_is_barred(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem + node.leaf_pem)
    assert accepted(hub, fresh)
    bar(hub, node)
    assert ECHO_NAME in listed(hub)
    assert hub.fleet.signer_of(NODE_ID) == fresh.identity(NOW_MS + 1000)


def test_a_leaf_that_waits_without_a_manifest_is_forgotten_too(hub: Hub, node: SimulatedNode) -> None:
    hub.connect(node)
    fresh = renewed(hub, node)
    hub.fleet.offer_identity(NODE_ID, fresh.leaf_pem)
    bar(hub, fresh)
    assert not accepted(hub, fresh)
    assert ECHO_NAME in listed(hub)
    assert accepted(hub, node)


def test_a_leaf_of_a_root_that_is_not_believed_any_more_is_refused(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.change_trust([ELSEWHERE.root_pem], frozenset())
    with pytest.raises(IdentityError, match="chain"):
        hub.fleet.identify(NODE_ID, node.leaf_pem)
    assert hub.fleet.identify(NODE_ID, ELSEWHERE.issue().leaf_pem).node_id == NODE_ID


def test_who_signed_is_known_while_the_manifest_is_in_force(hub: Hub, node: SimulatedNode) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    assert hub.fleet.signer_of(NODE_ID) is None
    hub.announce(node)
    assert hub.fleet.signer_of(NODE_ID) == node.identity()


def test_a_manifest_ends_with_the_leaf_that_signed_it(hub: Hub) -> None:
    left_ms = TTL_MS // 3
    node = hub.ca.issue(now_ms=NOW_MS + left_ms - 90 * DAY_MS)
    hub.connect(node)
    hub.clock.advance(left_ms - 1)
    assert ECHO_NAME in listed(hub)
    assert hub.fleet.resolve(ECHO_NAME, Rights(TENANT, READ_ONLY)).node_id == NODE_ID
    hub.clock.advance(1)
    assert listed(hub) == []
    assert failure(hub, ECHO_NAME) is Failure.MANIFEST_INVALID
