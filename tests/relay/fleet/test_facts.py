"""What is known of a node, and where it is shown."""

from dataclasses import replace
from typing import get_type_hints

import pytest

from relay.auth.permissions import Rights
from relay.fleet.facts import (
    FACTS,
    WARNINGS,
    FindNodesEntry,
    ListedNode,
    NodesStatus,
    NodeWarnings,
    found_node,
    listed_node,
    warned,
)
from relay.observability.metrics import Metrics
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, TENANT, SimulatedNode

OF_THE_WHOLE_FLEET = {"relay", "measured"}
"""What the lists add, which no record has."""
NODES = NodeWarnings(Metrics()).status(known=3, connected=3)


def test_each_member_of_the_documents_is_a_fact_and_each_fact_a_member(hub: Hub, node: SimulatedNode) -> None:
    listed = [fact.listed for fact in FACTS if fact.listed]
    found = [fact.found for fact in FACTS if fact.found]
    assert set(listed) == get_type_hints(ListedNode).keys() - OF_THE_WHOLE_FLEET
    assert set(found) == get_type_hints(FindNodesEntry).keys() - OF_THE_WHOLE_FLEET
    assert all(fact.listed for fact in FACTS if fact.column)

    hub.connect(node)
    rights = Rights.of(TENANT, ())
    record = hub.fleet.session_node(rights, NODE_ID)
    assert list(listed_node(record, hub.fleet.names, rights)) == listed
    shown = [fact.found for fact in FACTS if fact.found and not fact.kind]
    assert list(found_node(record, hub.fleet.names, rights)) == shown


def test_each_warning_is_a_member_of_the_status() -> None:
    assert WARNINGS.keys() == get_type_hints(NodesStatus).keys() - {"known", "connected"}


@pytest.mark.parametrize("member", WARNINGS)
def test_the_nodes_of_a_warning_are_named_in_its_check(member: str) -> None:
    check = WARNINGS[member].check
    assert warned(check, NODES) is None
    found = warned(check, {**NODES, member: {NODE_ID: "ahead"}})  # type: ignore[misc]  # a member of the table
    assert found is not None
    assert NODE_ID in found[0]
    assert found[1] == WARNINGS[member].fix


def test_a_check_reports_each_of_its_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [replace(warning, check="clock") for warning in WARNINGS.values()]
    monkeypatch.setattr("relay.fleet.facts.WARNINGS", dict(zip(WARNINGS, both, strict=True)))
    found = warned("clock", {**NODES, **{member: {NODE_ID: "ahead"} for member in WARNINGS}})  # type: ignore[typeddict-item]
    assert found is not None
    assert (found[0].count(NODE_ID), found[1].count("edge-kubelet doctor")) == (len(both), len(both))


def test_a_warning_that_nothing_finds_ends_the_start(hub: Hub) -> None:
    hub.fleet.retire(frozenset(), ())
    with pytest.raises(ValueError, match="warnings that nothing finds: silent"):
        hub.fleet.check_complete()
    hub.fleet.warnings.watch("silent", dict)
    hub.fleet.check_complete()
