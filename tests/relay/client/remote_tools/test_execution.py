"""Calls end to end over HTTP, in both protocol eras: results, typed errors, repetition, records."""

import asyncio
from typing import Any

import pytest

from relay.client.remote_tools import execution
from relay.remote_tools import (
    AuditFailedError,
    AuditRecord,
    ClientEnvironment,
    Reason,
    RemoteToolError,
    RetryPolicy,
    ToolInvalidArguments,
    ToolNotFound,
    ToolProviderFailure,
    ToolRule,
    ToolTimeout,
    ToolUnauthorized,
)
from schemas.projection import META_CORRELATION_ID
from tests.fakes.guarded import over_http
from tests.fakes.mcp_server import FAULTS, FakeMcpServer, HttpAnswer

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


async def failed(tools: Any, name: str, arguments: Any = None, **options: Any) -> RemoteToolError:
    with pytest.raises(RemoteToolError) as caught:
        await tools.execute(name, arguments, **options)
    return caught.value


async def test_a_call_returns_its_result(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        result = await client.tools.execute("add", {"a": 1, "b": 2})
        assert (result.structured, result.text, result.attempts) == ({"sum": 3}, '{"sum": 3}', 1)


def test_every_fault_of_the_fake_is_one_of_the_five_errors_or_tested_by_itself() -> None:
    assert set(FAULTS) - set(FAILURES) == {"delay"}


@pytest.mark.parametrize("name", FAILURES)
async def test_each_fault_is_a_typed_error_and_the_connection_goes_on(fake: FakeMcpServer, name: str) -> None:
    expected, reason = FAILURES[name]
    async with over_http(fake) as client:
        error = await failed(client.tools, name)
        assert (type(error), error.reason) == (expected, reason)
        assert error.correlation_id == client.records[-1]["correlation_id"]
        assert error.suggested_fix.endswith(".")
        assert str(error).isprintable()
        assert (await client.tools.execute("echo", {"message": "ping"})).structured == {"message": "ping"}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_call_that_is_not_idempotent_is_sent_once_whatever_happens(
    fake: FakeMcpServer, name: str
) -> None:
    async with over_http(fake) as client:
        await failed(client.tools, name)
        assert fake.sent(name) == 1
        assert [record["event"] for record in client.records] == ["started", "ended"]


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
        error = await failed(client.tools, "unavailable")
        assert (fake.sent("unavailable"), error.code, error.retryable) == (3, 503, True)


@pytest.mark.parametrize(
    "name", ["rejected", "unknown", "failing", "unauthorized", "wrong_output", "garbage"]
)
async def test_what_is_not_transient_is_not_repeated(fake: FakeMcpServer, name: str) -> None:
    async with over_http(fake, rules=REPEATABLE) as client:
        await failed(client.tools, name)
        assert fake.sent(name) == 1


async def test_a_retry_waits_at_least_as_long_as_the_server_states(fake: FakeMcpServer) -> None:
    async with over_http(fake, rules=REPEATABLE) as client:
        await client.tools.execute("rate_limited", {"times": 1})
        assert client.pauses.slept == [1 + 0.1 * 0.5]


async def test_no_retry_begins_after_the_deadline(fake: FakeMcpServer) -> None:
    slow = RetryPolicy(first_delay_s=1000, longest_delay_s=1000)
    async with over_http(fake, rules=REPEATABLE, retries=slow) as client:
        error = await failed(client.tools, "rate_limited")
        assert (fake.sent("rate_limited"), error.retry_after_ms) == (1, 1000)
        assert client.pauses.slept == []


async def test_a_call_ends_at_the_callers_deadline(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        await client.tools.list_tools()
        error = await failed(client.tools, "delay", deadline_s=0.1)
        assert (type(error), error.may_have_run, error.retryable) == (ToolTimeout, True, False)
        assert client.records[-1]["reason"] == Reason.DEADLINE


@pytest.mark.parametrize("bad", [float("nan"), -1.0])
async def test_a_deadline_that_is_no_time_is_refused_and_recorded(fake: FakeMcpServer, bad: float) -> None:
    async with over_http(fake) as client:
        await client.tools.list_tools()
        error = await failed(client.tools, "echo", {"message": "ping"}, deadline_s=bad)
        assert (type(error), error.reason) == (ToolInvalidArguments, Reason.ARGUMENTS)
        [record] = client.records
        assert (record["event"], record["reason"]) == ("refused", "arguments")
        with pytest.raises(ToolInvalidArguments):
            await client.tools.list_tools(deadline_s=bad)
    assert fake.calls == []


async def test_an_exception_that_nothing_expects_is_a_typed_error_and_recorded(
    fake: FakeMcpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: object) -> None:
        raise LookupError("Bearer abcdefghijklmnop")

    monkeypatch.setattr(execution, "_request", broken)
    async with over_http(fake) as client:
        error = await failed(client.tools, "echo", {"message": "ping"})
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
        error = await failed(client.tools, "unavailable")
        assert fake.sent("unavailable") == 1
        assert (type(error), error.may_have_run) == (ToolUnauthorized, True)


async def test_a_call_ends_at_the_contracts_deadline_if_that_is_sooner(fake: FakeMcpServer) -> None:
    async with over_http(fake, rules=(ToolRule("delay", deadline_s=0.1),)) as client:
        assert isinstance(await failed(client.tools, "delay", deadline_s=100), ToolTimeout)


async def test_a_cancelled_call_is_recorded_and_stays_cancelled(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        call = asyncio.create_task(client.tools.execute("delay"))
        await asyncio.wait_for(fake.arrived.wait(), 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert client.records[-1]["reason"] == Reason.CANCELLED
        assert (await client.tools.execute("echo", {"message": "ping"})).structured == {"message": "ping"}


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


@pytest.mark.parametrize("bad", ["a\r\nX-Evil: 1", "", "a" * 65, "ü"])
async def test_a_malformed_correlation_id_is_refused_and_recorded_under_another(
    fake: FakeMcpServer, bad: str
) -> None:
    async with over_http(fake) as client:
        with pytest.raises(ToolInvalidArguments) as caught:
            await client.tools.execute("echo", {"message": "ping"}, correlation_id=bad)
        assert caught.value.reason is Reason.CORRELATION_ID
        [record] = client.records
        assert (record["event"], record["reason"]) == ("refused", "correlation_id")
        assert record["correlation_id"] == caught.value.correlation_id != bad
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


async def test_started_is_written_before_the_first_byte_leaves(fake: FakeMcpServer) -> None:
    events: list[str] = []

    def sink(record: AuditRecord) -> None:
        events.append(f"{record['event']}, {fake.sent('echo')} sent")

    async with over_http(fake, audit=sink) as client:
        await client.tools.execute("echo", {"message": "ping"})
    assert events == ["started, 0 sent", "ended, 1 sent"]


async def test_nothing_is_sent_if_its_record_cannot_be_written(fake: FakeMcpServer) -> None:
    def sink(record: AuditRecord) -> None:
        raise OSError(28, f"no space for {record['event']}")

    async with over_http(fake, audit=sink) as client:
        with pytest.raises(AuditFailedError):
            await client.tools.execute("echo", {"message": "ping"})
    assert fake.calls == []


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
        error = await failed(client.tools, "envelope")
        assert (error.code, error.retry_after_ms, error.retryable) == ("E_NODE_OFFLINE", 250, True)
        assert error.remote_correlation_id == "01HZX9K3M4P7Q8R9S0T1V2W3XY"
        assert client.records[-1]["remote_correlation_id"] == error.remote_correlation_id
        assert error.may_have_run is False


async def test_a_text_of_the_server_is_redacted_in_an_error(fake: FakeMcpServer) -> None:
    async with over_http(fake) as client:
        error = await failed(client.tools, "failing")
        assert "abcdefghijklmnop" not in str(error)
        assert "[redacted]" in str(error)


async def test_a_server_that_is_not_there_is_a_failure_that_sent_nothing() -> None:
    fake = FakeMcpServer()
    async with fake.over_http() as url:
        pass
    async with over_http(fake) as client:
        await client.tools.list_tools()
        client.tools._connection.server = type(client.tools._connection.server)(url)  # noqa: SLF001 - it moved
        await client.tools.close()
        error = await failed(client.tools, "echo", {"message": "ping"})
        assert (error.reason, error.may_have_run, error.retryable) == (Reason.UNREACHABLE, False, True)


POLICY = RetryPolicy(attempts=5, first_delay_s=0.1, longest_delay_s=1.0)


@pytest.mark.parametrize(
    ("attempt", "bound_s"), [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (1000, 1.0)]
)
def test_delays_are_chosen_from_zero_to_a_bound_that_doubles(attempt: int, bound_s: float) -> None:
    assert POLICY.delay_s(attempt, None, lambda: 0.0) == 0
    assert POLICY.delay_s(attempt, None, lambda: 0.5) == pytest.approx(bound_s / 2)


def test_the_servers_delay_is_a_minimum() -> None:
    assert POLICY.delay_s(1, 3000, lambda: 0.0) == 3
    assert POLICY.delay_s(1, 3000, lambda: 0.5) == pytest.approx(3.05)
