"""A server's schemas: compiled without a network, within limits, and applied in bounded time."""

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relay.client.remote_tools.servers import MAX_ANSWER_BYTES
from relay.client.remote_tools.tool_schemas import (
    MAX_DEPTH,
    MAX_MEMORY_BYTES,
    MAX_SCHEMA_BYTES,
    CheckProcess,
    UnusableSchemaError,
    compiled,
)
from relay.remote_tools import Reason, ToolInvalidArguments, ToolProviderFailure, ToolTimeout
from tests.fakes.guarded import over_http
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.polling import until


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"if": schema}
    return schema


@pytest.mark.holds("SPEC-0004/2.1/contract-validation")
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema.json"},
        {"properties": {"a": {"$ref": "https://evil.example/x"}}},
        {"properties": {"a": [{"$dynamicRef": "file:///etc/passwd"}]}},
        {"$defs": {"a": {}}, "$ref": "other.json#/$defs/a"},
        {"$recursiveRef": "x"},
        {"$schema": "https://evil.example/dialect", "type": "object"},
        {"$ref": "#/$defs/absent"},
        {"type": "no such type"},
        {"pattern": "("},
        {"description": "x" * MAX_SCHEMA_BYTES},
        nested(MAX_DEPTH),
    ],
    ids=lambda schema: str(schema)[:40],
)
def test_a_schema_that_reaches_out_or_exceeds_a_limit_is_not_compiled(schema: dict[str, Any]) -> None:
    with pytest.raises(UnusableSchemaError) as caught:
        compiled(schema)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_references_that_multiply_are_refused() -> None:
    doubled = {f"a{number}": {"allOf": [{"$ref": f"#/$defs/a{number + 1}"}] * 2} for number in range(40)}
    with pytest.raises(UnusableSchemaError, match="too many others"):
        compiled({"$ref": "#/$defs/a0", "$defs": {**doubled, "a40": {}}})


def test_a_schema_with_a_number_that_json_does_not_have_is_refused() -> None:
    with pytest.raises(UnusableSchemaError, match="not JSON"):
        compiled({"default": math.nan})


@pytest.mark.holds("SPEC-0004/3.1/schemas")
def test_the_limits_themselves_are_accepted() -> None:
    rest = len('{"description":""}')
    assert compiled({"description": "x" * (MAX_SCHEMA_BYTES - rest)}).fault(1) is None
    assert compiled(nested(MAX_DEPTH - 1)).fault({}) is None


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_a_reference_within_the_document_is_followed_in_each_dialect(dialect: str) -> None:
    properties = {"a": {"$ref": "#/$defs/n"}}
    check = compiled({"$schema": dialect, "$defs": {"n": {"type": "integer"}}, "properties": properties})
    assert check.fault({"a": 1}) is None
    assert check.fault({"a": "x"}) == "/a violates type"


def test_a_property_may_be_called_as_a_reference_is() -> None:
    assert compiled({"properties": {"$ref": {"type": "string"}}}).fault({"$ref": "x"}) is None


def test_a_fault_names_the_rule_and_the_place_and_nothing_of_the_value() -> None:
    check = compiled({"properties": {"a": {"type": "array", "items": {"maxLength": 3}}}})
    assert check.fault({"a": ["xyz", "a secret"]}) == "/a/1 violates maxLength"


CLOSED = {"additionalProperties": False, "properties": {"message": {"type": "string"}, "count": {}}}


@pytest.mark.parametrize(
    ("schema", "arguments", "fault"),
    [
        (CLOSED, {"mesage": "ping"}, "there is no argument mesage; the nearest is message"),
        (CLOSED | {"required": ["count"]}, {}, "count is missing"),
        (CLOSED, {"message": 7}, "/message violates type"),
        (CLOSED, {"message": "ping"}, None),
        (
            {"properties": {"a": CLOSED}},
            {"a": {"cont": 1}},
            "there is no argument /a/cont; the nearest is count",
        ),
        (
            {"$defs": {"n": CLOSED}, "properties": {"a": {"$ref": "#/$defs/n"}}},
            {"a": {"\x1b": 1}},
            "there is no argument /a/\\x1b; the nearest is message",
        ),
        ({"properties": {}, "additionalProperties": False}, {"any": 1}, "there is no argument any"),
        (
            {"unevaluatedProperties": False, "properties": {"count": {}}},
            {"count": 1, "c": 2},
            "there is no argument c; the nearest is count",
        ),
    ],
)
def test_a_mistaken_argument_is_named_with_the_nearest_that_the_tool_has(
    schema: dict[str, Any], arguments: dict[str, Any], fault: str | None
) -> None:
    assert compiled(schema).fault(arguments, is_arguments=True) == fault


def test_a_pattern_does_not_take_unbounded_time() -> None:
    check = compiled({"type": "string", "pattern": r"^(?=(a+)+$)(a|aa)+\1$"})
    began_s = time.process_time()
    assert check.fault("a" * 5000 + "!") is not None
    # Not a measurement: without the limit it takes longer than the universe is old.
    assert time.process_time() - began_s < 60


def test_a_circle_that_is_applied_twice_at_each_level_takes_no_time_that_doubles() -> None:
    again = {"properties": {"a": {"$ref": "#"}}}
    check = compiled({"type": ["object", "number"], "anyOf": [again, {**again, "minProperties": 1}]})
    value: object = "no number"
    for _ in range(50):
        value = {"a": value}
    assert check.fault(value) == "a rule is violated"
    assert check.fault({"a": {"a": 1}}) is None


def test_a_large_result_of_another_type_takes_no_memory_for_each_part_that_is_wrong() -> None:
    # A validator keeps a kibibyte of each fault: a million of them would end this process.
    check = compiled({"items": {"anyOf": [{"type": "string"}] * 15}})
    assert check.fault([0] * 1_000_000) == "a rule is violated"


def test_a_value_with_too_many_parts_for_a_large_schema_does_not_fit_it() -> None:
    check = compiled({"items": {"anyOf": [{}] * 5000}})
    assert check.fault([0] * 1000) is None
    assert check.fault([0] * 10_000) == "it has too many parts for this schema"


def test_what_is_not_evaluated_elsewhere_may_be_within_itself_a_few_times() -> None:
    def nested(depth: int) -> dict[str, Any]:
        return {"allOf": [nested(depth - 1)], "unevaluatedProperties": {}} if depth else {"type": "object"}

    assert compiled(nested(6)).fault({"a": 1}) is None
    with pytest.raises(UnusableSchemaError, match="too much of it"):
        compiled(nested(20))


# --- checks against a server's schema that take long: they end at the deadline, and nothing else waits


pytestmark = pytest.mark.integration

SLOW = {"allOf": [{"not": {"pattern": "(?=[ab]*c)(?=a)"}}] * 600}
"""Nearly a minute: each pattern tries again at every letter, and all of them are applied."""
SLOW_TEXT = "a" * 9_000
"""Few enough letters to stay below the limit of backtracking, which would end the check with a fault."""
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


async def test_a_result_whose_check_takes_long_ends_at_the_deadline() -> None:
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


async def test_arguments_whose_check_takes_long_are_not_sent_after_the_deadline() -> None:
    fake = FakeMcpServer()
    fake.tools.append({"name": "slow", "inputSchema": {"type": "object", "properties": {"a": SLOW}}})
    async with over_http(fake) as client:
        error = await client.fails(ToolTimeout, "slow", {"a": SLOW_TEXT}, deadline_s=2)
        assert error.may_have_run is False
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


@pytest.mark.parametrize("seconds", [math.inf, 1e12])
async def test_a_check_without_a_deadline_is_made(checks: CheckProcess, seconds: float) -> None:
    assert await checks.fault(compiled(USER), {"email": "a@b.example"}, within(seconds)) is None
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


async def test_a_check_that_needs_too_much_memory_is_a_failure_and_the_next_goes_on(
    checks: CheckProcess,
) -> None:
    email, large = compiled(USER), compiled({"items": {"pattern": "(?=a)"}})
    assert await checks.fault(email, {"email": "a@b.example"}, within(60)) is None
    [process] = processes()
    assert process.rlimit(psutil.RLIMIT_AS) == (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES)
    # What a value may have that fits an answer is checked within it.
    assert await checks.fault(large, [{}] * (MAX_ANSWER_BYTES // 4), within(60)) is None
    used = process.memory_info().vms
    process.rlimit(psutil.RLIMIT_AS, (used, used))
    with pytest.raises(ToolProviderFailure, match="did not run or has ended"):
        await checks.fault(large, ["x" * 64] * 2_000_000, within(60))
    assert await checks.fault(email, {"email": "a@b.example"}, within(60)) is None


PARENT = """
import asyncio, psutil
from relay.client.remote_tools.tool_schemas import CheckProcess
from relay.client.remote_tools.tool_schemas import compiled
from tests.relay.client.remote_tools.test_tool_schemas import EMAIL, SLOW, SLOW_TEXT, within

async def main():
    checks = CheckProcess()
    await checks.fault(compiled({"pattern": EMAIL}), "a@b.example", within(60))
    print(psutil.Process().children()[0].pid, flush=True)
    await asyncio.to_thread(input)
    await checks.fault(compiled(SLOW), SLOW_TEXT, within(3))

asyncio.run(main())
"""


@pytest.mark.parametrize("computes", [False, True], ids=["while it waits", "while it computes"])
async def test_the_process_ends_when_the_one_that_started_it_was_killed(*, computes: bool) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", PARENT),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    if computes:
        before = child.cpu_times().user
        parent.stdin.write(b"\n")
        await until(lambda: child.cpu_times().user > before)
    parent.kill()
    await parent.wait()
    # While it computes it reads nothing, and ends by itself some seconds after its deadline.
    await asyncio.to_thread(child.wait, 60)
