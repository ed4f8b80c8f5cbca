"""Why there is no such tool, as far as its caller may know."""

import pytest

from relay.fleet.absences import absence
from relay.fleet.node_record import NodeRecord
from schemas.errors import Failure
from tests.fakes.signer import NODE_ID, TENANT


def test_another_tenants_node_is_as_one_that_exists_nowhere() -> None:
    nowhere = absence(None, TENANT, kind_known=True)
    for node in (NodeRecord(NODE_ID, "globex"), NodeRecord(NODE_ID, "globex", leaf_dropped=True)):
        assert str(absence(node, TENANT, kind_known=True)) == str(nowhere)
    assert nowhere.failure is Failure.SAFETY_DENIED


@pytest.mark.parametrize(
    ("node", "failure"),
    [
        (NodeRecord(NODE_ID, TENANT, leaf_dropped=True), Failure.ATTESTATION_FAILED),
        (NodeRecord(NODE_ID, TENANT, rejected=True), Failure.MANIFEST_INVALID),
        (NodeRecord(NODE_ID, TENANT), Failure.MANIFEST_NOT_FOUND),
    ],
)
def test_a_node_without_a_manifest_has_no_tool_for_a_reason(node: NodeRecord, failure: Failure) -> None:
    assert absence(node, TENANT, kind_known=True).failure is failure
