"""The choice by itself; what calls make of it is in ``test_kind_tools``."""

from typing import Any

import pytest

from relay.auth.agent_tokens import Principal
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.mcp_api.views.answer_query import MOST_RANKED, PAGE, AnswerQuery
from relay.mcp_api.views.node_choice import Members, NodeChoice
from schemas.errors import Failure, ToolError
from tests.fakes.hub import READ_ONLY
from tests.fakes.signer import METRICS, TENANT
from tests.fakes.view_stage import OTHER_TENANT, ViewStage

READER = Principal(TENANT, "agent", "jti", "issuer", frozenset({READ_ONLY}), 2**32, "kid", b"")
ECHO_OFFER = ("sysecho", "invoke")


@pytest.fixture
def choice(stage: ViewStage) -> NodeChoice:
    return NodeChoice(stage.hub.fleet, stage.hub.judged_by, stage.gateway.charge)


def members(choice: NodeChoice, *selectors: str, selection: Selection = WHOLE_FLEET, **query: Any) -> Members:
    return choice.members(READER, selection, ECHO_OFFER, selectors, AnswerQuery(**query))


def chosen(
    choice: NodeChoice, *selectors: str, selection: Selection = WHOLE_FLEET, **query: Any
) -> list[str]:
    return [member.node_id for member in members(choice, *selectors, selection=selection, **query).nodes]


def test_nodes_that_are_named_are_in_that_order_and_others_in_that_of_their_ids(
    stage: ViewStage, choice: NodeChoice
) -> None:
    barn, yard = stage.node("barn", "gateway"), stage.node("yard", "gateway")
    attic = stage.node("attic")
    assert chosen(choice, "yard", "attic", "yard") == [yard, attic]
    assert chosen(choice, "attic", "tag:gateway", "barn", "*") == sorted([attic, barn, yard])


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


def test_pages_have_every_node_once_in_the_order_of_ids(stage: ViewStage, choice: NodeChoice) -> None:
    ids = sorted(stage.node(f"node {number}", "gateway") for number in range(2 * PAGE + 1))
    pages = [members(choice, "node 7", "tag:gateway")]
    while pages[-1].more:
        pages.append(members(choice, "node 7", "tag:gateway", after=pages[-1].nodes[-1].node_id))
    assert [len(page.nodes) for page in pages] == [PAGE, PAGE, 1]
    assert [member.node_id for page in pages for member in page.nodes] == ids
    assert chosen(choice, "*", after=ids[-1]) == []
    assert chosen(choice, "*", top=3, after=ids[4]) == ids[5:8]


def test_a_ranking_asks_more_nodes_than_a_page_has(stage: ViewStage, choice: NodeChoice) -> None:
    for number in range(PAGE + 1):
        stage.node(f"node {number}")
    assert len(chosen(choice, "*", sort="received_at_ms", top=1)) == PAGE + 1
    assert AnswerQuery(sort="received_at_ms").most_asked == MOST_RANKED


def test_a_member_has_the_label_and_the_manifest_of_that_moment(stage: ViewStage, choice: NodeChoice) -> None:
    node_id = stage.node("barn")
    (member,) = members(choice, "barn").nodes
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
