import asyncio
import json
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from relay.audit.log import AuditUnavailableError
from relay.calls.call_record import CallRecord
from relay.calls.envelope import Call
from relay.calls.executor import CallExecutor
from relay.calls.hops import Hop
from relay.fleet.tools import Tool
from relay.routing.port import Command, LocalRouter
from relay.sessions.capability_limits import CapabilityLimits
from schemas.delivery import CALL_BUDGET_MS
from schemas.errors import Failure, ToolError
from schemas.payloads import CmdAck
from schemas.projection import META_TRACEPARENT
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
PING = {"message": "ping"}
CORRELATION_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XW"
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{TRACE_ID}-b7ad6b7169203331-01"
BOUND_S = 10


class Stage:
    """An executor without the gateway in front of it."""

    def __init__(self, hub: Hub, router: LocalRouter, **constraints: Any) -> None:
        self.hub = hub
        self.seconds = Seconds()
        self.executor = CallExecutor(
            CapabilityLimits(hub.fleet, router, self.seconds),
            hub.telemetry,
            hub.audit,
            self.seconds,
            bytes,
            hub.log,
        )
        echo = {**ECHO, "constraints": {"rate_limit_rps": 50, "max_concurrency": 4, **constraints}}
        hub.connect(hub.ca.issue(), capabilities=[echo, METRICS])
        self.principal = hub.authenticator.identify(hub.token())

    def tool(self, name: str = ECHO_NAME) -> Tool:
        return self.hub.fleet.resolve(name, self.principal.rights)

    def record(self, arguments: Any = PING, **meta: Any) -> CallRecord:
        params = {"name": ECHO_NAME, "arguments": arguments, "_meta": meta}
        call = Call({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params})
        return CallRecord(CORRELATION_ID, call, self.seconds(), principal=self.principal)

    async def run(self, record: CallRecord | None = None, name: str = ECHO_NAME) -> Any:
        return await self.executor.run(self.tool(name), record or self.record())

    async def failure(self, record: CallRecord | None = None, name: str = ECHO_NAME) -> ToolError:
        with pytest.raises(ToolError) as caught:
            await self.run(record, name)
        return caught.value

    def audited(self) -> list[tuple[Any, Any]]:
        return [(line.get("decision") or line["outcome"], line["code"]) for line in self.hub.audited()]


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def stage(hub: Hub, router: ScriptedRouter) -> Stage:
    return Stage(hub, router)


def result(message: str = "ping", node_id: str = NODE_ID) -> dict[str, Any]:
    return {"message": message, "received_at_ms": NOW_MS, "node_id": node_id}


async def test_a_call_is_recorded_sent_checked_and_recorded(stage: Stage, router: ScriptedRouter) -> None:
    record = stage.record()
    answer = await stage.run(record)
    assert answer.result == result()
    assert json.loads(answer.text) == answer.result
    assert answer.error is None
    assert record.answered
    assert router.commands == [
        Command(NODE_ID, ECHO_NAME, PING, CALL_BUDGET_MS, CORRELATION_ID, caller=stage.principal.digest)
    ]
    assert stage.audited() == [("allow", "ok"), ("ok", "ok")]


# --- time -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("announced_ms", "spent_s", "budget_ms"),
    [
        pytest.param(2000, 0, CALL_BUDGET_MS, id="all of it"),
        pytest.param(50, 0, CALL_BUDGET_MS, id="however short the handler's time"),
        pytest.param(2000, 3.5, 1500, id="what is left"),
        pytest.param(2000, 4.9999, 1, id="next to nothing"),
        pytest.param(2000, 60, 1, id="nothing"),
    ],
)
async def test_a_command_has_what_is_left_of_the_call(
    hub: Hub, router: ScriptedRouter, announced_ms: int, spent_s: float, budget_ms: int
) -> None:
    stage = Stage(hub, router, deadline_ms_default=announced_ms)
    record = stage.record()
    stage.seconds.now += spent_s
    assert stage.executor.budget_ms(stage.tool(), record) == budget_ms
    await stage.run(record)
    assert router.commands[0].deadline_ms == budget_ms


# --- the trace ------------------------------------------------------------------------------------------


async def test_a_trace_goes_along_with_a_span_of_the_relays_own(hub: Hub, router: ScriptedRouter) -> None:
    stage = Stage(hub, router)
    stage.executor = CallExecutor(
        router, hub.telemetry, hub.audit, stage.seconds, lambda size: b"\xa5" * size, hub.log
    )
    record = stage.record(**{META_TRACEPARENT: TRACEPARENT})
    await stage.run(record)
    assert record.span_id == "a5" * 8
    assert router.commands[0].traceparent == f"00-{TRACE_ID}-{'a5' * 8}-01"


async def test_without_a_trace_there_is_no_span(stage: Stage, router: ScriptedRouter) -> None:
    record = stage.record()
    await stage.run(record)
    assert record.span_id is None
    assert router.commands[0].traceparent is None


# --- what fails -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "hop"),
    [
        (Failure.NODE_OFFLINE, Hop.SESSION),
        (Failure.ATTESTATION_FAILED, Hop.SESSION),
        (Failure.DEADLINE_EXCEEDED, Hop.NODE),
        (Failure.RATE_LIMITED, Hop.RELAY),
    ],
)
async def test_a_node_that_is_not_reached_has_not_answered(
    stage: Stage, router: ScriptedRouter, failure: Failure, hop: Hop
) -> None:
    def unreached(_command: Command) -> dict[str, Any]:
        raise ToolError(failure)

    router.answer = unreached
    record = stage.record()
    assert (await stage.failure(record)).failure is failure
    assert (record.answered, record.hop) == (False, hop)
    assert stage.audited() == [("allow", "ok"), ("error", failure.value.code)]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"ok": True, "result": {}}, id="a result that does not fit"),
        pytest.param({"ok": True, "result": result(node_id=OTHER_NODE_ID)}, id="of another node"),
        pytest.param({"ok": True, "result": result("pong")}, id="an echo of something else"),
        pytest.param({"ok": True, "result": result("\u202e")}, id="text that no result may hold"),
        pytest.param({"ok": False, "error": {"code": "E_INTERNAL"}}, id="an error"),
    ],
)
async def test_a_node_that_answers_badly_has_answered(
    stage: Stage, router: ScriptedRouter, answer: Mapping[str, Any]
) -> None:
    router.answer = lambda _: answer
    record = stage.record()
    assert (await stage.failure(record)).failure.value.code == "E_INTERNAL"
    assert (record.answered, record.hop) == (True, Hop.NODE)
    assert stage.audited() == [("allow", "ok"), ("error", "E_INTERNAL")]


async def test_a_bug_is_recorded_and_propagates(stage: Stage, router: ScriptedRouter) -> None:
    def broken(_command: Command) -> dict[str, Any]:
        raise ZeroDivisionError

    router.answer = broken
    with pytest.raises(ZeroDivisionError):
        await stage.run()
    assert stage.audited() == [("allow", "ok"), ("error", "E_INTERNAL")]


async def test_while_nothing_can_be_recorded_nothing_is_sent(stage: Stage, router: ScriptedRouter) -> None:
    with full_disk(), pytest.raises(AuditUnavailableError):
        await stage.run()
    assert router.commands == []
    assert (await stage.run()).error is None


async def test_an_outcome_that_cannot_be_recorded_is_told_all_the_same(
    stage: Stage, router: ScriptedRouter
) -> None:
    record = stage.record()
    with ExitStack() as stack:

        def fill_the_disk(command: Command) -> CmdAck:
            stack.enter_context(full_disk(stage.hub.audit_file.stat().st_size))
            return echoed(command)

        router.answer = fill_the_disk
        assert (await stage.run(record)).result == result()
    (line,) = stage.hub.lines.entries("outcome not recorded")
    assert line["correlation_id"] == CORRELATION_ID
    assert stage.audited() == [("allow", "ok")]


# --- limits ---------------------------------------------------------------------------------------------


async def test_a_capability_over_its_rate_is_refused_and_the_refusal_recorded(
    hub: Hub, router: ScriptedRouter
) -> None:
    stage = Stage(hub, router, rate_limit_rps=0.5)
    await stage.run()
    error = await stage.failure()
    assert (error.failure, error.retry_after_ms) == (Failure.RATE_LIMITED, 2000)
    assert stage.audited()[-2:] == [("allow", "ok"), ("error", "E_RATE_LIMITED")]
    assert len(router.commands) == 1
    stage.seconds.now += 2
    assert (await stage.run()).error is None


async def test_a_refusal_that_cannot_be_recorded_is_told_as_that(hub: Hub, router: ScriptedRouter) -> None:
    stage = Stage(hub, router, rate_limit_rps=0.5)
    await stage.run()
    with full_disk(hub.audit_file.stat().st_size), pytest.raises(AuditUnavailableError):
        await stage.run()
    assert len(router.commands) == 1


@pytest.mark.parametrize("ending", ["answered", "failed", "given up", "revoked"])
async def test_however_a_call_ends_the_next_may_run(hub: Hub, ending: str) -> None:
    router = HeldRouter()
    stage = Stage(hub, router, max_concurrency=1)
    task = asyncio.create_task(stage.run())
    command, answer = await router.next()
    assert (await stage.failure()).retry_after_ms == 100
    match ending:
        case "answered":
            answer.set_result(echoed(command))
        case "failed":
            answer.set_exception(ToolError(Failure.NODE_OFFLINE))
        case "given up":
            task.cancel()
        case _:
            stage.executor.revoke({stage.principal.jti})
            stage.executor.revoke(frozenset())
    await asyncio.wait([task], timeout=BOUND_S)
    again = asyncio.create_task(stage.run())
    command, answer = await router.next()
    answer.set_result(echoed(command))
    assert (await again).error is None
    assert task.cancelled() is (ending == "given up")
    assert task.cancelled() or (task.exception() is None) is (ending == "answered")


# --- who is revoked, and who gives up -------------------------------------------------------------------


async def test_revoking_its_token_ends_a_call_and_no_other(hub: Hub) -> None:
    router = HeldRouter()
    stage = Stage(hub, router)
    revoked = stage.record()
    ended = asyncio.create_task(stage.run(revoked))
    await router.next()
    other = stage.record()
    other.principal = hub.authenticator.identify(hub.token(sub="agent-2"))
    goes_on = asyncio.create_task(stage.run(other))
    command, answer = await router.next()
    stage.executor.revoke({stage.principal.jti})
    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(ended, BOUND_S)
    assert caught.value.failure is Failure.TOKEN_REFUSED
    assert not revoked.answered
    assert stage.audited()[-1] == ("error", "E_SAFETY_DENIED")
    answer.set_result(echoed(command))
    assert (await goes_on).result == result()


async def test_a_call_without_a_principal_can_be_made_and_is_revoked_with_no_token(
    stage: Stage, router: ScriptedRouter
) -> None:
    record = stage.record()
    record.principal = None
    assert (await stage.run(record)).result == result()
    assert len(router.commands) == 1


async def test_a_call_that_its_caller_gives_up_is_recorded_as_cancelled(hub: Hub) -> None:
    router = HeldRouter()
    stage = Stage(hub, router)
    task = asyncio.create_task(stage.run())
    _, answer = await router.next()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert answer.cancelled()
    assert stage.audited() == [("allow", "ok"), ("error", "cancelled")]
