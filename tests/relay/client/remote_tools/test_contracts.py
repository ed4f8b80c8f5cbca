"""Contracts: what a server's statements count for, and what the operator's do."""

from typing import Any

import pytest
from mcp_types import Tool

from relay.client.remote_tools.contracts import DEFAULT_DEADLINE_S, ContractTerms, Verified, digest_of
from relay.remote_tools import Risk, RiskSource, ToolRule
from schemas.error_roots import OperatorError

META = {
    "edge-kubelet/safety-class": "read_only",
    "edge-kubelet/canonical-name": "sysecho.x.echo.invoke",
    "edge-kubelet/schema-ref": "mcp://schemas/system.echo.invoke.input@1.0.0",
}
HARMLESS = {"readOnlyHint": True, "destructiveHint": False, "idempotentHint": True}


def tool(**members: Any) -> Tool:
    return Tool.model_validate({"name": "echo", "inputSchema": {"type": "object"}, **members})


@pytest.mark.parametrize("members", [{}, {"annotations": HARMLESS}, {"_meta": META}], ids=str)
def test_a_server_does_not_lower_its_own_risk_nor_permit_repetition(members: dict[str, Any]) -> None:
    contract = ContractTerms().contract(tool(**members))
    assert (contract.risk, contract.risk_source) == (Risk.ADMIN, RiskSource.DEFAULT)
    assert contract.idempotent is False


@pytest.mark.parametrize(
    ("members", "risk"),
    [
        ({}, Risk.ADMIN),
        ({"annotations": HARMLESS}, Risk.READ),
        ({"annotations": {"readOnlyHint": False, "destructiveHint": False}}, Risk.WRITE),
        ({"annotations": {"readOnlyHint": False}}, Risk.ADMIN),
        ({"annotations": {"destructiveHint": True}}, Risk.ADMIN),
        ({"_meta": {"edge-kubelet/safety-class": "read_only"}}, Risk.READ),
        ({"_meta": {"edge-kubelet/safety-class": "reversible"}}, Risk.WRITE),
        ({"_meta": {"edge-kubelet/safety-class": "physical_actuation"}, "annotations": HARMLESS}, Risk.ADMIN),
        ({"_meta": {"edge-kubelet/safety-class": "harmless"}, "annotations": HARMLESS}, Risk.ADMIN),
        ({"_meta": {"edge-kubelet/safety-class": 1}}, Risk.ADMIN),
    ],
    ids=str,
)
def test_trusted_annotations_lower_the_risk(members: dict[str, Any], risk: Risk) -> None:
    contract = ContractTerms(trust_annotations=True).contract(tool(**members))
    assert (contract.risk, contract.risk_source) == (risk, RiskSource.ANNOTATIONS)


def test_what_the_node_signed_counts_more_than_what_is_listed() -> None:
    verified = Verified("physical_actuation", idempotent=False, good_until_ms=0)
    contract = ContractTerms(trust_annotations=True).contract(
        tool(annotations=HARMLESS, _meta=META), verified
    )
    assert (contract.risk, contract.risk_source) == (Risk.ADMIN, RiskSource.MANIFEST)
    assert (contract.idempotent, contract.deadline_s) == (False, DEFAULT_DEADLINE_S)
    assert contract.required_scopes == {"tools:call:physical_actuation"}


def test_the_operators_rules_count_most_and_the_first_that_states_a_thing_decides_it() -> None:
    rules = (
        ToolRule("ec*", risk=Risk.WRITE),
        ToolRule("*", risk=Risk.READ, idempotent=True, deadline_s=3, scopes=frozenset({"a"})),
        ToolRule("echo", idempotent=False),
        ToolRule("other", deadline_s=1),
    )
    verified = Verified("physical_actuation", idempotent=False, good_until_ms=0)
    contract = ContractTerms(rules).contract(tool(_meta=META), verified)
    assert (contract.risk, contract.risk_source) == (Risk.WRITE, RiskSource.RULE)
    assert (contract.idempotent, contract.deadline_s, contract.required_scopes) == (
        True,
        3.0,
        frozenset({"a"}),
    )


def test_version_and_canonical_name_of_a_relays_tool_come_from_its_meta() -> None:
    contract = ContractTerms().contract(tool(_meta=META))
    assert (contract.version, contract.canonical_name) == ("1.0.0", "sysecho.x.echo.invoke")
    assert contract.required_scopes == {"tools:call:read_only"}


def test_a_tool_of_another_server_has_the_version_of_its_content() -> None:
    contract = ContractTerms().contract(tool())
    assert contract.version == contract.digest[:12] == digest_of(tool())[:12]
    assert (contract.canonical_name, contract.deadline_s) == ("echo", DEFAULT_DEADLINE_S)
    assert contract.required_scopes == frozenset()


@pytest.mark.parametrize(
    "members",
    [
        {"description": "x"},
        {"title": "x"},
        {"inputSchema": {"type": "object", "title": "x"}},
        {"outputSchema": {"type": "object"}},
        {"annotations": {"title": "x"}},
        {"_meta": META},
    ],
    ids=str,
)
def test_the_digest_covers_all_that_a_model_or_a_validator_reads(members: dict[str, Any]) -> None:
    assert digest_of(tool(**members)) != digest_of(tool())
    assert digest_of(tool(_meta={"other": 1})) == digest_of(tool())


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
def test_a_deadline_of_an_operator_that_is_no_time_is_refused_at_once(bad: float) -> None:
    with pytest.raises(OperatorError, match="negative or not a number"):
        ContractTerms(deadline_s=bad)
    with pytest.raises(OperatorError, match="negative or not a number"):
        ContractTerms((ToolRule("*"), ToolRule("get_*", deadline_s=bad)))
