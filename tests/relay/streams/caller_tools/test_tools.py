import re

from schemas.frames import OneWayType
from tests.fakes.caller_stage import SCOPE, TOOLS, CallerStage, request_id
from tests.fakes.hub import READ_ONLY


async def test_a_request_goes_to_the_caller_and_its_result_to_the_node(stage: CallerStage) -> None:
    session_id = await stage.open(message="Hello")
    assert re.fullmatch(r"gogol_[0-9]{8}_[0-9]{6}_[0-9a-f]{8}", session_id)
    (opened, declared), (said, message) = stage.sent()
    assert (opened, said) == ("session_open", "session_message")
    assert declared["caller_id"] == "ant"
    assert declared["tools"] == list(TOOLS)
    assert message == {"session_id": session_id, "message": "Hello"}
    stage.request(session_id, about="the weather")
    (event,) = await stage.events(session_id)
    assert event == {
        "type": "caller_tool_request",
        "session_id": session_id,
        "cursor": 1,
        "request_id": request_id(),
        "tool": "get_memory",
        "arguments": {"about": "the weather"},
    }
    answer = await stage.result(
        "caller_tool_response", session_id=session_id, request_id=request_id(), result={"found": 2}
    )
    assert answer["accepted"] is True
    assert stage.results() == {request_id(): {"found": 2}}
    assert await stage.events(session_id) == []


async def test_a_message_of_the_local_agent_reaches_the_caller(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.send(OneWayType.SESSION_EVENT, session_id, message="It rains.")
    (event,) = await stage.events(session_id)
    assert (event["type"], event["message"]) == ("session_event", "It rains.")


async def test_strings_are_passed_on_as_they_are(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id, message="\u041f\u0440\u0438\u0432\u0435\u0442\n\x7f \u202e")
    (event,) = await stage.events(session_id)
    assert event["arguments"] == {"message": "\u041f\u0440\u0438\u0432\u0435\u0442\n\x7f \u202e"}


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
