"""Why there is no such tool, as far as its caller may know."""

from collections.abc import Mapping

import pytest

from relay.fleet.absences import Absences
from relay.fleet.node_record import NodeRecord
from schemas.errors import Failure, ToolError
from tests.fakes.clock import FakeClock
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT

GRACE_MS = 30_000
ENROLLED = {NODE_ID: TENANT}


def error_of(node: NodeRecord | None, enrolled: Mapping[str, str] = ENROLLED, since_ms: int = 0) -> ToolError:
    """Return the error ``since_ms`` after the relay's start."""
    absences = Absences(FakeClock(NOW_MS + since_ms), NOW_MS + GRACE_MS)
    absences.enrolled_tenant = enrolled.get
    return absences.error(NODE_ID, node, TENANT, kind_known=True)


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
        pytest.param(NodeRecord(NODE_ID, TENANT, connected=True), id="its session came first"),
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
    refused = NodeRecord(NODE_ID, TENANT, connected=True, rejected=True)
    assert error_of(refused).failure is Failure.MANIFEST_INVALID


def test_a_manifest_that_was_withdrawn_is_not_awaited() -> None:
    withdrawn = NodeRecord(NODE_ID, TENANT, has_announced=True)
    assert error_of(withdrawn).failure is Failure.MANIFEST_NOT_FOUND


def test_a_node_that_is_retired_is_not_awaited() -> None:
    assert error_of(NodeRecord(NODE_ID, TENANT), {}).failure is Failure.MANIFEST_NOT_FOUND
