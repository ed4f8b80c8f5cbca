"""Which calls are refused, with which code, and what ends with a token."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from relay.calls.gateway import CallGateway
from relay.fleet.node_record import Where
from relay.limits.rate_limits import PER_AGENT
from relay.settings.config import EnvelopeMode
from schemas.errors import Failure
from tests.fakes.callers import call_of
from tests.fakes.gateway_calls import ECHO_NAME, PING, begun, codes, error, request
from tests.fakes.hub import Hub
from tests.fakes.routers import HeldRouter, ScriptedRouter, SilentRouter
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, TTL_MS, SimulatedNode, key_named


def expire(hub: Hub, _node: SimulatedNode) -> None:
    hub.clock.advance(TTL_MS)


def remove(hub: Hub, _node: SimulatedNode) -> None:
    hub.fleet.connection_changed(NODE_ID, Where.NOWHERE)
    hub.fleet.tombstone(NODE_ID)


def remove_and_reject(hub: Hub, node: SimulatedNode) -> None:
    remove(hub, node)
    forged = node.manifest(issued_at_ms=NOW_MS + 1, signer=key_named("a thief"))
    hub.fleet.offer_manifest(NODE_ID, forged, "broker")


def nothing(_hub: Hub, _node: SimulatedNode) -> None:
    pass


Before = Callable[[Hub, SimulatedNode], None]
REFUSALS = [
    pytest.param(nothing, {"name": "echo"}, Failure.NAME_UNKNOWN, id="no name of a tool"),
    pytest.param(nothing, {"name": ""}, Failure.ENVELOPE_INVALID, id="no name"),
    pytest.param(
        nothing, {"name": f"sysecho.{NODE_ID}.other.invoke"}, Failure.NAME_UNKNOWN, id="no such capability"
    ),
    pytest.param(nothing, {"name": f"sysecho.{NODE_ID}.echo.get"}, Failure.NAME_UNKNOWN, id="no such verb"),
    pytest.param(nothing, {"name": f"gpio.{NODE_ID}.led.set"}, Failure.KIND_UNSUPPORTED, id="no such kind"),
    pytest.param(
        nothing,
        {"name": f"sysecho.{OTHER_NODE_ID}.echo.invoke"},
        Failure.SAFETY_DENIED,
        id="a node that exists nowhere",
    ),
    pytest.param(nothing, {"tenant": "globex"}, Failure.SAFETY_DENIED, id="another tenant's node"),
    pytest.param(nothing, {"scopes": ["sessions:message"]}, Failure.SAFETY_DENIED, id="no scope for tools"),
    pytest.param(
        nothing,
        {"scopes": ["tools:call:reversible", "tools:call:physical_actuation"]},
        Failure.SAFETY_DENIED,
        id="the scopes of other safety classes",
    ),
    pytest.param(expire, {}, Failure.MANIFEST_INVALID, id="the manifest has expired"),
    pytest.param(remove, {}, Failure.MANIFEST_NOT_FOUND, id="the node has no manifest"),
    pytest.param(remove_and_reject, {}, Failure.MANIFEST_INVALID, id="the manifest was rejected"),
    pytest.param(nothing, {"arguments": {}}, Failure.ARGUMENTS_INVALID, id="an argument is missing"),
    pytest.param(
        nothing,
        {"arguments": {"message": "a secret \ud800"}},
        Failure.ARGUMENTS_INVALID,
        id="a text that is none",
    ),
    pytest.param(
        nothing, {"arguments": {**PING, "more": 1}}, Failure.ARGUMENTS_INVALID, id="one argument more"
    ),
    pytest.param(
        nothing, {"arguments": {"message": "\x1b[31m"}}, Failure.ARGUMENTS_INVALID, id="control characters"
    ),
    pytest.param(
        nothing, {"arguments": {"message": "x" * 1025}}, Failure.ARGUMENTS_INVALID, id="too long a message"
    ),
    pytest.param(nothing, {"arguments": ["ping"]}, Failure.ENVELOPE_INVALID, id="a list of arguments"),
    pytest.param(nothing, {"arguments": "ping"}, Failure.ENVELOPE_INVALID, id="a text for arguments"),
]
# What is not of the form of a call is told which rule it breaks.
FORM = {
    "{'name': ''}": "The request is not a call: /tool violates pattern.",
    "{'arguments': ['ping']}": "The request is not a call: /input violates type.",
    "{'arguments': 'ping'}": "The request is not a call: /input violates type.",
}


@pytest.mark.holds(
    "RFC-0001/4/envelope", "RFC-0005/5/scope", "RFC-0005/6.2/arguments-before-dispatch", "RFC-0005/8/errors"
)
@pytest.mark.parametrize(("before", "call", "failure"), REFUSALS)
async def test_what_is_refused_is_refused_with_its_code_before_anything_is_sent(  # noqa: PLR0913, PLR0917 - the table's columns and the parts
    hub: Hub,
    node: SimulatedNode,
    gateway: CallGateway,
    router: ScriptedRouter,
    before: Before,
    call: dict[str, Any],
    failure: Failure,
) -> None:
    before(hub, node)
    envelope = error(await gateway.call(request(hub, **call)))
    assert envelope["code"] == failure.value.code
    message = FORM.get(str(call), failure.value.message)
    if failure is Failure.ARGUMENTS_INVALID:
        assert envelope["message"].startswith(
            ("Argument `", "The whole of the arguments ", "A text in the arguments ")
        )
    else:
        assert envelope["message"] == message
    assert envelope["suggested_fix"].endswith(failure.value.suggested_fix)
    assert router.commands == []
    (line,) = hub.audited()
    assert (line["decision"], line["code"]) == ("deny", failure.value.code)
    assert line["correlation_id"] == envelope["correlation_id"]
    assert (line["tenant"], line["sub"]) == (call.get("tenant", TENANT), "agent-1")
    assert hub.counted("calls_total", code=failure.value.code) == 1


async def test_nothing_is_called_while_what_has_been_revoked_cannot_be_read(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    hub.seconds.now += 3600
    envelope = error(await gateway.call(request(hub)))
    assert (envelope["code"], "cannot read what has been revoked" in envelope["message"]) == (
        "E_INTERNAL",
        True,
    )
    assert router.commands == []


@pytest.mark.holds("SPEC-0004/2.1/correlation")
@pytest.mark.parametrize("mode", EnvelopeMode)
async def test_a_malformed_correlation_id_is_refused_in_every_mode_and_not_recorded(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter, mode: EnvelopeMode
) -> None:
    gateway.change(PER_AGENT, mode)
    call = call_of(hub.token(), ECHO_NAME, PING, edge_kubelet__correlation_id="order\x1b17")
    envelope = error(await gateway.call(call))
    assert (envelope["code"], envelope["message"]) == (
        "E_MANIFEST_INVALID",
        "The correlation id of the call is malformed.",
    )
    assert "1 to 64 letters, digits and ._-" in envelope["suggested_fix"]
    assert router.commands == []
    (line,) = hub.audited()
    assert (line["decision"], line["correlation_id"]) == ("deny", envelope["correlation_id"])
    assert "caller_correlation_id" not in line


@pytest.mark.holds("RFC-0005/8/errors")
async def test_another_tenants_node_answers_as_one_that_exists_nowhere(
    hub: Hub, gateway: CallGateway
) -> None:
    names = (ECHO_NAME, f"sysecho.{OTHER_NODE_ID}.echo.invoke", f"gpio.{NODE_ID}.echo.invoke")
    answers = [error(await gateway.call(request(hub, name, tenant="globex"))) for name in names]
    for answer in answers:
        del answer["correlation_id"]
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize("token", ["", "a.b.c", "\xff" * 100, "x" * 10_000])
async def test_a_token_that_is_not_accepted_is_refused_first_of_all(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter, token: str
) -> None:
    envelope = error(await gateway.call(call_of(token, "no tool", "no arguments")))
    assert (envelope["code"], envelope["message"]) == ("E_SAFETY_DENIED", "The token is not accepted.")
    assert router.commands == []
    assert all(line.get("decision") != "allow" for line in hub.audited())


async def test_a_token_that_has_expired_since_is_refused(hub: Hub, gateway: CallGateway) -> None:
    call = request(hub, ttl_s=60)
    assert (await gateway.call(call)).error is None
    hub.clock.advance(60_000)
    assert error(await gateway.call(call))["code"] == "E_SAFETY_DENIED"


async def test_a_token_whose_issuer_has_withdrawn_the_key_since_is_refused(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    call = request(hub)
    principal = replace(call.caller.principal, key=b"the key of that name before")
    envelope = error(await gateway.call(call._replace(caller=call.caller._replace(principal=principal))))
    assert (envelope["code"], router.commands) == ("E_SAFETY_DENIED", [])


WORST: dict[str, Any] = {"name": "echo", "scopes": ["sessions:message"], "arguments": []}


@pytest.mark.parametrize(
    ("better", "failure"),
    [
        pytest.param({}, Failure.ENVELOPE_INVALID, id="the form comes first"),
        pytest.param({"arguments": {}}, Failure.NAME_UNKNOWN, id="then the name"),
        pytest.param({"arguments": {}, "name": ECHO_NAME}, Failure.SAFETY_DENIED, id="then the scope"),
        pytest.param(
            {"arguments": {}, "name": ECHO_NAME, "scopes": ["tools:call:read_only"]},
            Failure.ARGUMENTS_INVALID,
            id="then the arguments",
        ),
    ],
)
async def test_of_all_that_is_wrong_the_first_in_order_is_told(
    hub: Hub, gateway: CallGateway, better: dict[str, Any], failure: Failure
) -> None:
    envelope = error(await gateway.call(request(hub, **WORST | better)))
    assert envelope["code"] == failure.value.code
    assert envelope["suggested_fix"].endswith(failure.value.suggested_fix)


@pytest.mark.holds("RFC-0005/8/errors")
async def test_revoking_a_token_ends_its_calls_with_an_outcome_in_the_audit_and_no_others(
    hub: Hub, node: SimulatedNode
) -> None:
    assert node.node_id == NODE_ID
    router = HeldRouter()
    gateway = hub.gateway(router)
    revoked, other = request(hub), request(hub)
    jti = revoked.caller.principal.jti
    ended, _ = await begun(gateway, router, revoked)
    goes_on, answer = await begun(gateway, router, other)
    gateway.revoke(frozenset({jti}))
    envelope = error(await asyncio.wait_for(ended, 30))
    assert (envelope["code"], envelope["message"]) == (
        "E_SAFETY_DENIED",
        "The token was revoked during the call.",
    )
    assert envelope["suggested_fix"].startswith("Send a new token")
    line = hub.audited()[-1]
    assert (line["outcome"], line["code"], line["jti"]) == ("error", "E_SAFETY_DENIED", jti)
    assert line["correlation_id"] == envelope["correlation_id"]
    answer()
    assert (await goes_on).error is None


async def test_a_revoked_call_is_given_up_where_it_waits(hub: Hub, node: SimulatedNode) -> None:
    assert node.node_id == NODE_ID
    router = SilentRouter()
    gateway = hub.gateway(router)
    call = request(hub)
    task = asyncio.create_task(gateway.call(call))
    async with asyncio.timeout(30):
        await router.asked.wait()
        gateway.revoke({call.caller.principal.jti})
        await router.given_up.wait()
        assert error(await task)["code"] == "E_SAFETY_DENIED"


async def test_with_a_revoked_token_no_further_call_begins(
    hub: Hub, gateway: CallGateway, router: ScriptedRouter
) -> None:
    call = request(hub)
    jti = call.caller.principal.jti
    hub.authenticator.revoke(frozenset({jti}))
    envelope = error(await gateway.call(call))
    assert (envelope["code"], envelope["message"]) == ("E_SAFETY_DENIED", "The token is not accepted.")
    assert router.commands == []
    (line,) = hub.audited()
    assert (line["decision"], line["code"]) == ("deny", "E_SAFETY_DENIED")
    assert await codes(gateway, request(hub)) == ["ok"]
