import io
import json
from typing import Any, Protocol
from unittest.mock import ANY

import pytest

from relay.auth.agent_tokens import Caller
from relay.calls.access_log import AccessLog
from relay.calls.envelope import Call
from relay.calls.executor import CallRecord, CallRequest
from relay.calls.gateway import CallGateway
from relay.calls.results import CallAnswer
from relay.limits.rate_limits import Allowance
from schemas.errors import Canonical, Failure, ToolError
from schemas.projection import META_CORRELATION_ID, META_STEP_ID, META_TASK_ID, META_TRACEPARENT
from tests.fakes.callers import call_of, principal_of
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
FIELDS = [
    *("ts", "level", "component", "event", "correlation_id"),
    *("agentId", "taskId", "stepId", "transport", "route", "method", "status", "durationMs"),
    *("attempt", "inputBytes", "outputBytes", "requestId", "traceId", "spanId", "metadata", "error"),
]
ANSWER = CallAnswer("x" * 100, result={})
NASTY = '\n{"ts":1}\x1b[31m\u202e\x00'


def message(request_id: object = 1, name: object = ECHO_NAME, **meta: object) -> dict[str, Any]:
    params = {"name": name, "arguments": {"message": "correct horse"}, "_meta": meta}
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}


class Written(Protocol):
    """Writes a line, and returns what it says."""

    def __call__(self, document: dict[str, Any] | None = None, **members: Any) -> dict[str, Any]: ...


@pytest.fixture
def written(hub: Hub) -> Written:
    """Return what writes the line of a call that went well, but for what it is given."""
    hub.connect(hub.ca.issue())
    principal = hub.authenticator.identify(hub.token())
    tool = hub.fleet.resolve(ECHO_NAME, principal.rights)

    def write(
        document: dict[str, Any] | None = None,
        *,
        transport: str = "http",
        answer: CallAnswer | None = ANSWER,
        now_ms: int = NOW_MS,
        **members: Any,
    ) -> dict[str, Any]:
        stream = io.StringIO()
        caller = Caller(principal_of(""), transport, {}, size=200)
        request = CallRequest(caller, Call(message() if document is None else document))
        known: dict[str, Any] = {"principal": principal, "tool": tool}
        record = CallRecord(hub.ulids.new(), request.call, 0.0, **(known | members))
        AccessLog(stream).write(request, record, answer, 0.0123456, now_ms)
        text = stream.getvalue()
        assert text.endswith("\n")
        assert text[:-1].isprintable()
        assert text.isascii()
        line: dict[str, Any] = json.loads(text)
        return line

    return write


@pytest.mark.holds("ENVELOPE/log-fields")
def test_a_line_has_these_fields_and_no_others(written: Written) -> None:
    line = written()
    assert list(line) == FIELDS
    assert line == {
        "ts": "2025-10-09T08:53:20.000Z",
        "level": "info",
        "component": "relay",
        "event": "call ended",
        "correlation_id": ANY,
        "agentId": "agent-1",
        "taskId": None,
        "stepId": None,
        "transport": "http",
        "route": "/mcp",
        "method": "tools/call",
        "status": 200,
        "durationMs": 12.346,
        "attempt": 1,
        "inputBytes": 200,
        "outputBytes": 100,
        "requestId": 1,
        "traceId": None,
        "spanId": None,
        "metadata": {
            "schemaVersion": "tool_io@1.0.0",
            "deterministic": True,
            "toolId": f"mcp.tool:{ECHO_NAME}",
        },
        "error": None,
    }


def test_a_line_has_the_id_that_the_caller_gave_besides_the_relays_own(written: Written) -> None:
    line = written(message(**{META_CORRELATION_ID: "order-17"}))
    assert line["caller_correlation_id"] == "order-17" != line["correlation_id"]
    assert "caller_correlation_id" not in written(message(**{META_CORRELATION_ID: NASTY}))


@pytest.mark.parametrize(
    ("now_ms", "shown"),
    [
        (NOW_MS + 7, "2025-10-09T08:53:20.007Z"),
        (NOW_MS + 999, "2025-10-09T08:53:20.999Z"),
        (NOW_MS + 1000, "2025-10-09T08:53:21.000Z"),
    ],
)
def test_the_time_has_its_milliseconds(written: Written, now_ms: int, shown: str) -> None:
    assert written(now_ms=now_ms)["ts"] == shown


@pytest.mark.parametrize("failure", Failure)
def test_a_failure_is_told_by_its_canonical_code_and_its_status(written: Written, failure: Failure) -> None:
    line = written(error=ToolError(failure))
    assert line["status"] == failure.value.http_status
    assert line["error"] == {
        "canonical": failure.value.canonical.name,
        "message": failure.value.message,
    }
    assert line["error"]["canonical"] in Canonical.__members__


def test_where_more_is_known_of_a_failure_that_is_told(written: Written) -> None:
    error = ToolError(Failure.ENVELOPE_INVALID, "The request is not a call: / violates required.")
    assert written(error=error)["error"]["message"] == "The request is not a call: / violates required."


@pytest.mark.parametrize("error", [None, ToolError(Failure.INTERNAL)], ids=["no error", "an error"])
def test_a_caller_who_went_away_is_a_499(written: Written, error: ToolError | None) -> None:
    line = written(answer=None, error=error)
    assert (line["status"], line["outputBytes"]) == (499, 0)


def test_the_callers_own_names_for_its_work_are_in_the_line(written: Written) -> None:
    line = written(message(**{META_TASK_ID: "task-7", META_STEP_ID: "step-8"}), transport="stdio", attempt=2)
    assert (line["taskId"], line["stepId"]) == ("task-7", "step-8")
    assert (line["transport"], line["attempt"]) == ("stdio", 2)


def test_a_call_that_is_traced_has_its_trace_and_the_relays_span(written: Written) -> None:
    line = written(message(**{META_TRACEPARENT: TRACEPARENT}), span_id="00f067aa0ba902b7")
    assert (line["traceId"], line["spanId"]) == (TRACE_ID, "00f067aa0ba902b7")


@pytest.mark.parametrize(
    ("request_id", "shown"),
    [
        pytest.param("a-7", "a-7", id="a text"),
        pytest.param(0, 0, id="zero"),
        pytest.param("x" * 65, "x" * 64, id="a long text"),
        pytest.param("\x1b[31m", "\\x1b[31m", id="control characters"),
        pytest.param(None, None, id="null"),
        pytest.param(True, None, id="a truth"),
        pytest.param(1.5, None, id="a fraction"),
        pytest.param(["x" * 1000], None, id="a list"),
        pytest.param({"x": "y"}, None, id="an object"),
    ],
)
def test_a_request_id_is_a_short_text_or_a_number(
    written: Written, request_id: object, shown: object
) -> None:
    line = written(message(request_id))
    assert line["requestId"] == shown
    assert not isinstance(line["requestId"], bool)


def test_what_is_no_message_has_its_line_too(written: Written) -> None:
    line = written({"params": [NASTY]}, principal=None, tool=None, error=ToolError(Failure.INTERNAL))
    assert list(line) == FIELDS
    assert (line["requestId"], line["metadata"]["toolId"], line["agentId"]) == (None, "mcp.tool:", None)
    assert line["metadata"]["deterministic"] is None


def test_no_control_character_of_a_caller_gets_into_the_log(written: Written) -> None:
    nasty = message(NASTY, NASTY * 100, **{META_TASK_ID: NASTY, META_STEP_ID: NASTY, META_TRACEPARENT: NASTY})
    line = written(nasty)
    assert line["taskId"] == line["stepId"] == '\\n{"ts":1}\\x1b[31m\\u202e\\x00'
    assert line["requestId"] == line["taskId"]
    assert line["traceId"] is None
    assert len(line["metadata"]["toolId"]) <= 80
    for value in (line["taskId"], line["requestId"], line["metadata"]["toolId"]):
        assert value.isprintable()


# --- at the gateway -------------------------------------------------------------------------------------


@pytest.mark.holds("ENVELOPE/log-fields")
async def test_every_call_has_one_line_whatever_becomes_of_it(hub: Hub, gateway: CallGateway) -> None:
    token = hub.token()
    calls = [
        call_of(token, ECHO_NAME, {"message": "ping"}),
        call_of(token, ECHO_NAME, {}),
        call_of(token, "echo", {}),
        call_of(token, None, {}),
        call_of("no token", ECHO_NAME, {}),
        call_of(hub.token(tenant="globex", sub="agent-2"), ECHO_NAME, {"message": "ping"}),
    ]
    answers = [await gateway.call(each) for each in calls]
    lines = hub.access_lines.entries()
    assert all(list(line) == FIELDS for line in lines)
    canonical = [line["error"] and line["error"]["canonical"] for line in lines]
    assert list(zip([line["status"] for line in lines], canonical, strict=True)) == [
        (200, None),
        (400, "INVALID_INPUT"),
        (404, "NOT_FOUND"),
        (400, "INVALID_INPUT"),
        (401, "UNAUTHORIZED"),
        (401, "UNAUTHORIZED"),
    ]
    assert [line["agentId"] for line in lines] == [*["agent-1"] * 4, None, "agent-2"]
    assert [line["outputBytes"] for line in lines] == [len(answer.text) for answer in answers]
    assert [line["inputBytes"] for line in lines] == [call.caller.size for call in calls]
    assert [line["metadata"]["deterministic"] for line in lines] == [True, *[None] * 5]
    assert {line["ts"] for line in lines} == {"2025-10-09T08:53:20.000Z"}


@pytest.mark.holds("ENVELOPE/log-fields")
async def test_neither_arguments_nor_result_nor_token_get_into_the_line(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    secret, token = "correct horse battery staple", hub.token()
    call = call_of(token, ECHO_NAME, {"message": secret}, secret=secret)
    await gateway.call(call)
    router.answer = lambda _: {"ok": True, "result": {"message": secret}}
    await gateway.call(call)
    await gateway.call(call_of(token, ECHO_NAME, {secret: secret}))
    await gateway.call(call_of(token, ECHO_NAME, [secret]))
    assert hub.access_lines.getvalue().count("\n") == 4
    written_lines = hub.access_lines.getvalue() + hub.audit_file.read_text() + hub.lines.getvalue()
    assert secret not in written_lines
    assert token.rpartition(".")[2] not in written_lines


async def test_a_trace_is_the_relays_own_span_in_line_and_command(hub: Hub, router: ScriptedRouter) -> None:
    hub.connect(hub.ca.issue())
    await hub.gateway(router).call(
        call_of(hub.token(), ECHO_NAME, {"message": "ping"}, traceparent=TRACEPARENT)
    )
    (line,), (command,) = hub.access_lines.entries(), router.commands
    assert command.traceparent == f"00-{TRACE_ID}-{line['spanId']}-01"
    assert line["traceId"] == TRACE_ID
    assert line["spanId"] != SPAN_ID


# --- refusals that are summed up ------------------------------------------------------------------------


async def refusals(gateway: CallGateway, call: CallRequest, count: int) -> None:
    for _ in range(count):
        answer = await gateway.call(call)
        assert answer.error is not None


def lines_of(hub: Hub, sub: str) -> list[tuple[int, int | None]]:
    """Return status and number of those left out of each line of an agent's calls."""
    entries = [line for line in hub.access_lines.entries() if line["agentId"] == sub]
    return [(line["status"], line.get("kept_back")) for line in entries]


async def test_repeated_refusals_of_an_agent_are_one_line_a_minute_with_their_number(
    hub: Hub, router: ScriptedRouter
) -> None:
    hub.connect(hub.ca.issue())
    seconds = Seconds()
    gateway = hub.gateway(router, seconds, Allowance(1e-6, 1, 9))
    call = call_of(hub.token(), ECHO_NAME, {"message": "ping"})
    other = call_of(hub.token(sub="agent-2"), ECHO_NAME, {"message": "ping"})
    assert (await gateway.call(call)).error is None
    await refusals(gateway, call, 5000)
    assert lines_of(hub, "agent-1") == [(200, None), (429, None)]
    seconds.now += 59
    await gateway.call(other)
    assert len(lines_of(hub, "agent-1")) == 2
    seconds.now += 1
    await refusals(gateway, other, 1)
    assert lines_of(hub, "agent-1") == [(200, None), (429, None), (429, 4998)]
    await refusals(gateway, call, 10)
    seconds.now += 60
    await refusals(gateway, other, 1)
    assert lines_of(hub, "agent-1")[3:] == [(429, 9)]
    assert lines_of(hub, "agent-2") == [(200, None), (429, None), (429, None)]
    seconds.now += 120
    await refusals(gateway, call, 3)
    assert lines_of(hub, "agent-1")[4:] == [(429, None)]
    hub.access_log.close()
    assert lines_of(hub, "agent-1")[4:] == [(429, None), (429, 1)]
    assert all(list(line)[: len(FIELDS)] == FIELDS for line in hub.access_lines.entries())


async def test_refusals_for_a_capabilitys_rate_are_summed_up_and_other_failures_are_not(
    hub: Hub, router: ScriptedRouter
) -> None:
    hub.connect(hub.ca.issue(), capabilities=[{**ECHO, "constraints": {"rate_limit_rps": 1}}])
    gateway = hub.gateway(router, Seconds())
    call = call_of(hub.token(), ECHO_NAME, {"message": "ping"})
    assert (await gateway.call(call)).error is None
    await refusals(gateway, call, 20)
    await refusals(gateway, call_of(hub.token(), ECHO_NAME, {}), 3)
    assert [status for status, _ in lines_of(hub, "agent-1")] == [200, 429, 400, 400, 400]


async def test_calls_that_are_refused_while_revocations_cannot_be_read_are_summed_up(
    hub: Hub, router: ScriptedRouter
) -> None:
    hub.connect(hub.ca.issue())
    gateway = hub.gateway(router, hub.seconds)
    hub.seconds.now += 3600
    await refusals(gateway, call_of(hub.token(), ECHO_NAME, {"message": "ping"}), 20)
    assert lines_of(hub, "agent-1") == [(500, None)]


async def test_the_refusals_that_are_counted_are_bounded_and_none_is_lost(
    hub: Hub, router: ScriptedRouter
) -> None:
    gateway = hub.gateway(router, Seconds(), Allowance(1e-6, 1, 9))
    for number in range(600):
        call = call_of(hub.token(sub=f"agent-{number}"), "no tool", {})
        await refusals(gateway, call, 4)
    assert lines_of(hub, "agent-99") == [(404, None), (429, None), (429, 1)]
    assert lines_of(hub, "agent-100") == [(404, None), (429, None)]
