"""The choice by itself; what calls make of it is in ``test_kind_tools``."""

from typing import Any

import pytest

from relay.auth.agent_tokens import Principal
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.mcp_api.views.many_nodes import MOST_RANKED, PAGE, AnswerQuery, Members
from relay.mcp_api.views.node_choice import NodeChoice
from schemas.errors import Failure, ToolError
from tests.fakes.hub import READ_ONLY
from tests.fakes.signer import TENANT
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


def test_a_ranking_asks_more_nodes_than_a_page_has(stage: ViewStage, choice: NodeChoice) -> None:
    for number in range(PAGE + 1):
        stage.node(f"node {number}")
    assert len(chosen(choice, "*", sort="received_at_ms", top=1)) == PAGE + 1
    assert AnswerQuery(sort="received_at_ms").most_asked == MOST_RANKED
