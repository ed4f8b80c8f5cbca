"""What is remembered of a call with an idempotency key once it has ended, and when it is sent again."""

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from relay.calls.idempotency import QUOTA_OF_CALLER
from relay.routing.port import Command
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure
from schemas.payloads import CmdAck
from schemas.registry import SchemaRegistry
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub
from tests.fakes.keyed_calls import (
    CONSTRAINTS,
    MAY_HAVE_RUN,
    PING,
    PONG,
    Stage,
    answering,
    breaking,
    code,
    error_of,
    kinds,
    raising,
)
from tests.fakes.routers import ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO

IDEMPOTENT = [pytest.param(True, id="idempotent"), pytest.param(False, id="not idempotent")]


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
        again = error_of(await stage.call())
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
    refused = error_of(await stage.call("c"))
    assert (refused["code"], refused["retry_after_ms"]) == ("E_RATE_LIMITED", 600_000)
    line = single.audited()[-1]
    assert (line["decision"], line["code"]) == ("deny", "E_RATE_LIMITED")
    assert [code(await stage.call(key)) for key in ("a", "b", None)] == ["ok"] * 3
    assert len(router.commands) == 3
    seconds.now += 600
    assert code(await stage.call("c")) == "ok"


async def test_a_client_that_sends_a_key_with_each_call_of_an_idempotent_tool_is_not_refused(
    hub: Hub, router: ScriptedRouter, seconds: Seconds
) -> None:
    stage = Stage(hub, router, seconds)
    for number in range(QUOTA_OF_CALLER.keys + 100):
        assert code(await stage.call(str(number))) == "ok"
        seconds.now += 1 / CONSTRAINTS["rate_limit_rps"]
    made = len(router.commands)
    assert made == QUOTA_OF_CALLER.keys + 100
    assert code(await stage.call(str(made - 1))) == "ok"
    assert len(router.commands) == made  # the last ones are known


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
