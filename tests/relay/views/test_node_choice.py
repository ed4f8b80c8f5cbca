"""The choice by itself; what calls make of it is in ``test_kind_tools``."""

import pytest

from relay.auth.agent_tokens import Principal
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.views.node_choice import MAX_NODES, NodeChoice
from schemas.errors import Failure, ToolError
from tests.fakes.hub import READ_ONLY
from tests.fakes.signer import METRICS, TENANT
from tests.fakes.view_stage import OTHER_TENANT, ViewStage

READER = Principal(TENANT, "agent", "jti", "issuer", frozenset({READ_ONLY}), 2**32, "kid", b"")
ECHO_OFFER = ("sysecho", "invoke")


@pytest.fixture
def choice(stage: ViewStage) -> NodeChoice:
    return NodeChoice(stage.hub.fleet, stage.hub.judged_by, stage.gateway.charge)


def chosen(choice: NodeChoice, *selectors: str, selection: Selection = WHOLE_FLEET) -> list[str]:
    return [member.node_id for member in choice.members(READER, selection, ECHO_OFFER, selectors).nodes]


def test_nodes_are_in_the_order_of_the_selectors_each_once(stage: ViewStage, choice: NodeChoice) -> None:
    barn, yard = stage.node("barn", "gateway"), stage.node("yard", "gateway")
    attic = stage.node("attic")
    assert chosen(choice, "attic", "tag:gateway", "barn", "*") == [attic, *sorted([barn, yard])]
    assert chosen(choice, "yard", "tag:gateway") == [yard, barn]


def test_another_tenants_nodes_are_never_chosen(stage: ViewStage, choice: NodeChoice) -> None:
    own, foreign = (
        stage.node("barn", "gateway"),
        stage.node("vault", "gateway", "secret", tenant=OTHER_TENANT),
    )
    assert chosen(choice, "*", "tag:gateway") == [own]
    for selector in ("vault", foreign, foreign[:24], "tag:secret"):
        with pytest.raises(ToolError) as caught:
            chosen(choice, selector)
        assert (caught.value.failure, caught.value.detail) == (
            Failure.SAFETY_DENIED,
            "nodes: there is no such node.",
        )
        assert "vault" not in (caught.value.fix or "").removeprefix(f"'{selector}'")


def test_more_nodes_than_may_be_asked_are_cut(stage: ViewStage, choice: NodeChoice) -> None:
    for number in range(MAX_NODES):
        stage.node(f"node {number}", "gateway")
    assert not choice.members(READER, WHOLE_FLEET, ECHO_OFFER, ["*"]).truncated
    named = stage.node("one more")
    members = choice.members(READER, WHOLE_FLEET, ECHO_OFFER, ["one more", "tag:gateway"])
    assert (len(members.nodes), members.truncated) == (MAX_NODES, True)
    assert members.nodes[0].node_id == named


def test_a_member_has_the_label_and_the_manifest_of_that_moment(stage: ViewStage, choice: NodeChoice) -> None:
    node_id = stage.node("barn")
    (member,) = choice.members(READER, WHOLE_FLEET, ECHO_OFFER, ["barn"]).nodes
    record = stage.hub.fleet.node_of(TENANT, node_id)
    assert record is not None
    assert record.manifest is not None
    assert (member.label, member.manifest_etag) == ("barn", record.manifest.etag)


def test_a_node_outside_the_selection_is_not_meant_by_any_selector(
    stage: ViewStage, choice: NodeChoice
) -> None:
    stage.node("barn", "gateway")
    other = stage.node("yard", "gateway", "site=north", capabilities=[METRICS])
    north = Selection(tags=("site=north",))
    for selector in ("*", "tag:gateway", "barn"):
        with pytest.raises(ToolError):
            chosen(choice, selector, selection=north)
    assert chosen(choice, "yard", selection=north) == [other]
