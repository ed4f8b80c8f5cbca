"""Calls end to end over HTTP, in both protocol eras: results, typed errors, repetition, records."""

import asyncio
import json
import math
import os
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from relay.client.remote_tools import client as module
from relay.client.remote_tools.audit import CallAudit, Event, JsonLines, RemoteCall
from relay.client.remote_tools.contracts import PinsError
from relay.remote_tools import (
    AuditFailedError,
    AuditRecord,
    ClientEnvironment,
    HttpServer,
    Permissions,
    Reason,
    Redaction,
    RemoteToolError,
    RemoteTools,
    RetryPolicy,
    Risk,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolRule,
    ToolTimeout,
    ToolUnauthorized,
)
from schemas.addresses import AddressError
from schemas.projection import META_CORRELATION_ID
from schemas.times import SystemMs
from tests.fakes.disk import full_disk
from tests.fakes.guarded import guarded, over_http
from tests.fakes.mcp_server import FAULTS, FakeMcpServer, HttpAnswer
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration

REPEATABLE = (ToolRule("*", idempotent=True, deadline_s=20),)
FAILURES = {
    "drop": (ToolProviderFailure, Reason.CONNECTION_LOST),
    "disconnect": (ToolProviderFailure, Reason.CONNECTION_LOST),
    "garbage": (ToolProviderFailure, Reason.PROTOCOL),
    "compressed": (ToolProviderFailure, Reason.PROTOCOL),
    "huge": (ToolProviderFailure, Reason.TOO_LARGE),
    "wrong_output": (ToolProviderFailure, Reason.RESULT),
    "unauthorized": (ToolUnauthorized, Reason.HTTP_STATUS),
    "rate_limited": (ToolProviderFailure, Reason.HTTP_STATUS),
    "unavailable": (ToolProviderFailure, Reason.HTTP_STATUS),
    "redirect": (ToolProviderFailure, Reason.SECOND_SEND),
    "failing": (ToolProviderFailure, Reason.TOOL_ERROR),
    "asks": (ToolProviderFailure, Reason.PROTOCOL),
    "mismatch": (ToolProviderFailure, Reason.JSONRPC_ERROR),
    "unknown": (ToolNotFound, Reason.JSONRPC_ERROR),
    "rejected": (ToolInvalidArguments, Reason.JSONRPC_ERROR),
    "envelope": (ToolProviderFailure, Reason.TOOL_ERROR),
}


@pytest.fixture(params=[False, True], ids=["modern", "legacy"])
def fake(request: pytest.FixtureRequest) -> FakeMcpServer:
    return FakeMcpServer(legacy=request.param)


@pytest.mark.holds("SPEC-0004/2.1/execution", "SPEC-0004/2.2/compatibility")
async def test_a_call_returns_its_result(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        result = await client.tools.execute("add", {"a": 1, "b": 2})
        assert (result.structured, result.text, result.attempts) == ({"sum": 3}, '{"sum": 3}', 1)


@pytest.mark.parametrize("listed", [{}, {"outputSchema": {"type": "object"}}], ids=["no schema", "a schema"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
async def test_a_result_with_a_number_that_json_does_not_have_is_refused(
    listed: dict[str, Any], value: float
) -> None:
    """A runtime that passes it on to its model's API would fail there."""
    tool = {"name": "measure", "inputSchema": {"type": "object"}, **listed}
    async with over_http(FakeMcpServer(tools=[tool], results={"measure": {"value": value}})) as client:
        error = await client.fails(ToolProviderFailure, "measure")
    assert (error.reason, error.may_have_run) == (Reason.RESULT, True)


@pytest.mark.holds("SPEC-0004/5/offline-conformance")
def test_every_fault_of_the_fake_is_one_of_the_five_errors_or_tested_by_itself() -> None:
    assert set(FAULTS) - set(FAILURES) == {"delay"}


@pytest.mark.holds(
    "SPEC-0004/2.1/contract-validation",
    "SPEC-0004/3.3/unauthorized",
    "SPEC-0004/3.3/tool-not-found",
    "SPEC-0004/3.3/invalid-arguments",
    "SPEC-0004/3.3/provider-failure",
    "SPEC-0004/3.5/non-idempotent-not-retried",
    "SPEC-0004/5/offline-conformance",
)
@pytest.mark.parametrize("name", FAILURES)
async def test_each_fault_is_a_typed_error_of_a_call_that_is_sent_once_and_the_connection_goes_on(
    fake: FakeMcpServer, name: str
) -> None:
    expected, reason = FAILURES[name]
    async with over_http(fake) as client:
        error = await client.fails(RemoteToolError, name)
        assert (type(error), error.reason) == (expected, reason)
        assert fake.sent(name) == 1
        assert [record["event"] for record in client.records] == ["started", "ended"]
        assert error.correlation_id == client.records[-1]["correlation_id"]
        assert error.suggested_fix.endswith(".")
        assert str(error).isprintable()
        assert (await client.tools.execute("echo", {"message": "ping"})).structured == {"message": "ping"}


@pytest.mark.holds("SPEC-0004/3.5/idempotent-may-retry")
@pytest.mark.parametrize("name", ["drop", "disconnect", "unavailable", "rate_limited", "envelope"])
async def test_an_idempotent_call_is_repeated_after_a_transient_failure_under_one_key(
    fake: FakeMcpServer, name: str
) -> None:
    async with over_http(fake, rules=REPEATABLE) as client:
        result = await client.tools.execute(name, {"times": 2})
        assert (result.attempts, fake.sent(name)) == (3, 3)
        keys = {call["_meta"]["edge-kubelet/idempotency-key"] for call in fake.calls}
        assert len(keys) == 1
        assert [record["attempt"] for record in client.records] == [1, 1, 2, 2, 3, 3]


async def test_attempts_end(fake: FakeMcpServer) -> None:
    async with over_http(fake, rules=REPEATABLE, retries=RetryPolicy(attempts=3)) as client:
        error = await client.fails(RemoteToolError, "unavailable")
        assert (fake.sent("unavailable"), error.code, error.retryable) == (3, 503, True)


@pytest.mark.holds("SPEC-0004/3.5/idempotent-may-retry")
@pytest.mark.parametrize(
    "name", ["rejected", "unknown", "failing", "unauthorized", "wrong_output", "garbage"]
)
async def test_what_is_not_transient_is_not_repeated(fake: FakeMcpServer, name: str) -> None:
    async with over_http(fake, rules=REPEATABLE) as client:
        await client.fails(RemoteToolError, name)
        assert fake.sent(name) == 1


@pytest.mark.holds("SPEC-0004/3.5/idempotent-may-retry")
async def test_a_retry_waits_at_least_as_long_as_the_server_states(fake: FakeMcpServer) -> None:
    async with over_http(fake, rules=REPEATABLE) as client:
        await client.tools.execute("rate_limited", {"times": 1})
        assert client.pauses.slept == [1 + 0.1 * 0.5]


@pytest.mark.holds("SPEC-0004/3.5/idempotent-may-retry")
async def test_no_retry_begins_after_the_deadline(fake: FakeMcpServer) -> None:
    slow = RetryPolicy(first_delay_s=1000, longest_delay_s=1000)
    async with over_http(fake, rules=REPEATABLE, retries=slow) as client:
        error = await client.fails(RemoteToolError, "rate_limited")
        assert (fake.sent("rate_limited"), error.retry_after_ms) == (1, 1000)
        assert client.pauses.slept == []


@pytest.mark.holds("SPEC-0004/2.2/resilience", "SPEC-0004/3.3/timeout")
async def test_a_call_ends_at_the_callers_deadline(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        await client.tools.list_tools()
        error = await client.fails(RemoteToolError, "delay", deadline_s=0.1)
        assert (type(error), error.may_have_run, error.retryable) == (ToolTimeout, True, False)
        assert client.records[-1]["reason"] == Reason.DEADLINE


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
@pytest.mark.parametrize("bad", [float("nan"), -1.0])
async def test_a_deadline_that_is_no_time_is_refused_and_recorded(fake: FakeMcpServer, bad: float) -> None:
    async with over_http(fake) as client:
        await client.tools.list_tools()
        error = await client.fails(RemoteToolError, "echo", {"message": "ping"}, deadline_s=bad)
        assert (type(error), error.reason) == (ToolInvalidArguments, Reason.ARGUMENTS)
        [record] = client.records
        assert (record["event"], record["reason"]) == ("refused", "arguments")
        with pytest.raises(ToolInvalidArguments):
            await client.tools.list_tools(deadline_s=bad)
    assert fake.calls == []


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_an_exception_that_nothing_expects_is_a_typed_error_and_recorded(
    fake: FakeMcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise LookupError("Bearer abcdefghijklmnop")

    monkeypatch.setattr(module, "_send", broken)
    async with over_http(fake) as client:
        error = await client.fails(RemoteToolError, "echo", {"message": "ping"})
        assert (type(error), error.may_have_run) == (ToolProviderFailure, True)
        assert "LookupError" in str(error)
        assert "abcdefghijklmnop" not in str(error)
        assert [record["event"] for record in client.records] == ["started", "ended"]
        assert client.records[-1]["reason"] == Reason.PROTOCOL


async def test_what_an_earlier_attempt_may_have_done_is_said_of_the_last_one(fake: FakeMcpServer) -> None:
    def refused_next() -> float:
        """Is drawn before the second attempt, which does not reach the tool; the first may have."""
        fake.next_answer = HttpAnswer(401)
        return 0.5

    environment = ClientEnvironment(chance=refused_next)
    async with over_http(fake, rules=REPEATABLE, environment=environment) as client:
        error = await client.fails(RemoteToolError, "unavailable")
        assert fake.sent("unavailable") == 1
        assert (type(error), error.may_have_run) == (ToolUnauthorized, True)


@pytest.mark.holds("SPEC-0004/2.2/resilience")
async def test_a_call_ends_at_the_contracts_deadline_if_that_is_sooner(fake: FakeMcpServer) -> None:
    async with over_http(fake, rules=(ToolRule("delay", deadline_s=0.1),)) as client:
        assert isinstance(await client.fails(RemoteToolError, "delay", deadline_s=100), ToolTimeout)


@pytest.mark.holds("SPEC-0004/5/audit")
async def test_a_cancelled_call_is_recorded_and_stays_cancelled(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        call = asyncio.create_task(client.tools.execute("delay"))
        await asyncio.wait_for(fake.arrived.wait(), 30)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.records[-1]["reason"] == Reason.CANCELLED
        assert (await client.tools.execute("echo", {"message": "ping"})).structured == {"message": "ping"}


@pytest.mark.holds("SPEC-0004/2.1/correlation", "SPEC-0004/3.2/correlation-headers", "SPEC-0004/5/audit")
async def test_the_correlation_id_is_in_meta_header_and_every_record(fake: FakeMcpServer) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with over_http(fake) as client:
        result = await client.tools.execute(
            "echo", {"message": "ping"}, correlation_id="order-17", traceparent=trace
        )
        [meta] = [call["_meta"] for call in fake.calls]
        assert meta["edge-kubelet/correlation-id"] == fake.heads[0]["x-correlation-id"] == "order-17"
        assert meta["traceparent"] == fake.heads[0]["traceparent"] == trace
        assert result.correlation_id == "order-17"
        assert {record["correlation_id"] for record in client.records} == {"order-17"}


@pytest.mark.holds("SPEC-0004/3.2/correlation-headers")
@pytest.mark.parametrize("bad", ["a\r\nX-Evil: 1", "", "a" * 65, "ü"])
async def test_a_malformed_correlation_id_is_refused_and_recorded_under_another(
    fake: FakeMcpServer, bad: str
) -> None:
    async with over_http(fake) as client:
        error = await client.fails(ToolInvalidArguments, "echo", {"message": "ping"}, correlation_id=bad)
        assert error.reason is Reason.CORRELATION_ID
        [record] = client.records
        assert (record["event"], record["reason"]) == ("refused", "correlation_id")
        assert record["correlation_id"] == error.correlation_id != bad
        assert fake.heads == []


@pytest.mark.parametrize("bad", ["a\r\nX-Evil: 1", "", "\u00fc"])
async def test_a_malformed_traceparent_is_replaced_and_what_is_sent_is_recorded(
    fake: FakeMcpServer, bad: str
) -> None:
    async with over_http(fake) as client:
        await client.tools.execute("echo", {"message": "ping"}, traceparent=bad)
        sent = fake.heads[0]["traceparent"]
        assert sent.startswith("00-")
        assert "x-evil" not in fake.heads[0]
        assert [record["traceparent"] for record in client.records] == [sent, sent]


@pytest.mark.parametrize(
    ("sent", "remote"),
    [("01HZX9K3M4P7Q8R9S0T1V2W3XY", "01HZX9K3M4P7Q8R9S0T1V2W3XY"), ("a\x1b", None), (5, None)],
)
async def test_the_id_of_a_success_at_the_server_is_in_result_and_record(
    fake: FakeMcpServer, sent: object, remote: str | None
) -> None:
    fake.result_meta = {META_CORRELATION_ID: sent}
    async with over_http(fake) as client:
        result = await client.tools.execute("echo", {"message": "ping"})
        assert result.remote_correlation_id == remote
        assert client.records[-1].get("remote_correlation_id") == remote


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_started_is_written_before_the_first_byte_leaves(fake: FakeMcpServer) -> None:
    events: list[str] = []

    def sink(record: AuditRecord) -> None:
        events.append(f"{record['event']}, {fake.sent('echo')} sent")

    async with over_http(fake, audit=sink) as client:
        await client.tools.execute("echo", {"message": "ping"})
    assert events == ["started, 0 sent", "ended, 1 sent"]


@pytest.mark.holds("SPEC-0004/3.2/audit-events", "SPEC-0004/4/c-high-security")
async def test_nothing_is_sent_if_its_record_cannot_be_written(fake: FakeMcpServer) -> None:
    def sink(record: AuditRecord) -> None:
        raise OSError(28, f"no space for {record['event']}")

    async with over_http(fake, audit=sink) as client:
        with pytest.raises(AuditFailedError):
            await client.tools.execute("echo", {"message": "ping"})
    assert fake.calls == []


@pytest.mark.holds("SPEC-0004/2.1/correlation")
async def test_calls_at_once_do_not_mix(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        results = await asyncio.gather(
            *(
                client.tools.execute("add", {"a": number, "b": 0}, correlation_id=f"n{number}")
                for number in range(20)
            )
        )
        assert [result.structured["sum"] for result in results] == list(range(20))
        sent = {call["arguments"]["a"]: call["_meta"]["edge-kubelet/correlation-id"] for call in fake.calls}
        assert sent == {number: f"n{number}" for number in range(20)}
        by_header = [head["x-correlation-id"] for head in fake.heads]
        assert sorted(by_header) == sorted(f"n{number}" for number in range(20))


async def test_progress_is_passed_on(fake: FakeMcpServer) -> None:
    seen: list[tuple[float, float | None, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        seen.append((progress, total, message))

    async with over_http(fake) as client:
        result = await client.tools.execute("echo", {"message": "ping"}, on_progress=note)
        assert result.structured == {"message": "ping"}
    assert seen == [(1, 2, None), (2, 2, "done")]


async def test_the_error_of_a_relay_keeps_code_delay_and_correlation_id(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        error = await client.fails(RemoteToolError, "envelope")
        assert (error.code, error.retry_after_ms, error.retryable) == ("E_NODE_OFFLINE", 250, True)
        assert error.remote_correlation_id == "01HZX9K3M4P7Q8R9S0T1V2W3XY"
        assert client.records[-1]["remote_correlation_id"] == error.remote_correlation_id
        assert error.may_have_run is False


@pytest.mark.holds("SPEC-0004/3.4/redaction")
async def test_a_text_of_the_server_is_redacted_in_an_error(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        error = await client.fails(RemoteToolError, "failing")
        assert "abcdefghijklmnop" not in str(error)
        assert "[redacted]" in str(error)


POLICY = RetryPolicy(attempts=5, first_delay_s=0.1, longest_delay_s=1.0)


@pytest.mark.holds("SPEC-0004/2.2/resilience")
@pytest.mark.parametrize("chance", [0.0, 0.5])
def test_delays_are_chosen_from_zero_to_a_bound_that_doubles(chance: float) -> None:
    backoff = POLICY.backoff(lambda: chance)
    delays_s = [backoff.next_s() for _ in range(7)]
    assert delays_s == pytest.approx([bound_s * chance for bound_s in (0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0)])
    assert RetryPolicy(first_delay_s=10, longest_delay_s=5).backoff(lambda: 1.0).next_s() == 5


# --- the life of a client: what is shown of a server's tools, and what remains when it is closed


PING = {"message": "ping"}


async def test_a_model_is_shown_only_what_it_may_call() -> None:
    fake = FakeMcpServer()
    permissions = Permissions(allow=("echo", "add", "delay"), max_risk=Risk.READ)
    async with over_http(fake, permissions=permissions, rules=(ToolRule("add", risk=Risk.READ),)) as client:
        assert [contract.name for contract in await client.tools.list_tools()] == ["add"]
        survey = {item.contract.name: item.refusal for item in await client.tools.survey()}
    assert set(survey) == {tool["name"] for tool in fake.tools}
    reasons = {name: refusal.reason for name, refusal in survey.items() if refusal}
    assert (reasons["echo"], reasons["drop"]) == (Reason.RISK, Reason.ALLOWLIST)
    assert "add" not in reasons


async def test_a_closed_client_connects_again() -> None:
    fake = FakeMcpServer()
    async with over_http(fake) as client:
        await client.tools.execute("echo", PING)
        await client.tools.close()
        await client.tools.close()
        await client.tools.execute("echo", PING)
    assert (fake.opened, fake.sent("echo")) == (2, 2)


async def test_nothing_stays_open(tmp_path: Path) -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
        async with RemoteTools(
            url, audit=tmp_path / "calls", permissions=Permissions(("*",), Risk.ADMIN)
        ) as tools:
            await tools.execute("echo", PING)
            assert len(os.listdir("/proc/self/fd")) > before  # noqa: PTH208 - as above
        tasks = asyncio.all_tasks()
    assert not [task for task in tasks if "Connection" in repr(task)]
    assert len(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208 - as above


async def test_a_tool_that_is_not_listed_is_not_accepted() -> None:
    async with over_http(FakeMcpServer()) as client:
        with pytest.raises(ToolNotFound):
            await client.tools.accept("nothing")


async def test_a_list_that_does_not_end_in_time_is_a_timeout() -> None:
    fake = FakeMcpServer(silent=True)
    async with over_http(fake) as client:
        with pytest.raises(ToolTimeout) as caught:
            await client.tools.list_tools(deadline_s=0.2)
    assert caught.value.may_have_run is False


async def test_a_slow_server_costs_a_call_its_deadline_and_nothing_of_it_is_sent(tmp_path: Path) -> None:
    fake = FakeMcpServer(silent=True)
    file = tmp_path / "calls"
    async with over_http(fake, audit=file) as client:
        with pytest.raises(ToolTimeout):
            await client.tools.execute("echo", PING, deadline_s=0.2)
    assert fake.calls == []
    assert json.loads(file.read_bytes())["reason"] == Reason.DEADLINE


@pytest.mark.parametrize("stated", [{"deadline_s": 0}, {"rules": (ToolRule("ec*", deadline_s=0),)}])
async def test_the_operators_deadline_bounds_the_listing_before_a_call(stated: dict[str, Any]) -> None:
    fake = FakeMcpServer()
    async with over_http(fake, **stated) as client:
        with pytest.raises(ToolTimeout, match="did not list"):
            await client.tools.execute("echo", PING, deadline_s=100)
        with pytest.raises(ToolTimeout, match="did not list"):
            await client.tools.execute("echo", PING)
        assert fake.listed == 0


def test_a_url_that_is_not_encrypted_is_refused_when_the_client_is_made(tmp_path: Path) -> None:
    with pytest.raises(AddressError):
        RemoteTools("http://mcp.example/mcp", audit=tmp_path / "calls")


# --- records: what each holds, where they are written, and what happens when they cannot be


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CALL = RemoteCall("01HZ", "echo", {}, TRACE, "read")
NOW_MS = SystemMs(1_795_000_000_000)


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("ascii").splitlines()]


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_a_call_leaves_two_lines_in_a_private_file_and_a_refusal_one(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    async with over_http(FakeMcpServer(), audit=file) as client:
        await client.tools.execute("echo", {"message": "a message"})
        with pytest.raises(RemoteToolError):
            await client.tools.execute("echo", {"message": 5})
    started, ended, refused = lines_of(file)
    assert started["correlation_id"] == ended["correlation_id"] != refused["correlation_id"]
    assert {name: started[name] for name in ("event", "decision", "tool", "attempt", "risk")} == {
        "event": "started",
        "decision": "allowed",
        "tool": "echo",
        "attempt": 1,
        "risk": "admin",
    }
    assert (ended["outcome"], ended["duration_ms"] > 0) == ("ok", True)
    assert (refused["decision"], refused["reason"]) == ("refused", "arguments")
    assert refused["duration_ms"] > 0


def outcome_of(records: list[AuditRecord]) -> tuple[str, str, int, str]:
    [record] = records
    assert record["duration_ms"] >= 0
    return record["event"], record["decision"], record["attempt"], record["reason"]


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_a_call_that_is_cancelled_while_its_contract_loads_is_recorded() -> None:
    async with over_http(FakeMcpServer(silent=True)) as client:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await client.tools.execute("echo", {"message": "ping"})
        assert outcome_of(client.records) == ("ended", "allowed", 0, "cancelled")


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_a_server_that_is_not_reached_has_refused_nothing() -> None:
    async with guarded(HttpServer(f"http://127.0.0.1:{unused_port()}/mcp")) as client:
        error = await client.fails(RemoteToolError, "echo", {"message": "ping"})
        assert (error.may_have_run, error.retryable) == (False, True)
        assert outcome_of(client.records) == ("ended", "allowed", 0, "unreachable")


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_a_call_that_is_blocked_by_a_damaged_file_of_pins_is_recorded(tmp_path: Path) -> None:
    pins = tmp_path / "pins.json"
    fake = FakeMcpServer()
    async with over_http(fake, pins=pins) as client:
        pins.write_text("{")
        pins.chmod(0o600)
        with pytest.raises(PinsError):
            await client.tools.execute("echo", {"message": "ping"})
        assert outcome_of(client.records) == ("refused", "refused", 0, "pin")
    assert fake.calls == []


@pytest.mark.holds("SPEC-0004/3.2/audit-events")
async def test_a_name_that_is_no_text_is_refused_and_recorded() -> None:
    name: Any = {"name": "echo"}
    async with over_http(FakeMcpServer()) as client:
        await client.fails(ToolUnauthorized, name)
        assert outcome_of(client.records) == ("refused", "refused", 0, "allowlist")


@pytest.mark.holds("SPEC-0004/3.4/redaction")
async def test_arguments_and_results_are_left_out_unless_the_operator_gives_rules(tmp_path: Path) -> None:
    for redaction in (None, Redaction()):
        file = tmp_path / str(redaction is None)
        async with over_http(FakeMcpServer(), audit=file, redaction=redaction) as client:
            await client.tools.execute("echo", {"message": "Bearer abcdefgh12345678"})
        started, ended = lines_of(file)
        if redaction is None:
            assert not {"arguments", "result"} & {*started, *ended}
        else:
            assert started["arguments"] == ended["result"] == {"message": "[redacted]"}


def test_the_file_is_private_and_grows_by_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    for _ in range(2):
        CallAudit(JsonLines(file, time.monotonic), None, lambda: NOW_MS).started(CALL, 1)
    assert len(lines_of(file)) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_rotated_is_replaced_within_a_second(tmp_path: Path) -> None:
    file, old = tmp_path / "calls.jsonl", tmp_path / "calls.1"
    sink = JsonLines(file, count(0, 2).__next__)
    audit = CallAudit(sink, None, lambda: NOW_MS)
    audit.started(CALL, 1)
    file.rename(old)
    audit.ended(CALL, 1, 0.5)
    assert [lines_of(path)[0]["event"] for path in (old, file)] == ["started", "ended"]
    file.rename(tmp_path / "calls.2")
    file.write_text("")
    audit.started(CALL, 2)
    sink.close()
    audit.ended(CALL, 2, 0.5)
    sink.close()
    assert [line["attempt"] for line in lines_of(file)] == [2, 2]


def test_what_was_written_in_part_takes_no_later_record_with_it(tmp_path: Path) -> None:
    file = tmp_path / "calls.jsonl"
    sink = JsonLines(file, time.monotonic)
    audit = CallAudit(sink, None, lambda: NOW_MS)
    audit.started(CALL, 1)
    with full_disk(file.stat().st_size + 20), pytest.raises(AuditFailedError):
        audit.ended(CALL, 1, 0.5)
    audit.started(CALL, 2)
    sink.close()
    first, torn, last = file.read_text("ascii").splitlines()
    assert [json.loads(line)["attempt"] for line in (first, last)] == [1, 2]
    assert len(torn) == 20


@pytest.mark.parametrize("event", ["refused", "started", "ended"])
def test_a_record_that_cannot_be_written_is_an_error(event: str) -> None:
    def sink(_: AuditRecord) -> None:
        raise ZeroDivisionError

    audit = CallAudit(sink, None, lambda: NOW_MS)
    with pytest.raises(AuditFailedError, match=event):
        {
            "refused": lambda: audit.refused(CALL, 0.5, "risk"),
            "started": lambda: audit.started(CALL, 1),
            "ended": lambda: audit.ended(CALL, 1, 0.5),
        }[event]()


def test_a_link_in_the_place_of_the_file_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "other")
    with pytest.raises(AuditFailedError):
        CallAudit(JsonLines(tmp_path / "link", time.monotonic), None, lambda: NOW_MS).started(CALL, 1)
    assert not (tmp_path / "other").exists()


def test_a_large_value_is_replaced_and_a_hostile_name_is_printable() -> None:
    records: list[AuditRecord] = []
    audit = CallAudit(records.append, Redaction(), lambda: NOW_MS)
    audit.started(RemoteCall("01HZ", "\x1b[2J", {"a": ["x" * 100] * 1000}, TRACE), 1)
    assert records == [
        {
            "time_ms": NOW_MS,
            "event": Event.STARTED,
            "decision": "allowed",
            "correlation_id": "01HZ",
            "tool": "\\x1b[2J",
            "attempt": 1,
            "traceparent": TRACE,
            "arguments": "[more than 16384 bytes]",
        }
    ]
