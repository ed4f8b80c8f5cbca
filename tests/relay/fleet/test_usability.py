"""Why a node cannot be used now, as far as its caller may know."""

from collections.abc import Mapping

import pytest

from relay.auth.permissions import Rights
from relay.fleet.node_record import NodeRecord, Where
from relay.fleet.selection import NodeCriteria
from relay.fleet.usability import REASONS, Decision, NodeUse, Usability
from schemas.errors import Failure, ToolError
from tests.fakes.clock import FakeClock
from tests.fakes.fleet_tools import ECHO_NAME
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT, SimulatedNode

GRACE_MS = 30_000
ENROLLED = {NODE_ID: TENANT}
RIGHTS = Rights.of(TENANT, ["tools:call:read_only"])
ALL = ", ".join(sorted(Decision))


def error_of(node: NodeRecord | None, enrolled: Mapping[str, str] = ENROLLED, since_ms: int = 0) -> ToolError:
    """Return the error ``since_ms`` after the relay's start."""
    nothing_decided = dict.fromkeys(Decision, frozenset[str]())
    usability = Usability(FakeClock(NOW_MS + since_ms), NOW_MS + GRACE_MS, nothing_decided, lambda *_: True)
    usability.enrolled_tenant = enrolled.get
    error = usability.error("absent tool", NodeUse(NODE_ID, node, RIGHTS))
    assert error is not None
    return error


@pytest.mark.parametrize("since_ms", [0, GRACE_MS])
def test_another_tenants_node_is_as_one_that_exists_nowhere(since_ms: int) -> None:
    nowhere = error_of(None, {}, since_ms)
    assert nowhere.failure is Failure.SAFETY_DENIED
    known = [NodeRecord(NODE_ID, "globex"), NodeRecord(NODE_ID, "globex", leaf_dropped=True), None]
    for node in known:
        assert str(error_of(node, {NODE_ID: "globex"}, since_ms)) == str(nowhere)


@pytest.mark.parametrize(
    ("node", "failure"),
    [
        (NodeRecord(NODE_ID, TENANT, leaf_dropped=True), Failure.ATTESTATION_FAILED),
        (NodeRecord(NODE_ID, TENANT, rejected=True), Failure.MANIFEST_INVALID),
        (NodeRecord(NODE_ID, TENANT), Failure.MANIFEST_NOT_FOUND),
        (None, Failure.MANIFEST_NOT_FOUND),
    ],
)
def test_a_node_without_a_manifest_has_no_tool_for_a_reason(
    node: NodeRecord | None, failure: Failure
) -> None:
    assert error_of(node, since_ms=GRACE_MS).failure is failure


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(None, id="not seen yet"),
        pytest.param(NodeRecord(NODE_ID, TENANT), id="known from before"),
        pytest.param(NodeRecord(NODE_ID, TENANT, where=Where.HERE), id="its session came first"),
        pytest.param(NodeRecord(NODE_ID, TENANT, rejected=True), id="the broker retained an old manifest"),
    ],
)
def test_after_the_relays_start_a_call_of_an_enrolled_node_is_to_be_made_again(
    node: NodeRecord | None,
) -> None:
    error = error_of(node)
    assert (error.failure, error.retry_after_ms) == (Failure.NODE_OFFLINE, 1000)
    assert error_of(node, since_ms=GRACE_MS - 1).failure is Failure.NODE_OFFLINE


def test_a_manifest_that_was_refused_over_its_session_is_not_awaited() -> None:
    refused = NodeRecord(NODE_ID, TENANT, where=Where.HERE, rejected=True)
    assert error_of(refused).failure is Failure.MANIFEST_INVALID


def test_a_manifest_that_was_withdrawn_is_not_awaited() -> None:
    withdrawn = NodeRecord(NODE_ID, TENANT, has_announced=True)
    assert error_of(withdrawn).failure is Failure.MANIFEST_NOT_FOUND


def test_a_node_that_is_retired_is_not_awaited() -> None:
    assert error_of(NodeRecord(NODE_ID, TENANT), {}).failure is Failure.MANIFEST_NOT_FOUND


@pytest.mark.parametrize("decision", Decision)
def test_what_the_operator_decides_hides_a_node_everywhere_and_bars_its_use(
    hub: Hub, node: SimulatedNode, decision: Decision
) -> None:
    fleet = hub.fleet
    hub.connect(node)
    tool = fleet.resolve(ECHO_NAME, RIGHTS)

    fleet.decide(decision, frozenset({NODE_ID}))
    assert fleet.is_hidden(NODE_ID)
    assert not fleet.selected.listed(RIGHTS)
    assert not hub.nodes_of(TENANT)
    assert not list(fleet.reach.labels(RIGHTS))
    assert not fleet.search.found(RIGHTS, NodeCriteria())
    assert not fleet.is_usable(tool, RIGHTS)
    with pytest.raises(ToolError):
        fleet.resolve(ECHO_NAME, RIGHTS)
    with pytest.raises(ToolError):
        fleet.session_node(RIGHTS, NODE_ID)

    fleet.decide(decision, frozenset())
    assert fleet.selected.listed(RIGHTS)
    assert fleet.resolve(ECHO_NAME, RIGHTS) is tool
    assert fleet.session_node(RIGHTS, NODE_ID).node_id == NODE_ID


def test_a_decision_without_a_reason_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    without = tuple(reason for reason in REASONS if reason.decision is None)
    monkeypatch.setattr("relay.fleet.usability.REASONS", without)
    with pytest.raises(ValueError, match=f"decisions without a reason: {ALL}"):
        Usability(FakeClock(NOW_MS), NOW_MS, {}, lambda *_: True)


def test_a_decision_that_nothing_applies_ends_the_start(hub: Hub) -> None:
    with pytest.raises(ValueError, match=f"decisions that nothing applies: {ALL}"):
        hub.fleet.check_complete()
