"""What a call is refused for before anything of it is sent, and in which order."""

from typing import Any

import pytest

from relay.remote_tools import (
    Budget,
    Permissions,
    Reason,
    RemoteToolError,
    Risk,
    ToolInvalidArguments,
    ToolNotFound,
    ToolRule,
    ToolUnauthorized,
)
from tests.fakes.guarded import EVERYTHING, over_http
from tests.fakes.mcp_server import FakeMcpServer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}


async def refused(fake: FakeMcpServer, name: str, arguments: Any, **options: Any) -> RemoteToolError:
    async with over_http(fake, **options) as client:
        error = await client.fails(RemoteToolError, name, arguments)
        [record] = client.records
        assert (record["event"], record["decision"]) == ("refused", "refused")
        assert (record["reason"], record["tool"]) == (error.reason, name)
        assert record["correlation_id"] == error.correlation_id != ""
    assert fake.calls == []
    return error


@pytest.mark.holds(
    "SPEC-0004/2.2/deny-by-default",
    "SPEC-0004/3.2/permissions-before-network",
    "SPEC-0004/3.4/local-authorization",
    "SPEC-0004/5/audit",
)
async def test_by_default_everything_is_refused_without_a_connection() -> None:
    fake = FakeMcpServer()
    error = await refused(fake, "echo", PING, permissions=Permissions())
    assert (type(error), error.reason) == (ToolUnauthorized, Reason.ALLOWLIST)


@pytest.mark.holds("SPEC-0004/3.4/local-authorization")
async def test_the_allowlist_is_globs_over_the_name_that_is_called() -> None:
    fake = FakeMcpServer()
    permissions = Permissions(allow=("ec*",), max_risk=Risk.ADMIN)
    async with over_http(fake, permissions=permissions) as client:
        await client.tools.execute("echo", PING)
    error = await refused(FakeMcpServer(), "add", {"a": 1, "b": 1}, permissions=permissions)
    assert error.reason is Reason.ALLOWLIST


@pytest.mark.holds("SPEC-0004/2.2/deny-by-default")
async def test_the_default_ceiling_is_reading_and_a_server_does_not_lower_its_own_risk() -> None:
    error = await refused(FakeMcpServer(), "echo", PING, permissions=Permissions(allow=("*",)))
    assert (type(error), error.reason) == (ToolUnauthorized, Reason.RISK)


@pytest.mark.parametrize(
    "options", [{"trust_annotations": True}, {"rules": (ToolRule("echo", risk=Risk.READ),)}], ids=str
)
async def test_the_operator_lowers_a_risk(options: dict[str, Any]) -> None:
    fake = FakeMcpServer()
    async with over_http(fake, permissions=Permissions(allow=("*",)), **options) as client:
        await client.tools.execute("echo", PING)
    assert fake.sent("echo") == 1


@pytest.mark.holds("SPEC-0004/3.2/permissions-before-network")
async def test_a_scope_that_was_not_granted_refuses() -> None:
    rules = (ToolRule("echo", scopes=frozenset({"a", "b"})),)
    granted = Permissions(allow=("*",), max_risk=Risk.ADMIN, scopes=frozenset({"a"}))
    error = await refused(FakeMcpServer(), "echo", PING, permissions=granted, rules=rules)
    assert error.reason is Reason.SCOPE
    assert "scope b" in str(error)


@pytest.mark.holds("SPEC-0004/3.2/permissions-before-network")
async def test_a_spent_budget_refuses() -> None:
    fake = FakeMcpServer()
    async with over_http(fake, budget=Budget(calls=2)) as client:
        for _ in range(2):
            await client.tools.execute("echo", PING)
        error = await client.fails(ToolUnauthorized, "echo", PING)
    assert (error.reason, fake.sent("echo")) == (Reason.BUDGET, 2)


@pytest.mark.holds("SPEC-0004/3.3/tool-not-found")
async def test_a_tool_that_is_not_listed_is_not_found() -> None:
    error = await refused(FakeMcpServer(), "nothing", {})
    assert (type(error), error.reason) == (ToolNotFound, Reason.UNLISTED)


@pytest.mark.holds(
    "SPEC-0004/2.1/contract-validation",
    "SPEC-0004/3.2/arguments-before-network",
    "SPEC-0004/3.3/invalid-arguments",
)
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"message": 5},
        {"message": "x" * 65},
        {"message": "x", "more": 1},
        {"message": float("nan")},
        {"message": "\ud800"},
        {"message": {1, 2}},
        {1: 2},
        ["ping"],
    ],
    ids=repr,
)
async def test_arguments_that_do_not_fit_the_input_schema_are_refused(arguments: Any) -> None:
    error = await refused(FakeMcpServer(), "echo", arguments)
    assert (type(error), error.reason) == (ToolInvalidArguments, Reason.ARGUMENTS)
    assert "x" * 65 not in str(error)


@pytest.mark.holds("SPEC-0004/3.2/arguments-before-network")
async def test_arguments_of_more_than_a_megabyte_are_refused() -> None:
    fake = FakeMcpServer()
    error = await refused(fake, "failing", {"text": "x" * (1 << 20)})
    assert isinstance(error, ToolInvalidArguments)


@pytest.mark.holds("SPEC-0004/3.1/schemas")
async def test_a_tool_whose_schema_cannot_be_used_is_refused_and_the_others_are_not() -> None:
    fake = FakeMcpServer()
    fake.tools[0]["inputSchema"] = {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/x"}}}
    error = await refused(fake, "echo", PING)
    assert error.reason is Reason.CONTRACT
    async with over_http(fake) as client:
        assert (await client.tools.execute("add", {"a": 1, "b": 1})).structured == {"sum": 2}


async def test_a_name_that_is_listed_twice_is_refused() -> None:
    fake = FakeMcpServer()
    fake.tools.append({**fake.tools[0], "description": "another"})
    assert (await refused(fake, "echo", PING)).reason is Reason.CONTRACT


@pytest.mark.holds("SPEC-0004/3.2/permissions-before-network")
async def test_the_checks_are_made_in_their_order() -> None:
    fake = FakeMcpServer()
    fake.tools[0]["_meta"] = {"edge-kubelet/safety-class": "read_only"}
    steps: list[tuple[dict[str, Any], Reason]] = [
        ({"permissions": Permissions(), "budget": Budget(calls=0)}, Reason.ALLOWLIST),
        ({"permissions": Permissions(allow=("*",)), "budget": Budget(calls=0)}, Reason.RISK),
        ({"permissions": EVERYTHING, "budget": Budget(calls=0)}, Reason.SCOPE),
    ]
    for options, reason in steps:
        assert (await refused(fake, "echo", {}, **options)).reason is reason
    granted = Permissions(("*",), Risk.ADMIN, frozenset({"tools:call:read_only"}))
    error = await refused(fake, "echo", {}, permissions=granted, budget=Budget(calls=0))
    assert error.reason is Reason.BUDGET
    assert (await refused(fake, "echo", {}, permissions=granted)).reason is Reason.ARGUMENTS
