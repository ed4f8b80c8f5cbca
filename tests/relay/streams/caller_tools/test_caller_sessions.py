import json
import re
from collections.abc import Mapping
from typing import Any

import pytest

from relay.audit.log import AuditUnavailableError
from relay.fleet.node_record import Where
from relay.streams.caller_tools.caller_sessions import checked_size, lent
from relay.streams.caller_tools.session import MAX_SESSIONS as MAX_IN_ALL
from relay.streams.caller_tools.session import NODE_BYTES, TOTAL_BYTES, Holder
from schemas.caller_tools import MAX_ERROR_TEXT, MAX_SESSIONS, MAX_TOOLS
from schemas.errors import ToolError
from schemas.frames import OneWayType
from schemas.labels import NodeName
from schemas.projection import META_IDEMPOTENCY_KEY
from tests.fakes.caller_stage import SCOPE, TOOLS, CallerStage, answer_to, request_id
from tests.fakes.hub import READ_ONLY
from tests.fakes.signer import OTHER_NODE_ID, TENANT


@pytest.mark.holds(
    "CALLER-TOOLS/sdk/response-is-a-tool", "CALLER-TOOLS/data/declaration", "CALLER-TOOLS/data/request-event"
)
async def test_a_request_goes_to_the_caller_and_its_result_to_the_node(stage: CallerStage) -> None:
    session_id = await stage.open(message="Hello")
    assert re.fullmatch(r"gogol_[0-9]{8}_[0-9]{6}_[0-9a-f]{8}", session_id)
    (opened, declared), (said, message) = stage.sent()
    assert (opened, said) == ("session_open", "session_message")
    assert declared["caller_id"] == "ant"
    assert declared["tools"] == list(TOOLS)
    assert message == {"session_id": session_id, "message": "Hello"}
    about = "\u041f\u0440\u0438\u0432\u0435\u0442\n\x7f \u202e"  # strings are passed on as they are
    stage.request(session_id, about=about)
    (event,) = await stage.events(session_id)
    assert event == {
        "type": "caller_tool_request",
        "session_id": session_id,
        "cursor": 1,
        "request_id": request_id(),
        "tool": "get_memory",
        "arguments": {"about": about},
    }
    answer = await stage.result("caller_tool_response", **answer_to(session_id, result={"found": 2}))
    assert answer["accepted"] is True
    assert stage.results() == {request_id(): {"found": 2}}
    assert await stage.events(session_id) == []


async def test_only_holders_of_the_scope_see_and_call_the_tools(stage: CallerStage) -> None:
    hub = stage.hub
    tools = ("session_message", "session_events", "caller_tool_response")
    for scopes, expected in (([READ_ONLY], False), ([SCOPE], True)):
        rights = hub.authenticator.identify(hub.token(scopes)).rights
        for name in tools:
            tool = hub.relay_tools.find(name)
            assert tool is not None
            assert tool.visible(rights) is expected
    error = await stage.error("session_events", hub.token([READ_ONLY]), session_id="x")
    assert error["code"] == "E_SAFETY_DENIED"


def test_a_schema_of_the_largest_size_is_lent() -> None:
    schema = {"type": "object", "title": ""}
    schema["title"] = "x" * (32 * 1024 - checked_size("schema", schema))
    assert lent([{"name": "a", "inputSchema": schema}]).tools
    with pytest.raises(ToolError, match="An inputSchema"):
        lent([{"name": "a", "inputSchema": {**schema, "title": f"{schema['title']}x"}}])


KIB = 1024
UNKNOWN = "This caller has no such session: it has ended, or never existed."


# --- opening


@pytest.mark.parametrize("reference", ["id", "prefix", "label"])
async def test_a_node_is_named_by_what_names_it(stage: CallerStage, reference: str) -> None:
    node_id = stage.node.node_id
    stage.hub.fleet.rename({node_id: NodeName(TENANT, "greenhouse pi")})
    name = {"id": node_id.upper(), "prefix": node_id[:10], "label": "Greenhouse Pi"}[reference]
    context = {"caller_id": "ant"}
    assert (await stage.result("session_message", node_id=name, context=context))["node_id"] == node_id


async def test_another_tenants_node_is_as_one_that_does_not_exist(stage: CallerStage) -> None:
    stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID, tenant="globex"))
    foreign = await stage.not_opened(OTHER_NODE_ID)
    absent = await stage.not_opened("0" * 26)
    assert foreign["code"] == absent["code"] == "E_SAFETY_DENIED"
    assert foreign["message"].replace(OTHER_NODE_ID, "") == absent["message"].replace("0" * 26, "")


async def test_a_node_without_a_connection_is_offline_and_no_session_is_left(stage: CallerStage) -> None:
    stage.lose()
    assert (await stage.not_opened())["code"] == "E_NODE_OFFLINE"
    stage.hub.fleet.connection_changed(stage.node.node_id, Where.NOWHERE)
    assert (await stage.not_opened())["code"] == "E_NODE_OFFLINE"
    assert len(stage.hub.caller_sessions) == 0


def opening(*tools: Mapping[str, Any], **others: Any) -> dict[str, Any]:
    return {"node_id": "N", "context": {"caller_id": "ant", "caller_tools": list(tools)}, **others}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"context": {"caller_id": "ant"}}, "A new session needs node_id."),
        ({"node_id": "N"}, "A new session needs context.caller_id."),
        (opening(TOOLS[0], TOOLS[0]), "same name"),
        (
            opening({"name": "t", "inputSchema": {"type": "object", "title": "x" * 33 * KIB}}),
            "An inputSchema of caller_tools is larger than 32768 bytes.",
        ),
        (
            opening(*({"name": f"t{number}", "description": "x" * 16_000} for number in range(13))),
            "The caller_tools are together larger than 196608 bytes.",
        ),
        (
            opening(message="\u20ac" * 40_000),
            "The argument message is larger than 196608 bytes as JSON in ASCII.",
        ),
    ],
)
async def test_what_a_document_cannot_express_is_refused(
    stage: CallerStage, arguments: dict[str, Any], text: str
) -> None:
    named = {**arguments, **({"node_id": stage.node.node_id} if "node_id" in arguments else {})}
    for _ in range(2):  # under a key too: it has done nothing
        error = await stage.error("session_message", meta={META_IDEMPOTENCY_KEY: "k"}, **named)
        assert error["code"] == "E_MANIFEST_INVALID"
        assert text in error["message"]
    assert stage.sent() == []


@pytest.mark.holds("CALLER-TOOLS/sdk/schema-pass-through")
@pytest.mark.parametrize(
    "context",
    [
        {"caller_id": ""},
        {"caller_id": "an ant"},
        {"caller_id": "a" * 65},
        {"caller_id": "ant", "caller_tools": [{"name": "has.dot"}]},
        {"caller_id": "ant", "caller_tools": [{"name": "t", "inputSchema": {"type": "string"}}]},
        {"caller_id": "ant", "caller_tools": [{"name": f"t{n}"} for n in range(MAX_TOOLS + 1)]},
    ],
)
async def test_a_context_that_does_not_fit_its_document_is_refused(
    stage: CallerStage, context: dict[str, Any]
) -> None:
    assert (await stage.not_opened(**context))["code"] == "E_MANIFEST_INVALID"


async def test_a_node_has_a_limited_number_of_sessions(stage: CallerStage) -> None:
    first = await stage.open(tools=())
    for _ in range(MAX_SESSIONS - 1):
        await stage.open(tools=())
    assert (await stage.not_opened())["code"] == "E_RATE_LIMITED"
    await stage.result("session_message", session_id=first, end=True)
    await stage.open(tools=())


async def test_one_principal_cannot_have_all_sessions_of_the_relay_and_the_error_says_whose_are_too_many(
    stage: CallerStage,
) -> None:
    own = stage.hub.authenticator.identify(stage.token).name
    shares, number = stage.hub.caller_sessions.shares, 0
    while shares.take(Holder(own, f"node-{number}"), 1) is None:
        number += 1
    assert number == MAX_IN_ALL // 4
    error = await stage.not_opened()
    assert error["code"] == "E_RATE_LIMITED"
    assert error["message"].startswith("Your sessions are as many as they may be")
    await stage.open(stage.hub.token([SCOPE], sub="agent-2"))
    shares.give_back(Holder(own, "node-0"), 8)
    while shares.take(Holder(own, "node-0"), 1) is None:
        pass
    shares.give_back(Holder(own, "node-0"), 1)
    session_id = await stage.open()
    # One that has ended makes room for another.
    await stage.result("session_message", session_id=session_id, end=True)
    await stage.open()


async def test_a_session_that_cannot_be_recorded_is_not_opened(
    stage: CallerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter([True, False])
    record = stage.hub.audit.record

    async def fails_at_the_second(members: str, **options: Any) -> None:
        if not next(lines, True):
            raise AuditUnavailableError
        await record(members, **options)

    monkeypatch.setattr(stage.hub.audit, "record", fails_at_the_second)
    assert (await stage.not_opened(caller_tools=list(TOOLS)))["code"] == "E_INTERNAL"
    assert stage.sent() == []
    assert len(stage.hub.caller_sessions) == 0


async def test_one_principal_cannot_take_the_memory_of_all_and_the_error_says_whose_it_is(
    stage: CallerStage,
) -> None:
    own = stage.hub.authenticator.identify(stage.token).name
    budget = stage.hub.caller_budget
    number = 0
    while budget.take(Holder(own, f"node-{number}"), NODE_BYTES // 8) is None:
        number += 1
    while budget.take(Holder(own, "another"), 10_000) is None:
        pass
    tools = [{"name": "t", "description": "x" * 10_000}]
    error = await stage.not_opened(caller_tools=tools)
    assert error["code"] == "E_RATE_LIMITED"
    assert error["message"].startswith("Your sessions take as much memory as they may")
    assert budget.total <= TOTAL_BYTES // 4
    other = stage.hub.token([SCOPE], sub="agent-2")
    await stage.open(other, tools)


# --- a session that is open


@pytest.mark.holds("CALLER-TOOLS/data/declaration")
async def test_tools_that_are_declared_again_replace_those_before(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.sent()
    context = {"caller_tools": [{"name": "other"}]}
    await stage.result("session_message", session_id=session_id, context=context)
    ((type_, payload),) = stage.sent()
    assert (type_, payload["tools"]) == ("session_open", [{"name": "other"}])
    stage.request(session_id)
    assert stage.results() == {request_id(): "tool_unknown"}
    await stage.result("session_message", session_id=session_id, context={"caller_tools": []})
    assert stage.sent()[0][1]["tools"] == []


async def test_a_session_keeps_its_caller_and_its_node(stage: CallerStage) -> None:
    session_id = await stage.open()
    error = await stage.error("session_message", session_id=session_id, context={"caller_id": "bee"})
    assert error["message"] == "A session keeps its caller_id; open another session."
    stage.hub.connect(stage.hub.ca.issue(OTHER_NODE_ID))
    error = await stage.error("session_message", session_id=session_id, node_id=OTHER_NODE_ID)
    assert error["message"] == UNKNOWN


async def test_tools_that_the_node_does_not_get_are_not_lent(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.lose()
    context = {"caller_tools": [{"name": "other"}]}
    error = await stage.error("session_message", session_id=session_id, context=context)
    assert error["code"] == "E_NODE_OFFLINE"
    stage.link("S1")
    assert [tool["name"] for tool in stage.sent()[-1][1]["tools"]] == ["send_response", "get_memory"]


async def test_a_caller_ends_its_session(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.sent()
    result = await stage.result("session_message", session_id=session_id, message="Bye", end=True)
    assert result["ended"] is True
    assert [event["type"] for event in result["events"]] == ["caller_tool_ended", "session_ended"]
    types = [type_ for type_, _ in stage.sent()]
    assert types == ["session_message", "caller_tool_result", "session_end"]
    assert (await stage.error("session_events", session_id=session_id))["message"] == UNKNOWN
    assert stage.hub.counted("caller_sessions") == 0


async def test_what_a_session_takes_is_given_back(stage: CallerStage) -> None:
    session_id = await stage.open()
    budget = stage.hub.caller_budget
    empty = budget.total
    assert empty > 0
    stage.request(session_id, text="x" * 1000)
    stage.send(OneWayType.SESSION_EVENT, session_id, message="Hello")
    await stage.result("session_message", session_id=session_id, context={"caller_tools": [{"name": "b"}]})
    assert budget.total != empty
    await stage.result("session_message", session_id=session_id, end=True)
    assert budget.total == 0


# --- answering


@pytest.mark.holds("CALLER-TOOLS/errors/tool-failed")
async def test_a_callers_error_goes_to_the_node_as_an_error_with_its_text(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.sent()
    text = "no signal" + "x" * MAX_ERROR_TEXT
    await stage.result("caller_tool_response", **answer_to(session_id, result=None, error=text))
    ((_, payload),) = stage.sent()
    assert payload["error"] == {"code": "tool_failed", "message": text[:MAX_ERROR_TEXT]}


@pytest.mark.holds("CALLER-TOOLS/sdk/response-is-a-tool")
@pytest.mark.parametrize("answer", [{}, {"result": 1, "error": "no"}, {"error": None}])
async def test_an_answer_has_either_a_result_or_an_error(stage: CallerStage, answer: dict[str, Any]) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    error = await stage.error("caller_tool_response", **answer_to(session_id, **answer))
    assert error["message"] == "An answer has either result or error."
    stage.sent()
    await stage.result("caller_tool_response", **answer_to(session_id, result=None, error=None))
    assert stage.results() == {request_id(): None}


async def test_a_message_that_is_refused_changes_nothing_of_what_is_lent(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.sent()
    error = await stage.error(
        "session_message", session_id=session_id, context={"caller_tools": []}, message="\u20ac" * 40_000
    )
    assert error["code"] == "E_MANIFEST_INVALID"
    assert stage.sent() == []
    stage.request(session_id)
    assert len(await stage.events(session_id)) == 1


async def test_a_result_that_is_too_large_leaves_the_request_pending(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.sent()
    error = await stage.error("caller_tool_response", **answer_to(session_id, result="\u20ac" * 40_000))
    assert "larger than 196608 bytes" in error["message"]
    assert stage.sent() == []
    await stage.result("caller_tool_response", **answer_to(session_id, result="x" * (192 * KIB - 2)))
    assert len(stage.results()[request_id()]) == 192 * KIB - 2


@pytest.mark.holds("CALLER-TOOLS/security/replay", "CALLER-TOOLS/errors/invalid-request-id")
async def test_an_answer_that_is_late_unknown_or_the_second_is_ignored_and_the_caller_is_told(
    stage: CallerStage,
) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    await stage.result("caller_tool_response", **answer_to(session_id, result=1))
    stage.sent()
    second = await stage.error("caller_tool_response", **answer_to(session_id, result=2))
    unknown = await stage.error("caller_tool_response", session_id=session_id, request_id="never\n", result=2)
    assert second == unknown
    assert second["code"] == "E_MANIFEST_INVALID"
    assert "no such pending request" in second["message"]
    assert stage.sent() == []
    malformed = await stage.error("caller_tool_response", session_id=session_id, request_id="\U0001f600" * 64)
    assert malformed == second
    lines = stage.hub.lines.entries("answer to no pending request ignored")
    assert {line["level"] for line in lines} == {"warning"}
    shown = [request_id(), r"never\n", r"\U0001f600" * 64]
    assert [line["request_id"] for line in lines] == shown
    stage.hub.refusals.write()
    (counted,) = [line for line in stage.hub.audited() if line.get("reason") == "request_unknown"]
    assert counted["count"] == 3


@pytest.mark.holds("CALLER-TOOLS/security/only-the-caller", "CALLER-TOOLS/security/session-scoped")
async def test_another_principal_learns_nothing_of_a_session_or_a_request(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    others = [
        stage.hub.token([SCOPE], sub="agent-2"),
        stage.hub.token([SCOPE], tenant="globex"),
    ]
    never = "gogol_20261122_021500_00000000"
    for token in others:
        for name, arguments in (
            ("session_events", {}),
            ("session_message", {"message": "Hello"}),
            ("session_message", {"end": True}),
            ("session_message", {"context": {"caller_tools": []}}),
            ("caller_tool_response", {"request_id": request_id(), "result": 1}),
        ):
            foreign = await stage.error(name, token, session_id=session_id, **arguments)
            absent = await stage.error(name, token, session_id=never, **arguments)
            assert foreign == absent
            assert foreign["message"] == UNKNOWN
    own = await stage.open(others[0])
    stolen = await stage.error("caller_tool_response", others[0], **answer_to(own, result=1))
    absent = await stage.error("caller_tool_response", others[0], **answer_to(own, 7, result=1))
    assert stolen == absent
    assert [event["request_id"] for event in await stage.events(session_id)] == [request_id()]
    assert stage.results() == {}


async def test_neither_the_audit_nor_the_log_holds_what_is_said(stage: CallerStage) -> None:
    secret = "correct-horse-battery"
    session_id = await stage.open(message=secret)
    stage.request(session_id, password=secret)
    stage.request(session_id, 1, password=secret)
    stage.send(OneWayType.SESSION_EVENT, session_id, message=secret)
    await stage.result("caller_tool_response", **answer_to(session_id, result=secret))
    await stage.result("caller_tool_response", **answer_to(session_id, 1, error=secret))
    await stage.result("session_message", session_id=session_id, message=secret, end=True)
    written = json.dumps(stage.hub.audited()) + "".join(map(str, stage.hub.lines.entries()))
    assert secret not in written
    assert secret not in "".join(map(str, stage.hub.access_lines.entries()))


async def test_the_audit_has_every_session_and_every_request(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    await stage.result("caller_tool_response", **answer_to(session_id, result=1))
    await stage.result("session_message", session_id=session_id, end=True)
    lines = [line for line in stage.hub.audited() if str(line.get("event", "")).startswith("caller")]
    assert [(line["event"], line.get("decision") or line.get("outcome")) for line in lines] == [
        ("caller_session_opened", None),
        ("caller_tool", "allow"),
        ("caller_tool", "ok"),
        ("caller_session_ended", None),
    ]
    opened, allowed, _, ended = lines
    assert (opened["session_id"], opened["sub"], opened["node_id"]) == (
        session_id,
        "agent-1",
        stage.node.node_id,
    )
    assert (allowed["request_id"], allowed["tool"]) == (request_id(), "get_memory")
    assert ended["reason"] == "ended"
