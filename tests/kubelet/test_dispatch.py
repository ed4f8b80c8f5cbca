import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler, ToolFault
from schemas.delivery import CALL_BUDGET_MS, FEWEST_COMMANDS
from schemas.errors import Failure, ToolError
from schemas.frames import Frame
from schemas.kinds import Fault, KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.session import ProtocolError
from tests.fakes.clock import FakeClock
from tests.fakes.frames import PAYLOADS, message_id
from tests.fakes.lines import LogLines
from tests.fakes.shipped_kinds import SYSTEM_ECHO
from tests.fakes.signer import ECHO, METRICS, NODE_ID, NOW_MS, OTHER_NODE_ID

BOUND_S = 30
BUDGET_MS = 60_000
LIMIT = 2
ECHO_TOOL = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_TOOL = f"sys.{NODE_ID}.sysmetrics.snapshot"
CORRELATION_ID = PAYLOADS["cmd"]["correlation_id"]

Work = Callable[[], Awaitable[dict[str, Any]]]


async def echo() -> dict[str, Any]:
    return {"message": "pong"}


class Worker(Handler):
    """A handler that does what the test says, and tells what it was given."""

    def __init__(self, capability: Mapping[str, Any], work: Work = echo) -> None:
        self._capability = capability
        self.work = work
        self.begun: asyncio.Queue[tuple[str, Mapping[str, Any]]] = asyncio.Queue()
        self.stopped = asyncio.Event()
        self.may_end = asyncio.Event()

    @property
    def capability(self) -> Mapping[str, Any]:
        return self._capability

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        await self.begun.put((verb, arguments))
        try:
            return await self.work()
        except asyncio.CancelledError:
            self.stopped.set()
            raise

    async def held(self) -> dict[str, Any]:
        """Work until the test lets it end."""
        await self.may_end.wait()
        return {"message": "pong"}

    async def until_begun(self) -> tuple[str, Mapping[str, Any]]:
        return await asyncio.wait_for(self.begun.get(), BOUND_S)


class Answers:
    """Where answers go."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[tuple[str, Mapping[str, Any]]] = asyncio.Queue()

    async def reply(self, msg_id: str, payload: Mapping[str, Any]) -> None:
        await self.queue.put((msg_id, payload))

    async def next(self) -> Mapping[str, Any]:
        return (await self.next_of_all())[1]

    async def next_of_all(self) -> tuple[str, Mapping[str, Any]]:
        return await asyncio.wait_for(self.queue.get(), BOUND_S)


def command(number: int = 1, **payload: object) -> Frame:
    return Frame("cmd", message_id(number), {**PAYLOADS["cmd"], **payload})


def capability(base: Mapping[str, Any], limit: int | None = LIMIT) -> dict[str, Any]:
    constraints = (
        {"rate_limit_rps": 10} if limit is None else {"rate_limit_rps": 10, "max_concurrency": limit}
    )
    return {**base, "constraints": constraints}


@pytest.fixture
def worker() -> Worker:
    return Worker(capability(ECHO))


@pytest.fixture
def metrics() -> Worker:
    return Worker({**capability(METRICS), "verbs": ["snapshot"]})


@pytest.fixture
async def dispatcher(
    worker: Worker, metrics: Worker, kinds: KindRegistry, registry: SchemaRegistry, log: LogLines
) -> AsyncIterator[Dispatcher]:
    dispatcher = Dispatcher(NODE_ID, [worker, metrics], kinds, registry, make_logger("kubelet", log))
    yield dispatcher
    await dispatcher.close()


@pytest.fixture
def answers() -> Answers:
    return Answers()


def code_of(answer: Mapping[str, Any]) -> str | None:
    """Return the code of a refusal that carries the call's correlation id; None when it is none."""
    assert answer["ok"] is False
    assert answer["error"]["correlation_id"] == CORRELATION_ID
    code = answer["error"]["code"]
    assert isinstance(code, str)
    return code


def fits_a_frame(registry: SchemaRegistry, answer: Mapping[str, Any]) -> bool:
    frame = json.loads(Frame("cmd_ack", message_id(1), answer, message_id(1)).encode())
    return registry.load("session.cmd_ack@1.0.0").is_valid(frame)


async def test_of_commands_that_are_refused_again_and_again_a_line_a_second_is_logged(
    dispatcher: Dispatcher, answers: Answers, log: LogLines
) -> None:
    for number in range(1, 20):
        await dispatcher.submit(command(number, tool="no.such.tool"), BUDGET_MS, answers.reply)
        await answers.next_of_all()
    assert len(log.entries("command refused")) == 1
    assert sum(dispatcher.outcomes.values()) == 19


async def test_a_command_reaches_its_handler_and_the_result_comes_back(
    dispatcher: Dispatcher, worker: Worker, metrics: Worker, answers: Answers, registry: SchemaRegistry
) -> None:
    await dispatcher.submit(command(7), BUDGET_MS, answers.reply)
    msg_id, answer = await answers.next_of_all()
    assert (msg_id, answer) == (message_id(7), {"ok": True, "result": {"message": "pong"}})
    assert await worker.until_begun() == ("invoke", {"message": "ping"})
    assert metrics.begun.empty()
    assert fits_a_frame(registry, answer)
    other = command(tool=METRICS_TOOL, arguments={"include": ["cpu"]})
    await dispatcher.submit(other, BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True
    assert await metrics.until_begun() == ("snapshot", {"include": ["cpu"]})
    assert worker.begun.empty()


@pytest.mark.holds("RFC-0005/6.6/own-manifest")
@pytest.mark.parametrize(
    "tool",
    [
        pytest.param(f"sysecho.{OTHER_NODE_ID}.echo.invoke", id="another node"),
        pytest.param(f"sysecho.{NODE_ID}.echo2.invoke", id="a capability that was not announced"),
        pytest.param(f"sysecho.{NODE_ID}.echo.get", id="a verb that was not announced"),
        pytest.param(f"sys.{NODE_ID}.sysmetrics.subscribe", id="a verb of the kind that was not announced"),
        pytest.param(f"sys.{NODE_ID}.echo.invoke", id="another kind"),
        pytest.param(ECHO_TOOL.replace(".", "-"), id="the alias for clients"),
        pytest.param(ECHO_TOOL.upper(), id="upper case"),
        pytest.param("", id="nothing"),
    ],
)
async def test_a_name_that_was_not_announced_is_refused_and_runs_nothing(
    dispatcher: Dispatcher, worker: Worker, metrics: Worker, answers: Answers, tool: str
) -> None:
    await dispatcher.submit(command(tool=tool), BUDGET_MS, answers.reply)
    assert code_of(await answers.next()) == "E_VERB_UNSUPPORTED"
    assert worker.begun.empty()
    assert metrics.begun.empty()


@pytest.mark.holds("RFC-0005/6.6/own-manifest", "RFC-0005/6.2/arguments-before-dispatch")
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({}, id="missing"),
        pytest.param({"message": "ping", "more": 1}, id="one too many"),
        pytest.param({"message": 1}, id="another type"),
        pytest.param({"message": None}, id="null"),
        pytest.param({"message": "x" * 1025}, id="too long"),
        pytest.param({"message": "ping\n"}, id="a line break at the end"),
        pytest.param({"message": "p\u00efng"}, id="not ASCII"),
        pytest.param({"message": "\x1b[31m"}, id="a terminal's escape"),
    ],
)
async def test_arguments_that_do_not_fit_never_reach_the_handler(
    dispatcher: Dispatcher, worker: Worker, answers: Answers, arguments: Mapping[str, Any]
) -> None:
    await dispatcher.submit(command(arguments=arguments), BUDGET_MS, answers.reply)
    assert code_of(await answers.next()) == "E_MANIFEST_INVALID"
    assert worker.begun.empty()


@pytest.mark.parametrize("budget_ms", [0, -1, -3_600_000])
async def test_a_command_whose_time_was_spent_on_the_way_is_not_run(
    dispatcher: Dispatcher, worker: Worker, answers: Answers, budget_ms: int
) -> None:
    await dispatcher.submit(command(), budget_ms, answers.reply)
    answer = await answers.next()
    assert code_of(answer) == "E_DEADLINE_EXCEEDED"
    assert "was not run" in answer["error"]["message"]
    assert worker.begun.empty()


async def forever() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_the_deadline_stops_the_handler(
    dispatcher: Dispatcher, worker: Worker, answers: Answers
) -> None:
    worker.work = forever
    await dispatcher.submit(command(), 1, answers.reply)
    answer = await answers.next()
    assert code_of(answer) == "E_DEADLINE_EXCEEDED"
    assert "may have run" in answer["error"]["message"]
    assert worker.stopped.is_set()


@pytest.mark.holds("RFC-0005/7/handler")
async def test_a_handler_has_no_more_time_than_it_announced(
    kinds: KindRegistry, registry: SchemaRegistry, log: LogLines, answers: Answers
) -> None:
    hasty = {**ECHO, "constraints": {"rate_limit_rps": 10, "deadline_ms_default": 50}}
    worker = Worker(hasty, forever)
    dispatcher = Dispatcher(NODE_ID, [worker], kinds, registry, make_logger("kubelet", log))
    await dispatcher.submit(command(deadline_ms=30_000), 30_000, answers.reply)
    assert code_of(await answers.next()) == "E_DEADLINE_EXCEEDED"
    assert worker.stopped.is_set()
    assert dispatcher.outcomes == {("E_DEADLINE_EXCEEDED", "handler"): 1}


@pytest.mark.holds("RFC-0001/2/max-concurrency")
async def test_a_full_capability_refuses_until_one_of_its_commands_ends_and_fills_no_other(
    dispatcher: Dispatcher, worker: Worker, answers: Answers, registry: SchemaRegistry
) -> None:
    worker.work = worker.held
    for number in range(LIMIT):
        await dispatcher.submit(command(number), BUDGET_MS, answers.reply)
        await worker.until_begun()
    await dispatcher.submit(command(LIMIT), BUDGET_MS, answers.reply)
    answer = await answers.next()
    assert code_of(answer) == "E_RATE_LIMITED"
    assert answer["error"]["retry_after_ms"] > 0
    assert fits_a_frame(registry, answer)
    assert worker.begun.empty()
    await dispatcher.submit(command(9, tool=METRICS_TOOL, arguments={}), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True

    worker.may_end.set()
    assert [(await answers.next())["ok"] for _ in range(LIMIT)] == [True] * LIMIT
    await dispatcher.submit(command(LIMIT + 1), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True


@pytest.mark.holds("RFC-0001/2/max-concurrency")
async def test_a_capability_that_states_no_limit_runs_one_command_at_a_time(
    kinds: KindRegistry, registry: SchemaRegistry, log: LogLines, answers: Answers
) -> None:
    worker = Worker(capability(ECHO, limit=None), forever)
    dispatcher = Dispatcher(NODE_ID, [worker], kinds, registry, make_logger("kubelet", log))
    await dispatcher.submit(command(1), BUDGET_MS, answers.reply)
    await worker.until_begun()
    await dispatcher.submit(command(2), BUDGET_MS, answers.reply)
    assert code_of(await answers.next()) == "E_RATE_LIMITED"
    await dispatcher.close()


SECRET = "the secret of\x1b[31m the handler\n"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ValueError(SECRET), id="an error"),
        pytest.param(KeyError(SECRET), id="a missing key"),
        pytest.param(OSError(5, SECRET), id="the system"),
        pytest.param(TimeoutError(SECRET), id="a timeout of its own, which is not the deadline"),
        pytest.param(RecursionError(SECRET), id="recursion"),
        pytest.param(ExceptionGroup(SECRET, [ValueError(SECRET)]), id="a group"),
        pytest.param(StopAsyncIteration(SECRET), id="an odd one"),
    ],
)
async def test_a_handler_that_raises_costs_its_caller_an_error_and_the_node_nothing(
    dispatcher: Dispatcher, worker: Worker, answers: Answers, log: LogLines, error: Exception
) -> None:
    async def broken() -> dict[str, Any]:
        raise error

    worker.work = broken
    for number in range(LIMIT + 1):  # more than there are slots: each must come free again
        await dispatcher.submit(command(number), BUDGET_MS, answers.reply)
        answer = await answers.next()
        assert code_of(answer) == "E_INTERNAL"
        assert "secret" not in json.dumps(answer)
    worker.work = echo
    await dispatcher.submit(command(9), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True
    for line in log.entries("handler failed"):
        assert (line["tool"], line["error"].isprintable()) == (ECHO_TOOL, True)


async def test_a_handler_may_refuse_in_the_systems_own_words(
    dispatcher: Dispatcher, worker: Worker, answers: Answers
) -> None:
    async def busy() -> dict[str, Any]:
        raise ToolError(Failure.RATE_LIMITED, retry_after_ms=250)

    worker.work = busy
    await dispatcher.submit(command(), BUDGET_MS, answers.reply)
    answer = await answers.next()
    assert (code_of(answer), answer["error"]["retry_after_ms"]) == ("E_RATE_LIMITED", 250)


async def test_a_handler_states_a_reason_of_its_row_and_another_is_a_failure(
    worker: Worker, answers: Answers, registry: SchemaRegistry, log: LogLines
) -> None:
    kinds = KindRegistry([replace(SYSTEM_ECHO, faults={"stuck": Fault("The relay is stuck.", "Free it.")})])
    dispatcher = Dispatcher(NODE_ID, [worker], kinds, registry, make_logger("kubelet", log))

    async def failing(code: str) -> dict[str, Any]:
        raise ToolFault(code, "the device said \x1b[31mno")

    worker.work = partial(failing, "obey_me")
    await dispatcher.submit(command(1), BUDGET_MS, answers.reply)
    answer = await answers.next()
    assert (code_of(answer), answer["error"]["message"]) == ("E_INTERNAL", Failure.INTERNAL.value.message)
    assert len(log.entries("handler failed")) == 1
    worker.work = partial(failing, "stuck")
    await dispatcher.submit(command(2), BUDGET_MS, answers.reply)
    answer = await answers.next()
    assert (code_of(answer), answer["error"]["message"]) == ("E_INTERNAL", "stuck: The relay is stuck.")
    assert "device" not in json.dumps(answer)
    assert fits_a_frame(registry, answer)
    [line] = log.entries("tool fault")
    assert (line["tool"], line["fault"]) == (ECHO_TOOL, "stuck")
    assert line["detail"] == "the device said \\x1b[31mno"


async def test_a_result_that_does_not_fit_is_named_in_the_log_by_its_path(
    dispatcher: Dispatcher, metrics: Worker, answers: Answers, log: LogLines
) -> None:
    async def measured() -> dict[str, Any]:
        disk = {"mount": "/secret", "fs_type": "ext4", "total_bytes": "many", "available_bytes": 1}
        return {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1, "disk": [disk]}

    metrics.work = measured
    await dispatcher.submit(command(tool=METRICS_TOOL, arguments={}), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True  # the relay judges it
    [line] = log.entries("result does not fit")
    assert (line["tool"], line["rule"]) == (METRICS_TOOL, "type")
    assert line["reason"] == "/disk/0/total_bytes must be of type integer"
    assert "secret" not in json.dumps(line)


async def test_a_text_of_a_third_party_is_escaped_before_it_leaves_the_node(
    dispatcher: Dispatcher, metrics: Worker, answers: Answers, log: LogLines
) -> None:
    async def measured() -> dict[str, Any]:
        disk = {"mount": "/media/B\u00fcro 1", "fs_type": "ext4", "total_bytes": 1, "available_bytes": 1}
        return {"ts_ms": NOW_MS, "node_id": NODE_ID, "uptime_s": 1, "disk": [disk]}

    metrics.work = measured
    await dispatcher.submit(command(tool=METRICS_TOOL, arguments={}), BUDGET_MS, answers.reply)
    answer = await answers.next()
    assert answer["result"]["disk"][0]["mount"] == r"/media/B\xfcro\x201"
    assert log.entries("result does not fit") == []


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ProtocolError("a frame over the limit"), id="larger than a frame"),
        pytest.param(TypeError("not serializable"), id="not JSON"),
        pytest.param(ValueError("a number that is not finite"), id="not a number"),
    ],
)
async def test_a_result_that_cannot_be_sent_becomes_an_error_that_can(
    dispatcher: Dispatcher, answers: Answers, log: LogLines, error: Exception
) -> None:
    async def choosy(msg_id: str, payload: Mapping[str, Any]) -> None:
        if payload["ok"]:
            raise error
        await answers.reply(msg_id, payload)

    await dispatcher.submit(command(), BUDGET_MS, choosy)
    answer = await answers.next()
    assert code_of(answer) == "E_INTERNAL"
    assert len(log.entries("answer cannot be sent")) == 1
    # And when it is asked for again, the result that cannot be sent is not what is remembered.
    await dispatcher.submit(command(), BUDGET_MS, choosy)
    assert await answers.next() == answer


async def test_a_command_that_comes_again_while_it_runs_runs_once_and_is_answered_once(
    dispatcher: Dispatcher, worker: Worker, answers: Answers
) -> None:
    worker.work = worker.held
    await dispatcher.submit(command(), BUDGET_MS, answers.reply)
    await worker.until_begun()
    await dispatcher.submit(command(), BUDGET_MS, answers.reply)
    assert dispatcher.inflight == 1
    worker.may_end.set()
    assert (await answers.next())["ok"] is True
    await until_idle(dispatcher)
    assert (worker.begun.qsize(), answers.queue.qsize()) == (0, 0)


@pytest.mark.holds("RFC-0005/12/no-auto-retry")
@pytest.mark.parametrize(
    ("payload", "runs"),
    [
        pytest.param({}, 1, id="a result"),
        pytest.param({"arguments": {}}, 0, id="a refusal"),
        pytest.param({"tool": f"sysecho.{NODE_ID}.echo.get"}, 0, id="a name that is none"),
    ],
)
async def test_a_command_that_comes_again_after_its_answer_gets_the_same_answer(
    dispatcher: Dispatcher, worker: Worker, answers: Answers, payload: Mapping[str, Any], runs: int
) -> None:
    frame = command(**payload)
    await dispatcher.submit(frame, BUDGET_MS, answers.reply)
    first = await answers.next_of_all()
    # Whatever stands in it now: it is the msg_id that says which command it is.
    await dispatcher.submit(frame._replace(payload=PAYLOADS["cmd"]), BUDGET_MS, answers.reply)
    assert await answers.next_of_all() == first
    assert worker.begun.qsize() == runs


async def test_cancelling_stops_the_handlers_gives_their_slots_back_and_sends_no_answer(
    dispatcher: Dispatcher, worker: Worker, answers: Answers
) -> None:
    worker.work = forever
    for number in range(LIMIT):
        await dispatcher.submit(command(number), BUDGET_MS, answers.reply)
        await worker.until_begun()
    for number in range(LIMIT):
        dispatcher.cancel(message_id(number))
    await asyncio.wait_for(worker.stopped.wait(), BOUND_S)
    await until_idle(dispatcher)
    assert answers.queue.empty()
    worker.work = echo
    await dispatcher.submit(command(9), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True


@pytest.mark.parametrize("begun", [True, False], ids=["while it ran", "before its first step"])
async def test_a_command_that_was_cancelled_does_not_run_when_it_comes_again(
    dispatcher: Dispatcher, worker: Worker, answers: Answers, *, begun: bool
) -> None:
    worker.work = forever
    await dispatcher.submit(command(), BUDGET_MS, answers.reply)
    if begun:
        await worker.until_begun()
    dispatcher.cancel(message_id(1))
    await until_idle(dispatcher)
    await dispatcher.submit(command(), BUDGET_MS, answers.reply)
    assert code_of(await answers.next()) == "E_DEADLINE_EXCEEDED"
    assert worker.begun.empty()


async def test_commands_cancelled_before_their_first_step_leave_room_for_others(
    dispatcher: Dispatcher, answers: Answers
) -> None:
    many = 2000  # more than are remembered
    for number in range(many):
        await dispatcher.submit(command(number), BUDGET_MS, answers.reply)
        dispatcher.cancel(message_id(number))
        await until_idle(dispatcher)
    await dispatcher.submit(command(many), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True


async def test_cancelling_what_is_unknown_or_over_changes_nothing(
    dispatcher: Dispatcher, answers: Answers
) -> None:
    dispatcher.cancel(message_id(1))
    await dispatcher.submit(command(1), BUDGET_MS, answers.reply)
    first = await answers.next_of_all()
    dispatcher.cancel(message_id(1))
    await dispatcher.submit(command(1), BUDGET_MS, answers.reply)
    assert await answers.next_of_all() == first


async def test_closing_stops_everything_that_runs(
    dispatcher: Dispatcher, worker: Worker, metrics: Worker, answers: Answers
) -> None:
    worker.work = metrics.work = forever
    await dispatcher.submit(command(1), BUDGET_MS, answers.reply)
    await dispatcher.submit(command(2, tool=METRICS_TOOL, arguments={}), BUDGET_MS, answers.reply)
    await worker.until_begun()
    await metrics.until_begun()
    assert dispatcher.inflight == 2
    await dispatcher.close()
    assert (worker.stopped.is_set(), metrics.stopped.is_set()) == (True, True)
    assert (dispatcher.inflight, answers.queue.qsize()) == (0, 0)


async def test_a_node_that_can_remember_no_more_says_so(
    kinds: KindRegistry, registry: SchemaRegistry, log: LogLines, answers: Answers
) -> None:
    worker = Worker(capability(ECHO, limit=5000), forever)
    dispatcher = Dispatcher(NODE_ID, [worker], kinds, registry, make_logger("kubelet", log))
    remembered = FEWEST_COMMANDS
    for number in range(remembered):
        await dispatcher.submit(command(number), BUDGET_MS, answers.reply)
    await dispatcher.submit(command(remembered), BUDGET_MS, answers.reply)
    answer = await answers.next()
    assert (code_of(answer), answer["error"]["retry_after_ms"] > 0) == ("E_RATE_LIMITED", True)
    assert dispatcher.inflight == remembered
    assert dispatcher.outcomes["E_RATE_LIMITED", "node"] == 1
    await dispatcher.close()


async def test_all_that_the_capabilities_announce_is_answered(
    kinds: KindRegistry, registry: SchemaRegistry, log: LogLines, answers: Answers
) -> None:
    rate = 1000
    constraints = {"rate_limit_rps": rate, "max_concurrency": 2 * rate}
    workers = [
        Worker({**base, "constraints": constraints}) for base in (ECHO, {**METRICS, "verbs": ["snapshot"]})
    ]
    ticks = FakeClock(5_000)
    dispatcher = Dispatcher(NODE_ID, workers, kinds, registry, make_logger("kubelet", log), ticks)
    number = 0
    for second in range(7):  # a burst, then the rate for longer than a command lives
        for _ in range(rate):
            await dispatcher.submit(
                command(number, deadline_ms=CALL_BUDGET_MS), CALL_BUDGET_MS, answers.reply
            )
            metrics = command(number + 1, tool=METRICS_TOOL, arguments={}, deadline_ms=CALL_BUDGET_MS)
            await dispatcher.submit(metrics, CALL_BUDGET_MS, answers.reply)
            number += 2
        await until_idle(dispatcher)
        ticks.now_ms += 1000 if second else 0
    assert dispatcher.outcomes == {("ok", ""): 7 * 2 * rate}


async def test_a_command_whose_answer_is_not_kept_any_more_is_refused_and_never_runs_again(
    kinds: KindRegistry, registry: SchemaRegistry, log: LogLines, answers: Answers
) -> None:
    async def lengthy() -> dict[str, Any]:
        return {"message": "x" * 200_000}

    worker, ticks = Worker(capability(ECHO, limit=1), lengthy), FakeClock(5_000)
    dispatcher = Dispatcher(NODE_ID, [worker], kinds, registry, make_logger("kubelet", log), ticks)
    count = 6  # one more than the memory has room for
    for number in range(count):
        await dispatcher.submit(command(number), BUDGET_MS, answers.reply)
        assert (await answers.next())["ok"] is True
        await until_idle(dispatcher)
    await dispatcher.submit(command(0), BUDGET_MS, answers.reply)
    assert code_of(await answers.next()) == "E_DEADLINE_EXCEEDED"
    await dispatcher.submit(command(count - 1), BUDGET_MS, answers.reply)
    assert (await answers.next())["ok"] is True
    assert worker.begun.qsize() == count


def test_a_handler_of_an_unregistered_kind_is_a_bug(
    kinds: KindRegistry, registry: SchemaRegistry, log: LogLines
) -> None:
    stranger = Worker({**ECHO, "kind": "system.shell"})
    with pytest.raises(ValueError, match=r"system\.shell is not a registered kind"):
        Dispatcher(NODE_ID, [stranger], kinds, registry, make_logger("kubelet", log))


async def until_idle(dispatcher: Dispatcher) -> None:
    """Let tasks that have nothing left to wait for end."""
    async with asyncio.timeout(BOUND_S):
        while dispatcher.inflight:  # noqa: ASYNC110 - there is no event for the end of a command's task
            await asyncio.sleep(0)


async def test_draining_answers_what_runs_and_refuses_what_is_new(
    dispatcher: Dispatcher, worker: Worker, answers: Answers
) -> None:
    worker.work = worker.held
    await dispatcher.submit(command(1, tool=ECHO_TOOL), BUDGET_MS, answers.reply)
    await worker.until_begun()
    draining = asyncio.create_task(dispatcher.drain())
    await asyncio.sleep(0)
    await dispatcher.submit(command(2, tool=ECHO_TOOL), BUDGET_MS, answers.reply)
    msg_id, refused = await answers.next_of_all()
    assert msg_id == message_id(2)
    assert refused["error"]["code"] == Failure.RATE_LIMITED.value.code
    assert refused["error"]["retry_after_ms"] > 0
    assert not draining.done()
    worker.may_end.set()
    assert (await answers.next())["ok"]
    await asyncio.wait_for(draining, BOUND_S)


async def test_draining_ends_a_command_that_lasts_too_long_with_its_deadline(
    dispatcher: Dispatcher, worker: Worker, answers: Answers
) -> None:
    worker.work = forever
    await dispatcher.submit(command(1, tool=ECHO_TOOL), BUDGET_MS, answers.reply)
    await worker.until_begun()
    await asyncio.wait_for(dispatcher.drain(0.01), BOUND_S)
    assert (await answers.next())["error"]["code"] == Failure.DEADLINE_EXCEEDED.value.code
    assert worker.stopped.is_set()
