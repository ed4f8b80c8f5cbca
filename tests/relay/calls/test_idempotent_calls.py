import asyncio
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from relay.calls.call_record import CallAnswer, CallRecord, CallRequest
from relay.calls.idempotency_store import QUOTA_OF_ALL
from relay.config import PER_AGENT, EnvelopeMode
from relay.rate_limits import Limiter
from relay.routing.answer import CommandAnswer
from relay.routing.port import Command, LocalRouter
from schemas.errors import Failure, ToolError
from schemas.kinds import KINDS, KindRegistry
from schemas.payloads import CmdAck, ErrorEnvelope
from schemas.registry import SchemaRegistry
from tests.fakes.callers import call_of
from tests.fakes.disk import full_disk
from tests.fakes.examples import examples
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, METRICS, NODE_ID, OTHER_NODE_ID, SimulatedCa

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
PING, PONG = {"message": "ping"}, {"message": "pong"}
BOUND_S = 10
CONSTRAINTS = {"rate_limit_rps": 50, "max_concurrency": 50}
WIDE_ECHO = {**ECHO, "constraints": CONSTRAINTS}
MAY_HAVE_RUN = "The first call under this key may have run; its outcome is not known."
IDEMPOTENT = [pytest.param(True, id="idempotent"), pytest.param(False, id="not idempotent")]


def kinds(*, idempotent: bool) -> KindRegistry:
    """Return the kinds that ship; calling their tools again is said to be harmless, or not."""
    return KindRegistry(
        replace(
            kind,
            verbs={name: replace(verb, idempotent=idempotent) for name, verb in kind.verbs.items()},
        )
        for kind in KINDS
    )


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


class Stage:
    """A gateway whose tools are not idempotent, unless a test overrides it."""

    def __init__(  # noqa: PLR0913 - what a test may want to have otherwise
        self,
        hub: Hub,
        router: LocalRouter,
        seconds: Seconds,
        *,
        capability: Mapping[str, Any] = WIDE_ECHO,
        max_keys: int = QUOTA_OF_ALL.keys,
        mode: EnvelopeMode = EnvelopeMode.ENFORCE,
    ) -> None:
        self.hub = hub
        self.router = router
        self.seconds = seconds
        hub.connect(hub.ca.issue(), capabilities=[capability, METRICS, {**WIDE_ECHO, "cap_id": "echo2"}])
        self.gateway = hub.gateway(router, seconds, mode=mode, max_keys=max_keys)
        self.token = hub.token()

    def request(
        self, key: object = "k", arguments: object = PING, name: str = ECHO_NAME, token: str | None = None
    ) -> CallRequest:
        meta = {} if key is None else {"edge_kubelet__idempotency_key": key}
        return call_of(token or self.token, name, arguments, **meta)

    async def call(
        self, key: object = "k", arguments: object = PING, name: str = ECHO_NAME, token: str | None = None
    ) -> CallAnswer:
        return await self.gateway.call(self.request(key, arguments, name, token))

    def begin(self, key: object = "k", token: str | None = None) -> asyncio.Task[CallAnswer]:
        return asyncio.create_task(self.call(key, token=token))

    def jti(self, token: str) -> str:
        return self.hub.authenticator.identify(token).jti

    def decisions(self) -> list[tuple[Any, ...]]:
        """Return the audit: decision or outcome, code, and whether it says that it repeats the first call."""
        lines = self.hub.audited()
        assert {line["first"] for line in lines if "first" in line} <= {
            line["correlation_id"] for line in lines if "first" not in line
        }
        return [(line.get("decision") or line["outcome"], line["code"], "first" in line) for line in lines]

    def attempts(self) -> list[int]:
        return [line["attempt"] for line in self.hub.access_lines.entries()]


@pytest.fixture
def single(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Hub]:
    """The hub of a relay whose tools may not be called twice."""
    hub = Hub(tmp_path, registry, kinds=kinds(idempotent=False))
    yield hub
    hub.close()


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def stage(single: Hub, router: ScriptedRouter, seconds: Seconds) -> Stage:
    return Stage(single, router, seconds)


@pytest.fixture
def held() -> HeldRouter:
    return HeldRouter()


@pytest.fixture
def waiting(single: Hub, held: HeldRouter, seconds: Seconds) -> Stage:
    """The gateway of a node that answers when a test does."""
    return Stage(single, held, seconds)


def code(answer: CallAnswer) -> str:
    return answer.error["code"] if answer.error else "ok"


def told(answer: CallAnswer) -> dict[str, Any]:
    """Return an error less what is each answer's own."""
    assert answer.error is not None
    return {name: value for name, value in answer.error.items() if name != "correlation_id"}


async def until_joined(stage: Stage, lines: int) -> None:
    """Wait until the audit has so many lines, which a call that joins writes before it waits."""
    async with asyncio.timeout(BOUND_S):
        while len(stage.hub.audited()) < lines:  # noqa: ASYNC110 - the audit is a file, without an event to await
            await asyncio.sleep(0)


def raising(failure: Failure) -> Callable[[Command], dict[str, Any]]:
    def answer(_command: Command) -> dict[str, Any]:
        raise ToolError(failure)

    return answer


def answering(envelope_code: str) -> Callable[[Command], CmdAck]:
    error: ErrorEnvelope = {"code": envelope_code, "message": "m", "suggested_fix": "f", "retry_after_ms": 7}
    return lambda _command: {"ok": False, "error": error}


def breaking(_command: Command) -> dict[str, Any]:
    raise ZeroDivisionError


# --- once -----------------------------------------------------------------------------------------------


async def test_a_call_that_comes_again_gets_the_outcome_of_the_first_without_a_second_command(
    stage: Stage, router: ScriptedRouter
) -> None:
    first, second = await stage.call(), await stage.call()
    assert first.result == second.result
    assert first.text == second.text
    assert len(router.commands) == 1
    assert stage.decisions() == [
        ("allow", "ok", False),
        ("ok", "ok", False),
        ("allow", "ok", True),
        ("ok", "ok", True),
    ]
    assert len({line["correlation_id"] for line in stage.hub.audited()}) == 2
    assert stage.attempts() == [1, 1]


async def test_without_a_key_every_call_is_made(stage: Stage, router: ScriptedRouter) -> None:
    for _ in range(3):
        assert code(await stage.call(None)) == "ok"
    assert len(router.commands) == 3
    assert all("first" not in line for line in stage.hub.audited())


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(answering("E_INTERNAL"), id="an error of the node"),
        pytest.param(answering("E_VERB_UNSUPPORTED"), id="a refusal of the node"),
        pytest.param(lambda _: {"ok": True, "result": {}}, id="a result that does not fit"),
    ],
)
async def test_an_error_that_the_node_answered_with_is_an_outcome_too(
    stage: Stage, router: ScriptedRouter, answer: Callable[[Command], dict[str, Any]]
) -> None:
    router.answer = answer
    answers = [await stage.call() for _ in range(3)]
    assert len({str(told(each)) for each in answers}) == 1
    assert len({each.error["correlation_id"] for each in answers if each.error}) == 3
    assert len(router.commands) == 1
    assert [decision[1:] for decision in stage.decisions()[1::2]] == [
        (code(answers[0]), False),
        (code(answers[0]), True),
        (code(answers[0]), True),
    ]


async def test_what_is_told_again_does_not_keep_alive_where_it_was_told_before(
    stage: Stage, router: ScriptedRouter
) -> None:
    router.answer = answering("E_INTERNAL")
    tool = stage.hub.fleet.resolve(ECHO_NAME, stage.hub.authenticator.identify(stage.token).rights)
    await stage.call()
    # What is kept shows nowhere else.
    keyed_calls = list(stage.hub.idempotent_calls._store._keyed_calls.values())  # noqa: SLF001 - as above
    for _ in range(3):
        await stage.call()
        (keyed,) = keyed_calls
        assert isinstance(keyed.outcome, ToolError)
        assert keyed.outcome.__traceback__ is None
    assert tool.canonical == ECHO_NAME


async def test_both_names_of_a_tool_are_one_tool(stage: Stage, router: ScriptedRouter) -> None:
    await stage.call()
    assert code(await stage.call(name=ECHO_NAME.replace(".", "-"))) == "ok"
    assert len(router.commands) == 1


async def test_an_agent_is_the_same_with_another_token(stage: Stage, router: ScriptedRouter) -> None:
    await stage.call()
    assert code(await stage.call(token=stage.hub.token(ttl_s=60))) == "ok"
    assert len(router.commands) == 1


EMPTY: list[object] = [{}, None]


async def test_no_arguments_are_the_same_however_they_are_said(stage: Stage, router: ScriptedRouter) -> None:
    sample = {"ts_ms": 1_760_000_000_000, "node_id": NODE_ID, "uptime_s": 1}
    router.answer = lambda _: {"ok": True, "result": sample}
    for said in EMPTY:
        assert code(await stage.call("k", said, METRICS_NAME)) == "ok"
    assert len(router.commands) == 1


# --- whose key it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"key": "l"}, id="another key"),
        pytest.param({"name": ECHO_NAME.replace(".echo.", ".echo2.")}, id="another tool of the node"),
        pytest.param({"sub": "agent-2"}, id="another principal"),
    ],
)
async def test_a_key_counts_for_one_principal_and_one_tool(
    stage: Stage, router: ScriptedRouter, other: dict[str, Any]
) -> None:
    await stage.call()
    sub = other.pop("sub", "agent-1")
    assert code(await stage.call(token=stage.hub.token(sub=sub), **other)) == "ok"
    assert len(router.commands) == 2


async def test_a_key_counts_for_one_tenant(stage: Stage, router: ScriptedRouter) -> None:
    stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID, "globex"), capabilities=[WIDE_ECHO])
    theirs = {"token": stage.hub.token(tenant="globex"), "name": ECHO_NAME.replace(NODE_ID, OTHER_NODE_ID)}
    assert [code(await stage.call()), code(await stage.call(arguments=PONG, **theirs))] == ["ok", "ok"]
    assert [command.node_id for command in router.commands] == [NODE_ID, OTHER_NODE_ID]


@pytest.mark.parametrize(
    "other", [{"tenant": "globex"}, {"issuer": "https://login.example"}, {"sub": "agent-2"}], ids=str
)
async def test_every_part_of_who_calls_counts_even_where_the_tool_is_the_same(
    stage: Stage, router: ScriptedRouter, other: dict[str, Any]
) -> None:
    who = stage.hub.authenticator.identify(stage.token)
    tool = stage.hub.fleet.resolve(ECHO_NAME, who.rights)
    for principal in (who, replace(who, **other), who):
        record = CallRecord(stage.hub.ulids.new(), stage.request().call, stage.seconds())
        assert (
            await stage.hub.idempotent_calls.run("k", tool, principal, record, Limiter(PER_AGENT, 0.0))
        ).error is None
    assert len(router.commands) == 2


OTHER_CALLERS = [
    pytest.param({"tenant": "globex"}, id="of another tenant"),
    pytest.param({"scopes": ["tools:call:reversible"]}, id="without the scope"),
    pytest.param({"tenant": "globex", "sub": "agent-2"}, id="of another tenant and name"),
]


@pytest.mark.parametrize("other_caller", OTHER_CALLERS)
async def test_who_may_not_call_learns_nothing_of_a_key(
    stage: Stage, router: ScriptedRouter, other_caller: dict[str, Any]
) -> None:
    token = stage.hub.token(**other_caller)
    before = told(await stage.call(token=token))
    await stage.call()
    for arguments in (PING, PONG):
        assert told(await stage.call(arguments=arguments, token=token)) == before
    assert before["code"] == "E_SAFETY_DENIED"
    assert len(router.commands) == 1


@pytest.mark.parametrize("other_caller", OTHER_CALLERS)
async def test_who_may_not_call_takes_no_key(
    stage: Stage, router: ScriptedRouter, other_caller: dict[str, Any]
) -> None:
    await stage.call(token=stage.hub.token(**other_caller))
    await stage.call(arguments={})
    assert code(await stage.call(arguments=PONG)) == "ok"
    assert len(router.commands) == 1


async def test_who_joins_a_call_is_asked_for_its_rights_as_well(waiting: Stage, held: HeldRouter) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    for denied in ({"tenant": "globex"}, {"scopes": ["tools:call:reversible"]}):
        assert code(await waiting.call(token=waiting.hub.token(**denied))) == "E_SAFETY_DENIED"
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_a_token_that_was_revoked_gets_no_outcome(stage: Stage) -> None:
    await stage.call()
    stage.hub.authenticator.revoke(frozenset({stage.jti(stage.token)}))
    assert code(await stage.call()) == "E_SAFETY_DENIED"
    assert code(await stage.call(token=stage.hub.token())) == "ok"


async def test_other_arguments_under_the_same_key_are_refused_and_change_nothing(
    stage: Stage, router: ScriptedRouter
) -> None:
    await stage.call()
    refused = told(await stage.call(arguments=PONG))
    assert refused["code"] == "E_MANIFEST_INVALID"
    assert refused["message"] == "The idempotency key was used for other arguments of this tool."
    line = stage.hub.audited()[-1]
    assert (line["decision"], line["code"]) == ("deny", "E_MANIFEST_INVALID")
    assert code(await stage.call()) == "ok"
    assert [command.arguments for command in router.commands] == [PING]


# --- under way ------------------------------------------------------------------------------------------


async def test_a_call_under_way_is_joined(waiting: Stage, held: HeldRouter) -> None:
    tasks = [waiting.begin() for _ in range(3)]
    command, answer = await held.next()
    await until_joined(waiting, 3)
    answer.set_result(echoed(command))
    answers = await asyncio.gather(*tasks)
    assert [each.result for each in answers] == [echoed(command)["result"]] * 3
    assert held.waiting.empty()
    assert sorted(waiting.decisions()) == sorted(
        [("allow", "ok", False), ("ok", "ok", False), *[("allow", "ok", True), ("ok", "ok", True)] * 2]
    )


async def test_who_joined_gets_the_error_of_the_call_under_its_own_id(
    waiting: Stage, held: HeldRouter
) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    _, answer = await held.next()
    await until_joined(waiting, 2)
    answer.set_exception(ToolError(Failure.NODE_OFFLINE))
    first, second = await asyncio.gather(*tasks)
    assert told(first) == told(second)
    assert told(first)["code"] == "E_NODE_OFFLINE"
    assert first.error != second.error


async def test_other_arguments_are_refused_while_the_call_is_under_way(
    waiting: Stage, held: HeldRouter
) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    assert code(await waiting.call(arguments=PONG)) == "E_MANIFEST_INVALID"
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_a_bug_in_the_call_is_told_to_all_who_wait_for_it(waiting: Stage, held: HeldRouter) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    _, answer = await held.next()
    await until_joined(waiting, 2)
    answer.set_exception(ZeroDivisionError())
    assert [code(each) for each in await asyncio.gather(*tasks)] == ["E_INTERNAL"] * 2


async def test_who_joins_waits_no_longer_than_a_call_of_its_own_would(
    single: Hub, held: HeldRouter, seconds: Seconds
) -> None:
    brief = {**ECHO, "constraints": {**CONSTRAINTS, "deadline_ms_default": 50}}
    stage = Stage(single, held, seconds, capability=brief)
    first = stage.begin()
    command, answer = await held.next()
    joined = await asyncio.wait_for(stage.call(), BOUND_S)
    assert told(joined)["message"] == Failure.DEADLINE_EXCEEDED.value.message
    assert not first.done()
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


# --- what is not remembered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "refusing",
    [
        pytest.param(raising(Failure.NODE_OFFLINE), id="the node is offline"),
        pytest.param(answering("E_RATE_LIMITED"), id="the node has too much to do"),
    ],
)
async def test_a_refusal_before_anything_ran_is_not_remembered(
    stage: Stage, router: ScriptedRouter, refusing: Callable[[Command], dict[str, Any]]
) -> None:
    router.answer = refusing
    assert code(await stage.call()) in {"E_NODE_OFFLINE", "E_RATE_LIMITED"}
    router.answer = echoed
    assert [code(await stage.call(arguments=PONG)), code(await stage.call(arguments=PONG))] == ["ok", "ok"]
    assert len(router.commands) == 2
    assert all("first" not in line for line in stage.hub.audited()[:4])


async def test_a_refusal_of_the_capabilitys_gate_is_not_remembered(
    single: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    slow = {**ECHO, "constraints": {"rate_limit_rps": 1, "max_concurrency": 1}}
    stage = Stage(single, router, seconds, capability=slow)
    codes = [code(await stage.call(key)) for key in (None, "k")]
    seconds.now += 1
    codes += [code(await stage.call("k")) for _ in range(2)]
    assert codes == ["ok", "E_RATE_LIMITED", "ok", "ok"]
    assert len(router.commands) == 2


async def test_a_call_that_could_not_be_recorded_is_not_remembered(
    stage: Stage, router: ScriptedRouter
) -> None:
    with full_disk():
        assert code(await stage.call()) == "E_INTERNAL"
    assert router.commands == []
    assert [code(await stage.call()), code(await stage.call())] == ["ok", "ok"]
    assert len(router.commands) == 1


async def test_a_repeat_that_cannot_be_recorded_gets_no_outcome(stage: Stage, router: ScriptedRouter) -> None:
    await stage.call()
    with full_disk(stage.hub.audit_file.stat().st_size):
        assert code(await stage.call()) == "E_INTERNAL"
    assert code(await stage.call()) == "ok"
    assert len(router.commands) == 1


async def test_an_outcome_that_could_not_be_recorded_is_remembered(
    stage: Stage, router: ScriptedRouter
) -> None:
    with ExitStack() as stack:

        def fill_the_disk(command: Command) -> CmdAck:
            stack.enter_context(full_disk(stage.hub.audit_file.stat().st_size))
            return echoed(command)

        router.answer = fill_the_disk
        assert code(await stage.call()) == "ok"
    assert code(await stage.call()) == "ok"
    assert len(router.commands) == 1


# --- an unknown outcome ---------------------------------------------------------------------------------

UNKNOWN = [
    pytest.param(raising(Failure.DEADLINE_EXCEEDED), id="no answer in time"),
    pytest.param(raising(Failure.ATTESTATION_FAILED), id="the node was shut out"),
    pytest.param(raising(Failure.INTERNAL), id="something went wrong on the way"),
    pytest.param(answering("E_DEADLINE_EXCEEDED"), id="the node gave up"),
    pytest.param(breaking, id="a bug"),
]


@pytest.mark.parametrize("answer", UNKNOWN)
async def test_of_a_tool_that_is_not_idempotent_a_call_that_may_have_run_is_never_made_again(
    stage: Stage, router: ScriptedRouter, answer: Callable[[Command], dict[str, Any]]
) -> None:
    router.answer = answer
    assert code(await stage.call()) != "ok"
    router.answer = echoed
    for _ in range(2):
        again = told(await stage.call())
        assert (again["code"], again["message"]) == ("E_DEADLINE_EXCEEDED", MAY_HAVE_RUN)
    assert code(await stage.call(arguments=PONG)) == "E_MANIFEST_INVALID"
    assert len(router.commands) == 1
    assert ("error", "E_DEADLINE_EXCEEDED", True) in stage.decisions()


@pytest.mark.parametrize("answer", UNKNOWN)
async def test_of_an_idempotent_tool_a_call_that_may_have_run_is_made_again(
    hub: Hub, router: ScriptedRouter, seconds: Seconds, answer: Callable[[Command], dict[str, Any]]
) -> None:
    stage = Stage(hub, router, seconds)
    router.answer = answer
    assert code(await stage.call()) != "ok"
    router.answer = echoed
    assert [code(await stage.call()) for _ in range(3)] == ["ok"] * 3
    assert len(router.commands) == 2
    assert stage.attempts() == [1, 2, 2, 2]
    assert [repeats for _, _, repeats in stage.decisions()] == [False] * 4 + [True] * 4


async def test_what_may_have_run_stays_so_when_it_cannot_be_sent_again(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(hub, router, seconds)
    codes = []
    for failure in (Failure.DEADLINE_EXCEEDED, Failure.NODE_OFFLINE):
        router.answer = raising(failure)
        codes.append(code(await stage.call()))
    with full_disk(stage.hub.audit_file.stat().st_size):
        codes.append(code(await stage.call()))
    router.answer = echoed
    codes += [code(await stage.call(arguments=arguments)) for arguments in (PONG, PING)]
    assert codes == ["E_DEADLINE_EXCEEDED", "E_NODE_OFFLINE", "E_INTERNAL", "E_MANIFEST_INVALID", "ok"]
    assert stage.attempts() == [1, 2, 3, 1, 4]


# --- ten minutes, and room ------------------------------------------------------------------------------


@pytest.mark.parametrize("idempotent", IDEMPOTENT)
async def test_a_key_counts_for_ten_minutes(
    tmp_path: Path, registry: SchemaRegistry, router: ScriptedRouter, seconds: Seconds, *, idempotent: bool
) -> None:
    hub = Hub(tmp_path, registry, kinds=kinds(idempotent=idempotent))
    stage = Stage(hub, router, seconds)
    await stage.call()
    seconds.now += 599.9
    assert code(await stage.call()) == "ok"
    assert len(router.commands) == 1
    seconds.now += 0.1
    assert code(await stage.call(arguments=PONG)) == "ok"
    assert [command.arguments for command in router.commands] == [PING, PONG]
    hub.close()


async def test_when_there_is_no_room_a_new_key_is_refused_and_every_live_one_answered(
    single: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(single, router, seconds, max_keys=2)
    for key in ("a", "b"):
        assert code(await stage.call(key)) == "ok"
    refused = told(await stage.call("c"))
    assert (refused["code"], refused["retry_after_ms"]) == ("E_RATE_LIMITED", 600_000)
    line = single.audited()[-1]
    assert (line["decision"], line["code"]) == ("deny", "E_RATE_LIMITED")
    assert [code(await stage.call(key)) for key in ("a", "b", None)] == ["ok"] * 3
    assert len(router.commands) == 3
    seconds.now += 600
    assert code(await stage.call("c")) == "ok"


async def test_a_key_that_could_not_be_used_takes_no_room(
    single: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(single, router, seconds, max_keys=1)
    router.answer = raising(Failure.NODE_OFFLINE)
    assert [code(await stage.call(key)) for key in "abc"] == ["E_NODE_OFFLINE"] * 3
    router.answer = echoed
    assert code(await stage.call("d")) == "ok"


@pytest.mark.parametrize("keys", [("k" * 100_000, "k" * 99_999 + "l"), ("\ud800", "\ud801")])
async def test_where_the_form_is_not_enforced_a_key_of_any_kind_counts(
    single: Hub, router: ScriptedRouter, seconds: Seconds, keys: tuple[str, str]
) -> None:
    stage = Stage(single, router, seconds, mode=EnvelopeMode.OFF)
    assert [code(await stage.call(key)) for key in (*keys, *keys)] == ["ok"] * 4
    assert len(router.commands) == 2


# --- who goes away --------------------------------------------------------------------------------------


async def hung_up(task: asyncio.Task[CallAnswer]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_when_the_first_caller_disconnects_the_command_goes_on_and_the_repeat_gets_its_outcome(
    waiting: Stage, held: HeldRouter
) -> None:
    first = waiting.begin()
    command, answer = await held.next()
    await hung_up(first)
    second = waiting.begin()
    await until_joined(waiting, 2)
    assert not answer.cancelled()
    answer.set_result(echoed(command))
    assert (await second).result == echoed(command)["result"]
    assert (await waiting.call()).result == echoed(command)["result"]
    assert held.waiting.empty()
    assert [line["status"] for line in waiting.hub.access_lines.entries()] == [499, 200, 200]


async def test_a_command_whose_callers_have_all_gone_is_recorded_and_remembered(
    waiting: Stage, held: HeldRouter
) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    command, answer = await held.next()
    await until_joined(waiting, 2)
    for task in tasks:
        await hung_up(task)
    answer.set_result(echoed(command))
    await until_joined(waiting, 4)
    assert sorted(waiting.decisions()) == sorted(
        [("allow", "ok", False), ("ok", "ok", False), ("allow", "ok", True), ("error", "cancelled", True)]
    )
    assert code(await waiting.call()) == "ok"
    assert held.waiting.empty()


async def test_an_error_without_a_waiting_caller_is_not_reported_by_the_event_loop(
    waiting: Stage, held: HeldRouter
) -> None:
    alarms: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: alarms.append(context))
    task = waiting.begin()
    _, answer = await held.next()
    await hung_up(task)
    answer.set_exception(ToolError(Failure.NODE_OFFLINE))
    await until_joined(waiting, 2)
    del answer, task
    again = waiting.begin()
    command, answer = await held.next()
    answer.set_result(echoed(command))
    assert code(await again) == "ok"
    assert alarms == []


async def test_a_bug_in_a_call_whose_caller_has_gone_is_logged(waiting: Stage, held: HeldRouter) -> None:
    task = waiting.begin()
    _, answer = await held.next()
    await hung_up(task)
    answer.set_exception(LookupError("planted"))
    line = await waiting.hub.lines.until("call failed")
    assert line["error"] == "LookupError: planted"


async def test_a_caller_that_joined_and_disconnects_does_not_affect_the_others(
    waiting: Stage, held: HeldRouter
) -> None:
    first, second = [waiting.begin() for _ in range(2)]
    command, answer = await held.next()
    await until_joined(waiting, 2)
    await hung_up(second)
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_without_a_key_the_command_ends_with_its_caller(waiting: Stage, held: HeldRouter) -> None:
    task = waiting.begin(None)
    _, answer = await held.next()
    await hung_up(task)
    assert answer.cancelled()


async def test_at_the_end_of_the_relay_what_is_under_way_is_ended_and_recorded(
    waiting: Stage, held: HeldRouter
) -> None:
    tasks = [waiting.begin(key) for key in ("a", "b")]
    answers = [(await held.next())[1] for _ in tasks]
    for task in tasks:
        await hung_up(task)
    await waiting.hub.idempotent_calls.end()
    assert all(answer.cancelled() for answer in answers)
    lines = waiting.hub.audited()
    assert [line["code"] for line in lines if "outcome" in line] == ["cancelled"] * 2
    await waiting.hub.idempotent_calls.end()
    assert waiting.hub.audited() == lines


# --- a token that is revoked ----------------------------------------------------------------------------


async def test_who_joined_and_whose_token_is_revoked_is_refused_while_the_call_goes_on(
    waiting: Stage, held: HeldRouter
) -> None:
    theirs = waiting.hub.token()
    first, second = waiting.begin(), waiting.begin(token=theirs)
    command, answer = await held.next()
    await until_joined(waiting, 2)
    waiting.gateway.revoke({waiting.jti(theirs)})
    refused = told(await asyncio.wait_for(second, BOUND_S))
    assert (refused["code"], refused["message"]) == (
        "E_SAFETY_DENIED",
        "The token was revoked during the call.",
    )
    assert not answer.cancelled()
    answer.set_result(echoed(command))
    assert code(await first) == "ok"


async def test_when_the_first_callers_token_is_revoked_another_caller_is_told_that_the_outcome_is_unknown(
    waiting: Stage, held: HeldRouter
) -> None:
    theirs = waiting.hub.token()
    first, second = waiting.begin(), waiting.begin(token=theirs)
    _, answer = await held.next()
    await until_joined(waiting, 2)
    waiting.gateway.revoke({waiting.jti(waiting.token)})
    async with asyncio.timeout(BOUND_S):
        assert code(await first) == "E_SAFETY_DENIED"
        joined = told(await second)
    assert (joined["code"], joined["message"]) == ("E_DEADLINE_EXCEEDED", MAY_HAVE_RUN)
    assert answer.cancelled()
    assert told(await waiting.call(token=theirs)) == joined
    assert held.waiting.empty()


async def test_a_token_that_both_have_is_revoked_for_both(waiting: Stage, held: HeldRouter) -> None:
    tasks = [waiting.begin() for _ in range(2)]
    await held.next()
    await until_joined(waiting, 2)
    waiting.gateway.revoke({waiting.jti(waiting.token)})
    async with asyncio.timeout(BOUND_S):
        assert [code(await task) for task in tasks] == ["E_SAFETY_DENIED"] * 2


async def test_revoking_the_token_of_a_caller_who_has_gone_ends_its_command(
    waiting: Stage, held: HeldRouter
) -> None:
    first = waiting.begin()
    _, answer = await held.next()
    await hung_up(first)
    waiting.gateway.revoke({waiting.jti(waiting.token)})
    await until_joined(waiting, 2)
    assert answer.cancelled()
    assert waiting.decisions()[-1] == ("error", "E_SAFETY_DENIED", False)


# --- any interleaving -----------------------------------------------------------------------------------

CA = SimulatedCa()
REGISTRY = SchemaRegistry()
HAS_NOT_RUN = {"offline": Failure.NODE_OFFLINE}
MAY_RUN = {"deadline": Failure.DEADLINE_EXCEEDED, "shut out": Failure.ATTESTATION_FAILED}
ENDINGS = ["ok", "fails", "busy", "gives up", "breaks", *HAS_NOT_RUN, *MAY_RUN]
Place = tuple[str, str]


@dataclass
class Known:
    """What the model knows of a key. ``state``: under way, known or unknown."""

    message: str
    opened: float
    state: str = "under way"
    outcome: str = ""


@dataclass
class Sent:
    """A command that the node has and has not answered."""

    place: Place
    jti: str
    command: Command
    answer: CommandAnswer


@dataclass
class Asked:
    """A call that waits, and what it waits for."""

    place: Place
    jti: str
    task: asyncio.Task[CallAnswer]


class OnceMachine(RuleBasedStateMachine):
    """Calls of two agents under two keys, against a model that is too simple to be wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.directory = tempfile.TemporaryDirectory()
        self.hub = Hub(Path(self.directory.name), REGISTRY, ca=CA, kinds=kinds(idempotent=False))
        self.seconds, self.held = Seconds(), HeldRouter()
        self.stage = Stage(self.hub, self.held, self.seconds)
        self.model: dict[Place, Known] = {}
        self.sent: list[Sent] = []
        self.asked: list[Asked] = []

    def settle(self) -> None:
        """Let everything happen that can."""

        async def a_while() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self.loop.run_until_complete(a_while())

    @rule(
        key=st.sampled_from("ab"),
        sub=st.sampled_from(["agent-1", "agent-2"]),
        message=st.sampled_from(["ping", "ping", "ping", "pong"]),
    )
    def call(self, key: str, sub: str, message: str) -> None:
        self.seconds.now += 0.1
        place, token = (sub, key), self.hub.token(sub=sub)
        known = self.model.get(place)
        if known and known.state != "under way" and known.opened + 600 <= self.seconds.now:
            known = None
        request = self.stage.request(key, {"message": message}, token=token)
        task = self.loop.create_task(self.stage.gateway.call(request))
        self.settle()
        jti = self.stage.jti(token)
        if known is None:
            self.model[place] = Known(message, self.seconds.now)
            command, answer = self.held.waiting.get_nowait()
            self.sent.append(Sent(place, jti, command, answer))
            self.asked.append(Asked(place, jti, task))
        elif known.message != message:
            assert code(task.result()) == "E_MANIFEST_INVALID"
        elif known.state == "under way":
            assert not task.done()
            self.asked.append(Asked(place, jti, task))
        else:
            expected = known.outcome if known.state == "known" else "E_DEADLINE_EXCEEDED"
            assert code(task.result()) == expected
        assert self.held.waiting.empty()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), how=st.sampled_from(ENDINGS))
    def answer(self, data: st.DataObject, how: str) -> None:
        sent = self.sent.pop(data.draw(st.integers(0, len(self.sent) - 1)))
        outcome = {"ok": "ok", "fails": "E_INTERNAL", "busy": "E_RATE_LIMITED", "breaks": "E_INTERNAL"}
        node_codes = {"fails": "E_INTERNAL", "busy": "E_RATE_LIMITED", "gives up": "E_DEADLINE_EXCEEDED"}
        if how == "ok":
            sent.answer.set_result(echoed(sent.command))
        elif how == "breaks":
            sent.answer.set_exception(ZeroDivisionError())
        elif how in node_codes:
            sent.answer.set_result(answering(node_codes[how])(sent.command))
        else:
            sent.answer.set_exception(ToolError((HAS_NOT_RUN | MAY_RUN)[how]))
        self.settle()
        known = self.model[sent.place]
        if how in {"busy", *HAS_NOT_RUN}:
            del self.model[sent.place]
        elif how in {"ok", "fails"}:
            known.state, known.outcome = "known", outcome[how]
        else:
            known.state = "unknown"
        waited = [asked for asked in self.asked if asked.place == sent.place]
        self.asked = [asked for asked in self.asked if asked.place != sent.place]
        answers = {code(asked.task.result()) for asked in waited}
        assert len(answers) <= 1
        if how in outcome:
            assert answers <= {outcome[how]}

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def hang_up(self, data: st.DataObject) -> None:
        asked = self.asked.pop(data.draw(st.integers(0, len(self.asked) - 1)))
        asked.task.cancel()
        self.settle()
        assert asked.task.cancelled()
        assert not any(sent.answer.cancelled() for sent in self.sent)

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        asked = self.asked[data.draw(st.integers(0, len(self.asked) - 1))]
        self.stage.gateway.revoke({asked.jti})
        self.settle()
        assert code(asked.task.result()) == "E_SAFETY_DENIED"
        for sent in self.sent:
            assert sent.answer.cancelled() is (sent.jti == asked.jti)
            if sent.jti == asked.jti:
                self.model[sent.place].state = "unknown"
        self.sent = [sent for sent in self.sent if sent.jti != asked.jti]
        for other in self.asked:
            assert other.task.done() is (self.model[other.place].state != "under way" or other is asked)
        self.asked = [other for other in self.asked if not other.task.done()]

    @rule(seconds=st.sampled_from([1.0, 599.0, 600.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.seconds.now += seconds

    def teardown(self) -> None:
        self.loop.run_until_complete(self.hub.idempotent_calls.end())
        for asked in self.asked:
            with suppress(asyncio.CancelledError):
                self.loop.run_until_complete(asked.task)
        self.loop.close()
        self.hub.close()
        self.directory.cleanup()


def test_no_interleaving_sends_a_command_twice_under_one_key_or_tells_what_is_not_so() -> None:
    run_state_machine_as_test(OnceMachine, settings=settings(examples(8, 60), stateful_step_count=40))
