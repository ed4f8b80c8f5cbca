from unittest.mock import Mock

import pytest

from relay.audit.log import AuditUnavailableError
from relay.routing.port import NodeRef
from relay.sessions.one_way_frames import OneWayFrames
from relay.streams.caller_tools import endings
from schemas.caller_tools import MAX_PENDING, SESSIONS_LAST_S
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from tests.fakes.caller_stage import CallerStage, answer_to, request_id

KIB = 1024


async def answer(stage: CallerStage, session_id: str, number: int = 0) -> None:
    await stage.result("caller_tool_response", **answer_to(session_id, number, result=number))


async def test_a_tool_that_is_not_lent_is_refused(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id, tool="other")
    assert stage.results() == {request_id(): "tool_unknown"}
    assert await stage.events(session_id) == []


async def test_arguments_that_are_too_large_are_refused(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id, text="\u20ac" * 40_000)
    assert stage.results() == {request_id(): "invalid"}
    stage.request(session_id, 1, text="x" * (192 * KIB - 11))
    assert stage.results() == {}
    assert [event["request_id"] for event in await stage.events(session_id)] == [request_id(1)]


async def test_a_session_has_a_limited_number_of_pending_requests(stage: CallerStage) -> None:
    session_id = await stage.open()
    for number in range(MAX_PENDING + 1):
        stage.request(session_id, number)
    assert stage.results() == {request_id(MAX_PENDING): "over_capacity"}
    await answer(stage, session_id)
    stage.request(session_id, MAX_PENDING + 1)
    assert stage.results() == {request_id(): 0}


async def test_requests_of_one_node_take_a_limited_amount_of_memory(stage: CallerStage) -> None:
    session_ids = [await stage.open() for _ in range(2)]
    for session_id in session_ids:
        for number in range(MAX_PENDING):
            stage.request(session_id, number, text="x" * 190 * KIB)
    results = stage.results()
    assert set(results.values()) == {"over_capacity"}
    assert 64 < len(results) < 128
    assert stage.hub.caller_budget.total <= 32 << 20


@pytest.mark.holds("CALLER-TOOLS/security/replay")
async def test_a_request_that_is_repeated_is_the_same_request(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.request(session_id)
    assert len(await stage.events(session_id)) == 1
    await answer(stage, session_id)
    assert stage.results() == {request_id(): 0}
    stage.request(session_id)
    assert stage.results() == {request_id(): 0}
    assert await stage.events(session_id) == []


async def test_a_request_that_the_local_agent_cancels_ends_for_the_caller_too(
    stage: CallerStage,
) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.send(OneWayType.CALLER_TOOL_CANCEL, session_id, request_id=request_id())
    stage.send(OneWayType.CALLER_TOOL_CANCEL, session_id, request_id=request_id())
    (event,) = await stage.events(session_id)
    assert (event["type"], event["request_id"]) == ("caller_tool_cancelled", request_id())
    error = await stage.error("caller_tool_response", **answer_to(session_id, result=1))
    assert "no such pending request" in error["message"]
    stage.request(session_id)
    assert stage.results() == {request_id(): "caller_disconnected"}


async def test_a_session_that_does_not_exist_is_over_for_the_node(stage: CallerStage) -> None:
    session_id = "gogol_20261122_021500_00000000"
    stage.request(session_id)
    stage.send(OneWayType.SESSION_EVENT, session_id, message="Hello")
    stage.send(OneWayType.CALLER_TOOL_CANCEL, session_id, request_id=request_id())
    assert stage.sent() == [("session_end", {"session_id": session_id, "reason": "unknown"})] * 3


@pytest.mark.holds("CALLER-TOOLS/security/session-scoped")
@pytest.mark.parametrize(("tenant", "node_id"), [("globex", None), (None, "0" * 26)])
async def test_a_node_has_no_part_in_the_session_of_another(
    stage: CallerStage, tenant: str | None, node_id: str | None
) -> None:
    session_id = await stage.open()
    stage.sent()
    other = NodeRef(tenant or stage.node.tenant, node_id or stage.node.node_id, "S2")
    stage.hub.caller_requests.requested(
        other,
        {"session_id": session_id, "request_id": request_id(), "tool": "get_memory", "arguments": {}},
    )
    stage.hub.caller_requests.message(other, {"session_id": session_id, "message": "Hello"})
    assert await stage.events(session_id) == []
    assert stage.hub.counted("caller_tool_requests_total", code="session_unknown") == 2


async def test_a_message_that_is_too_large_is_dropped_and_counted(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.send(OneWayType.SESSION_EVENT, session_id, message="\u20ac" * 40_000)
    assert await stage.events(session_id) == []
    assert stage.hub.counted("caller_tool_requests_total", code="message_too_large") == 1


async def test_a_request_that_cannot_be_recorded_is_refused(
    stage: CallerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    session_id = await stage.open()

    def fails(_members: str, _otherwise: str) -> None:
        raise AuditUnavailableError

    with monkeypatch.context() as patch:
        patch.setattr(stage.hub.audit, "decide", fails)
        stage.request(session_id)
    assert stage.results() == {request_id(): "internal"}
    assert await stage.events(session_id) == []


# --- a node that reconnects


async def test_a_node_that_resumes_its_session_gets_its_sessions_and_answers_again(
    stage: CallerStage,
) -> None:
    session_id = await stage.open()
    for number in range(3):
        stage.request(session_id, number)
    await answer(stage, session_id, 0)
    stage.lose()
    await answer(stage, session_id, 1)
    stage.sent()
    stage.link("S1")
    sent = stage.sent()
    assert [type_ for type_, _ in sent] == ["session_open", "caller_tool_result", "caller_tool_result"]
    assert [payload["result"] for _, payload in sent[1:]] == [0, 1]
    await answer(stage, session_id, 2)
    assert stage.results() == {request_id(2): 2}


async def test_a_node_in_a_new_session_has_lost_its_requests_and_not_its_callers(
    stage: CallerStage,
) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.request(session_id, 1)
    await answer(stage, session_id)
    stage.lose()
    stage.sent()
    stage.link("S2")
    assert [type_ for type_, _ in stage.sent()] == ["session_open"]
    (event,) = await stage.events(session_id)
    assert (event["request_id"], event["reason"]) == (request_id(1), "withdrawn")
    stage.request(session_id, 2)
    await answer(stage, session_id, 2)
    assert stage.results() == {request_id(2): 2}


async def test_a_node_that_is_lost_for_good_leaves_nothing(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.lose()
    await stage.result("session_message", session_id=session_id, end=True)
    assert not stage.hub.caller_requests._node_sessions  # noqa: SLF001 - what nodes could make grow


async def test_a_node_that_connects_is_told_again_which_of_its_sessions_have_ended_lately(
    stage: CallerStage,
) -> None:
    sessions = before, meanwhile, live = [await stage.open() for _ in range(3)]
    await stage.result("session_message", session_id=before, end=True)  # lost with the connection
    stage.lose()
    await stage.result("session_message", session_id=meanwhile, end=True)
    stage.sent()
    stage.link("S1")
    told = [(type_, payload["session_id"]) for type_, payload in stage.sent()]
    assert told == list(zip(["session_end", "session_end", "session_open"], sessions, strict=True))
    stage.later(SESSIONS_LAST_S + 1)
    stage.link("S1")
    assert [(type_, payload["session_id"]) for type_, payload in stage.sent()] == [("session_open", live)]


async def test_answers_that_are_given_again_take_no_session_its_place(
    stage: CallerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [await stage.open() for _ in range(2)]
    for number, session_id in enumerate(sessions * 2):
        stage.request(session_id, number)
        await answer(stage, session_id, number)
    stage.lose()
    stage.sent()
    with monkeypatch.context() as patch:
        patch.setattr(endings, "MAX_WAITING", 3)
        patch.setattr(OneWayFrames, "send", Mock(side_effect=ToolError(Failure.RATE_LIMITED)))
        stage.link("S1")
    stage.hub.expiry.sweep_requests()
    assert [type_ for type_, _ in stage.sent()] == ["session_open", "session_open", "caller_tool_result"]


async def test_a_node_of_another_tenant_is_told_of_no_end(stage: CallerStage) -> None:
    await stage.result("session_message", session_id=await stage.open(), end=True)
    stage.sent()
    other = NodeRef("globex", stage.node.node_id, "S2")
    stage.hub.caller_requests.connection_changed(other, connected=True)
    assert stage.sent() == []
