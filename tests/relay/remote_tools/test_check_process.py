"""Checks against a server's schema that take long: they end at the deadline, and nothing else waits."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest

from relay.remote_tools import Reason, ToolInvalidArguments, ToolProviderFailure, ToolTimeout
from relay.remote_tools.check_process import CheckProcess
from relay.remote_tools.tool_schemas import compiled
from tests.fakes.guarded import over_http
from tests.fakes.mcp_server import FakeMcpServer

pytestmark = pytest.mark.integration

SLOW = {"anyOf": [{"not": {"pattern": "(?=[ab]*c)(?=a)"}}] * 200}
"""Half a second for each pattern: each tries again at every letter, and reads up to the end."""
SLOW_TEXT = "a" * 40_000
# As zod 4 writes z.email().
EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
USER = {"type": "object", "properties": {"email": {"type": "string", "pattern": EMAIL}}}


@pytest.fixture
async def checks() -> AsyncIterator[CheckProcess]:
    checks = CheckProcess()
    yield checks
    await checks.close()
    assert processes() == []


def processes() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "tool_schemas" in " ".join(child.cmdline())]


def within(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_result_whose_check_takes_minutes_ends_at_the_deadline() -> None:
    fake = FakeMcpServer(results={"slow": {"a": SLOW_TEXT}, "user": {"email": "a@b.example"}})
    fake.tools += [
        {"name": "slow", "inputSchema": {"type": "object"}, "outputSchema": {"properties": {"a": SLOW}}},
        {"name": "user", "inputSchema": {"type": "object"}, "outputSchema": USER},
    ]
    async with over_http(fake) as client:
        await client.tools.list_tools()
        slow = asyncio.create_task(client.tools.execute("slow", deadline_s=3))
        # What is checked in a moment does not wait for it.
        await client.tools.execute("echo", {"message": "ping"})
        assert not slow.done()
        with pytest.raises(ToolTimeout, match="check against the schema") as caught:
            await slow
        assert (caught.value.reason, caught.value.may_have_run) == (Reason.DEADLINE, True)
        assert (await client.tools.execute("user")).structured == {"email": "a@b.example"}
    assert processes() == []


async def test_arguments_whose_check_takes_minutes_are_not_sent_after_the_deadline() -> None:
    fake = FakeMcpServer()
    fake.tools.append({"name": "slow", "inputSchema": {"type": "object", "properties": {"a": SLOW}}})
    async with over_http(fake) as client:
        with pytest.raises(ToolTimeout) as caught:
            await client.tools.execute("slow", {"a": SLOW_TEXT}, deadline_s=2)
        assert caught.value.may_have_run is False
        [record] = client.records
        assert (record["event"], record["attempt"], record["reason"]) == ("ended", 0, Reason.DEADLINE)
    assert fake.calls == []


async def test_a_pattern_that_looks_ahead_is_checked_and_its_fault_named() -> None:
    fake = FakeMcpServer(results={"find": {"email": "nobody at all"}})
    fake.tools.append({"name": "find", "inputSchema": USER, "outputSchema": USER})
    async with over_http(fake) as client:
        with pytest.raises(ToolInvalidArguments, match="/email violates pattern"):
            await client.tools.execute("find", {"email": "a..b@c.example"})
        with pytest.raises(ToolProviderFailure, match="/email violates pattern"):
            await client.tools.execute("find", {"email": "a.b@c.example"})
        # One process for all: the next check does not wait for it to start.
        assert len(processes()) == 1
    assert fake.sent("find") == 1


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "^[a-z]+$"}}}, {"a": "x" * 2_000_001}),
        ({"items": {"anyOf": [{"type": "string"}] * 200}}, ["x"] * 10_000),
        ({"pattern": "^.{1,1000}$"}, "x"),
    ],
    ids=["a large text", "many parts", "a large pattern"],
)
async def test_what_is_no_moments_work_is_checked_there(
    checks: CheckProcess, schema: dict[str, Any], value: Any
) -> None:
    assert await checks.fault(compiled(schema), value, within(60)) is None
    assert len(processes()) == 1


async def test_what_is_a_moments_work_needs_no_process(checks: CheckProcess) -> None:
    check = compiled({"properties": {"day": {"pattern": r"^\d{4}-\d{2}-\d{2}$"}}, "required": ["day"]})
    assert await checks.fault(check, {"day": "2026-11-25"}, within(60)) is None
    assert await checks.fault(check, {}, within(60), is_arguments=True) == "day is missing"
    assert processes() == []


async def test_a_check_that_is_cancelled_or_killed_does_not_hold_up_the_next(checks: CheckProcess) -> None:
    slow, email = compiled(SLOW), compiled(USER)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await checks.fault(slow, SLOW_TEXT, within(600))
    assert processes() == []
    assert await checks.fault(email, {"email": "a@b.example"}, within(60)) is None
    [process] = processes()
    killed = asyncio.create_task(checks.fault(slow, SLOW_TEXT, within(600)))
    process.kill()
    with pytest.raises(ToolProviderFailure, match="did not run or has ended"):
        await killed
    assert await checks.fault(email, {"email": "a@b.example"}, within(60)) is None
