import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.auth.agent_tokens import Caller
from relay.calls.access_log import span_of
from relay.calls.envelope import Call
from relay.calls.executor import CallRecord, CallRequest, Following
from relay.limits.rate_limits import Allowance, Limiter
from schemas.errors import Failure, ToolError
from schemas.projection import META_CORRELATION_ID, META_TRACEPARENT
from tests.fakes.callers import principal
from tests.fakes.hub import Hub
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"

CORRELATION_ID, FIRST = "01HZX9K3M4P7Q8R9S0T1V2W3XW", "01HZX9K3M4P7Q8R9S0T1V2W3XX"

WHO = principal()

DENIED = ToolError(Failure.SAFETY_DENIED)

NO_PRINCIPAL = {"tenant": None, "iss": None, "sub": None, "jti": None}

AGENT = {"tenant": "acme", "iss": "https://relay.example", "sub": "agent-1", "jti": "jti-1"}


def record(name: object = ECHO_NAME, **members: Any) -> CallRecord:
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": name}}
    return CallRecord(CORRELATION_ID, Call(message), 100.0, **members)


def written(hub: Hub, *members: str) -> None:
    for each in members:
        hub.audit.decide(each, "")


def only_line(hub: Hub) -> dict[str, Any]:
    (line,) = hub.audited()
    return line


def test_of_a_call_that_is_refused_the_audit_says_who_what_and_why(hub: Hub) -> None:
    written(hub, record(principal=WHO).denied(DENIED))
    assert only_line(hub) == {
        **AGENT,
        "ts_ms": NOW_MS,
        "correlation_id": CORRELATION_ID,
        "tool": ECHO_NAME,
        "node_id": NODE_ID,
        "decision": "deny",
        "code": "E_SAFETY_DENIED",
    }


def test_of_a_call_that_is_made_the_audit_says_so_by_its_canonical_name(hub: Hub) -> None:
    hub.connect(hub.ca.issue())
    tool = hub.fleet.resolve(ECHO_NAME, WHO.rights)
    called = record(ECHO_NAME.replace(".", "-"), principal=WHO, tool=tool)
    written(hub, called.allowed())
    line = only_line(hub)
    assert (line["decision"], line["code"]) == ("allow", "ok")
    assert (line["tool"], line["node_id"]) == (ECHO_NAME, NODE_ID)
    assert line.keys() == {"ts_ms", "correlation_id", "tool", "node_id", "decision", "code", *AGENT}


@pytest.mark.parametrize(
    ("error", "outcome", "code"),
    [
        (None, "ok", "ok"),
        (ValueError(), "error", "E_INTERNAL"),
        (asyncio.CancelledError(), "error", "cancelled"),
        (ToolError(Failure.TOKEN_REFUSED), "error", "E_SAFETY_DENIED"),
        (ToolError(Failure.OUTSIDE_CEILING), "denied_by_owner", "E_SAFETY_DENIED"),
    ],
)
def test_of_a_call_that_has_ended_the_audit_says_how_and_how_long_it_took(
    hub: Hub, error: BaseException | None, outcome: str, code: str
) -> None:
    written(hub, record(principal=WHO).ended(error, 100.0123456))
    line = only_line(hub)
    assert (line["outcome"], line["code"], line["duration_ms"]) == (outcome, code, 12.346)
    assert "decision" not in line


def test_every_line_of_a_call_that_repeats_another_names_that_one(hub: Hub) -> None:
    repeated = record(principal=WHO, first=FIRST)
    written(hub, repeated.denied(DENIED), repeated.allowed(), repeated.ended(None, 101.0))
    assert [line["first"] for line in hub.audited()] == [FIRST] * 3
    assert {line["correlation_id"] for line in hub.audited()} == {CORRELATION_ID}


def test_every_line_has_the_id_that_the_caller_gave_besides_the_relays_own(hub: Hub) -> None:
    params = {"name": ECHO_NAME, "_meta": {META_CORRELATION_ID: "order-17"}}
    given = CallRecord(CORRELATION_ID, Call({"params": params}), 100.0, principal=WHO)
    written(hub, given.denied(DENIED), given.allowed(), given.ended(None, 101.0))
    ids = [(line["correlation_id"], line["caller_correlation_id"]) for line in hub.audited()]
    assert ids == [(CORRELATION_ID, "order-17")] * 3


def test_so_has_its_span(hub: Hub) -> None:
    hub.connect(hub.ca.issue())
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    def attributes(**meta: str) -> Mapping[str, str]:
        call = Call({"params": {"name": ECHO_NAME, "_meta": {META_TRACEPARENT: trace, **meta}}})
        tool = hub.fleet.resolve(ECHO_NAME, WHO.rights)
        span = span_of(
            CallRecord(CORRELATION_ID, call, 100.0, tool=tool, span_id="b7ad6b7169203331"), "ok", 0.1
        )
        assert span is not None
        return span.attributes

    assert attributes(**{META_CORRELATION_ID: "order-17"})["edge.caller_correlation_id"] == "order-17"
    assert "edge.caller_correlation_id" not in attributes()


@pytest.mark.parametrize(
    ("name", "tool", "node_id"),
    [
        pytest.param(f"gpio.{OTHER_NODE_ID}.led.set", None, OTHER_NODE_ID, id="a kind that is not there"),
        pytest.param("echo", None, None, id="no name of a tool"),
        pytest.param(7, "", None, id="no text"),
        pytest.param(None, "", None, id="null"),
        pytest.param("\x1b[31m\n" * 99, ("\\x1b[31m\\n" * 99)[:64], None, id="control characters"),
    ],
)
def test_of_a_call_to_no_tool_the_audit_says_what_can_be_said(
    hub: Hub, name: object, tool: str | None, node_id: str | None
) -> None:
    written(hub, record(name).denied(DENIED))
    line = only_line(hub)
    assert (line["tool"], line["node_id"]) == (name if tool is None else tool, node_id)
    assert line["tool"].isprintable()
    assert {key: line[key] for key in NO_PRINCIPAL} == NO_PRINCIPAL


async def emit(_method: str, _params: object) -> None:
    """Send nothing."""


FOLLOW_S = "edge-kubelet/follow-s"


@pytest.mark.parametrize(
    ("meta", "followed"),
    [
        *[({"progressToken": token}, Following(emit, token)) for token in ("token-1", "", 0, 7)],
        *[
            ({"progressToken": "t", FOLLOW_S: for_s}, Following(emit, "t", None, for_s))
            for for_s in (600, 0.5)
        ],
        *[({"progressToken": "t", FOLLOW_S: odd}, Following(emit, "t")) for odd in (True, "600", 86_401, -1)],
        *[(meta, None) for meta in ({}, {"progressToken": True}, {"progressToken": ["t"]})],
    ],
    ids=str,
)
def test_a_call_with_a_progress_token_is_followed_by_it_and_briefly_unless_its_caller_says_how_long(
    meta: Any, followed: Following | None
) -> None:
    assert following(meta, emit) == followed
    assert following(meta, None) is None  # the answer is no stream
    assert following(meta, emit, idempotencyKey="k") is None


def following(meta: Any, emitter: Any, **members: Any) -> Following | None:
    params = {"name": ECHO_NAME, "_meta": meta}
    call = Call({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params, **members})
    request = CallRequest(Caller(WHO, "http", {}), call, emitter)
    return CallRecord(CORRELATION_ID, call, 100.0, request).following()


def test_a_share_is_given_back_once() -> None:
    limiter = Limiter(Allowance(1, 1, 1), 0.0)
    limiter.acquire(0.0)
    call = record(share=limiter)
    for _ in range(2):
        call.release_share()
    assert limiter.is_idle(1.0)
