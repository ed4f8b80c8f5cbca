"""What the audit holds of calls."""

from contextlib import ExitStack
from typing import Any

from relay.calls.gateway import CallGateway
from relay.routing.port import Command
from schemas.errors import Failure
from schemas.payloads import CmdAck
from tests.fakes.callers import call_of
from tests.fakes.disk import full_disk
from tests.fakes.gateway_calls import ECHO_NAME, audited, error, refusing, request
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter, echoed
from tests.fakes.signer import NODE_ID, NOW_MS, TENANT

ALWAYS = {"correlation_id", "tenant", "sub", "jti", "tool", "node_id", "code", "ts_ms"}


async def test_the_decision_is_in_the_audit_before_the_node_hears_of_it(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    seen: list[dict[str, Any]] = []

    def answer(command: Command) -> CmdAck:
        seen.extend(hub.audited())
        return echoed(command)

    router.answer = answer
    await gateway.call(request(hub))
    (line,) = seen
    assert (line["decision"], line["code"], line["correlation_id"]) == (
        "allow",
        "ok",
        router.commands[0].correlation_id,
    )
    assert "outcome" not in line


async def test_a_decision_and_an_outcome_are_one_line_each(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    await gateway.call(request(hub))
    router.answer = refusing(Failure.DEADLINE_EXCEEDED)
    await gateway.call(request(hub))
    assert audited(hub, "decision", "outcome", "code") == [
        ("allow", None, "ok"),
        (None, "ok", "ok"),
        ("allow", None, "ok"),
        (None, "error", "E_DEADLINE_EXCEEDED"),
    ]
    decision, outcome = hub.audited()[:2]
    assert decision.keys() >= ALWAYS
    assert outcome.keys() >= ALWAYS | {"duration_ms"}
    assert outcome["duration_ms"] >= 0
    assert (outcome["tenant"], outcome["sub"]) == (TENANT, "agent-1")
    assert (outcome["tool"], outcome["node_id"], outcome["ts_ms"]) == (ECHO_NAME, NODE_ID, NOW_MS)


async def test_neither_arguments_nor_result_nor_token_get_into_audit_or_log(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    secret = "correct horse battery staple"
    token = hub.token()
    call = call_of(token, ECHO_NAME, {"message": secret})
    await gateway.call(call)
    router.answer = lambda _: {"ok": True, "result": {"message": secret}}
    await gateway.call(call)
    await gateway.call(request(hub, arguments={"message": secret, "more": secret}))
    written = hub.audit_file.read_text() + hub.lines.getvalue()
    assert secret not in written
    assert token not in written
    assert token.rpartition(".")[2] not in written


async def test_a_hostile_name_is_cut_and_escaped_in_the_audit(hub: Hub, gateway: CallGateway) -> None:
    await gateway.call(request(hub, '\n{"decision":"allow"}\x1b[31m\u202e' * 1000))
    (line,) = hub.audited()
    assert line["decision"] == "deny"
    assert line["tool"].isprintable()
    assert len(line["tool"]) <= 64


async def test_while_the_audit_cannot_be_written_nothing_is_sent(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    await gateway.call(request(hub))
    with full_disk(hub.audit_file.stat().st_size):
        envelope = error(await gateway.call(request(hub)))
    assert (envelope["code"], len(router.commands)) == ("E_INTERNAL", 1)
    assert "not made" in envelope["message"]
    assert not hub.audit.available
    assert hub.lines.entries("audit cannot be written; calls are refused")


async def test_calls_are_accepted_again_with_the_first_line_that_can_be_written(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    with full_disk():
        await gateway.call(request(hub))
    assert (await gateway.call(request(hub))).error is None
    assert len(router.commands) == 1
    assert hub.audit.available
    assert audited(hub, "decision", "outcome") == [("allow", None), (None, "ok")]


async def test_a_refusal_that_cannot_be_recorded_opens_nothing(hub: Hub, gateway: CallGateway) -> None:
    with full_disk():
        envelope = error(await gateway.call(request(hub, "echo")))
    assert envelope["code"] == "E_INTERNAL"
    assert hub.audited() == []


async def test_when_only_the_outcome_cannot_be_written_the_caller_gets_the_result_and_later_calls_fail(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    with ExitStack() as stack:

        def fill_the_disk(command: Command) -> CmdAck:
            stack.enter_context(full_disk(hub.audit_file.stat().st_size))
            return echoed(command)

        router.answer = fill_the_disk
        first = await gateway.call(request(hub))
        second = await gateway.call(request(hub))
    assert first.result is not None
    assert error(second)["code"] == "E_INTERNAL"
    assert len(router.commands) == 1
    assert hub.lines.entries("outcome not recorded")
