import asyncio
import gc
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import pytest

from relay.calls.envelope import Call
from relay.calls.executor import CallExecutor, CallRecord, InFlight, RevocableCall
from relay.calls.results import Hop
from relay.fleet.tools import Tool
from relay.routing.port import Command, LocalRouter
from relay.sessions.node_sessions import CapabilityLimits
from schemas.delivery import CALL_BUDGET_MS
from schemas.errors import Failure, ToolError
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter, refusing
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"

METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"

PING = {"message": "ping"}

CORRELATION_ID = "01HZX9K3M4P7Q8R9S0T1V2W3XW"


BOUND_S = 30


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
    router.answer = refusing(failure)
    record = stage.record()
    assert (await stage.failure(record)).failure is failure
    assert (record.answered, record.hop) == (False, hop)
    assert stage.audited() == [("allow", "ok"), ("error", failure.value.code)]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param({"ok": True, "result": {}}, id="a result that does not fit"),
        pytest.param({"ok": True, "result": result(node_id=OTHER_NODE_ID)}, id="of another node"),
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


async def test_a_call_without_a_principal_can_be_made_and_is_revoked_with_no_token(
    stage: Stage, router: ScriptedRouter
) -> None:
    record = stage.record()
    record.principal = None
    assert (await stage.run(record)).result == result()
    assert len(router.commands) == 1


class Calls:
    """Calls that wait until they are answered, and what they left behind."""

    def __init__(self) -> None:
        self.inflight = InFlight()
        self.answers: dict[str, asyncio.Future[str]] = {}
        self._entered: asyncio.Queue[str] = asyncio.Queue()

    async def _call(self, jti: str, name: str) -> str:
        self.answers[name] = asyncio.get_running_loop().create_future()
        async with RevocableCall(jti, self.inflight):
            self._entered.put_nowait(name)
            return await self.answers[name]

    async def begin(self, jti: str, name: str = "call") -> asyncio.Task[str]:
        """Return the task of a call that waits for its answer."""
        task = asyncio.create_task(self._call(jti, name))
        assert await asyncio.wait_for(self._entered.get(), BOUND_S) == name
        return task

    @property
    def held(self) -> int:
        """How many objects of calls are still remembered."""
        return len(self.inflight._calls)  # noqa: SLF001 - a leak shows nowhere else


@pytest.fixture
def calls() -> Calls:
    return Calls()


async def denied(task: asyncio.Task[str]) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(task, BOUND_S)
    assert caught.value.failure is Failure.TOKEN_REFUSED
    assert not task.cancelled()
    return caught.value


async def test_a_call_that_is_not_revoked_is_answered(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.answers["call"].set_result("done")
    assert await task == "done"
    assert calls.held == 0


async def test_a_call_whose_token_is_revoked_ends_at_once_and_the_others_go_on(calls: Calls) -> None:
    first = await calls.begin("jti-1", "first")
    second = await calls.begin("jti-1", "second")
    other = await calls.begin("jti-2", "other")
    calls.inflight.revoke(frozenset({"jti-1", "never seen"}))
    for task in (first, second):
        assert "revoked during the call" in str(await denied(task))
    assert not other.done()
    calls.answers["other"].set_result("done")
    assert await other == "done"
    assert calls.held == 0


async def test_a_token_that_is_void_begins_nothing_more(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    calls.inflight.revoke({"jti-1"})
    await denied(task)
    with pytest.raises(ToolError) as caught:
        async with RevocableCall("jti-1", calls.inflight):
            raise AssertionError
    assert caught.value.failure is Failure.TOKEN_REFUSED
    assert calls.held == 0


@pytest.mark.parametrize("error", [None, ToolError(Failure.NODE_OFFLINE)], ids=["answer", "error"])
async def test_what_comes_first_in_the_same_moment_is_not_given_out(
    calls: Calls, error: ToolError | None
) -> None:
    task = await calls.begin("jti-1")
    if error is None:
        calls.answers["call"].set_result("done")
    else:
        calls.answers["call"].set_exception(error)
    calls.inflight.revoke({"jti-1"})
    await denied(task)
    assert calls.held == 0


async def answers() -> str:
    return "done"


async def fails() -> str:
    raise ToolError(Failure.NODE_OFFLINE)


async def waits() -> str:
    await asyncio.Event().wait()
    raise AssertionError


async def outlives_its_cancellation() -> str:
    with suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return "done all the same"


async def is_late() -> str:
    async with asyncio.timeout(0):
        return await waits()


@pytest.mark.parametrize("last_step", [answers, fails, waits, outlives_its_cancellation, is_late])
async def test_a_call_that_is_revoked_in_its_last_step_gives_nothing_out_and_leaves_its_task_sound(
    last_step: Callable[[], Awaitable[str]],
) -> None:
    async def work() -> str:
        inflight, task = InFlight(), asyncio.current_task()
        assert task is not None

        async def revoked() -> None:
            async with RevocableCall("jti", inflight):
                inflight.revoke({"jti"})
                await last_step()

        with pytest.raises(ToolError) as caught:
            await revoked()
        assert caught.value.failure is Failure.TOKEN_REFUSED
        assert task.cancelling() == 0
        await asyncio.sleep(0)  # no cancellation is left that would hit this
        return "went on"

    assert await asyncio.wait_for(asyncio.create_task(work()), BOUND_S) == "went on"


@pytest.mark.parametrize("first", ["caller", "operator"])
async def test_a_call_that_its_caller_ends_in_the_same_moment_stays_ended(calls: Calls, first: str) -> None:
    task = await calls.begin("jti-1")
    acts: list[Callable[[], object]] = [task.cancel, lambda: calls.inflight.revoke({"jti-1"})]
    for act in acts if first == "caller" else reversed(acts):
        act()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()
    assert calls.held == 0


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "failed"])
async def test_a_call_that_ended_stays_ended_if_its_caller_ends_it_as_it_is_revoked(
    *, answered: bool
) -> None:
    inflight = InFlight()

    async def work() -> str:
        task = asyncio.current_task()
        assert task is not None
        async with RevocableCall("jti", inflight):
            inflight.revoke({"jti"})
            task.cancel()
            if not answered:
                raise ToolError(Failure.NODE_OFFLINE)
        return "went on as if it had not been ended"

    task = asyncio.create_task(work())
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()


async def test_a_caller_who_has_gone_before_the_call_began_is_no_reason_to_keep_the_call() -> None:
    # Clean-up after a cancellation may make a call: the task's count is not zero then.
    inflight = InFlight()
    codes: list[Failure] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            try:
                async with RevocableCall("jti", inflight):
                    inflight.revoke({"jti"})
                    await asyncio.Event().wait()
            except ToolError as error:
                codes.append(error.failure)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert codes == [Failure.TOKEN_REFUSED]


async def end_somehow(calls: Calls, number: int) -> None:
    task = await calls.begin(f"jti-{number}")
    if number % 3:
        calls.inflight.revoke({f"jti-{number}"})
        await denied(task)
    else:
        calls.answers["call"].set_exception(RuntimeError)
        with pytest.raises(RuntimeError):
            await task


async def test_what_is_over_is_forgotten(calls: Calls) -> None:
    for number in range(50):
        # In a task of its own: a frame that goes on may keep the exceptions that passed it.
        await asyncio.create_task(end_somehow(calls, number))
    assert calls.held == 0
    calls.answers.clear()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each).__name__ == "RevocableCall"]


async def test_draining_waits_for_the_calls_in_flight(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    draining = asyncio.create_task(calls.inflight.drain(BOUND_S))
    await asyncio.sleep(0)
    assert not draining.done()
    calls.answers["call"].set_result("done")
    assert await task == "done"
    await asyncio.wait_for(draining, BOUND_S)


async def test_draining_ends_the_calls_that_last_too_long_with_an_honest_error(calls: Calls) -> None:
    task = await calls.begin("jti-1")
    await asyncio.wait_for(calls.inflight.drain(0.01), BOUND_S)
    with pytest.raises(ToolError) as caught:
        await asyncio.wait_for(task, BOUND_S)
    assert caught.value.failure is Failure.DEADLINE_EXCEEDED
    assert "stopped during the call" in str(caught.value)
