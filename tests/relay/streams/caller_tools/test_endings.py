import json

import pytest

from relay.streams.caller_tools.endings import SessionEnding, error_payload
from schemas.caller_tools import MAX_ERROR_TEXT, CallerToolError
from schemas.frames import MAX_FRAME_BYTES, FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.caller_stage import CallerStage, request_id
from tests.fakes.frames import SESSION_ID, message


@pytest.mark.parametrize("error", CallerToolError)
def test_every_error_of_a_request_is_a_frame_with_the_text_of_its_row(
    reader: FrameReader, error: CallerToolError
) -> None:
    payload = error_payload(SESSION_ID, request_id(), error)
    assert payload["error"] == {"code": error.value, "message": error.failure.value.message}
    frame = {**message("caller_tool_result"), "payload": payload}
    assert reader.read(json.dumps(frame), MAX_FRAME_BYTES).payload == payload


def test_a_callers_text_is_cut() -> None:
    payload = error_payload(SESSION_ID, request_id(), CallerToolError.TOOL_FAILED, "x" * 9000)
    assert payload["error"]["message"] == "x" * MAX_ERROR_TEXT


async def test_an_end_is_counted_and_recorded_with_its_code(stage: CallerStage) -> None:
    session_id = await stage.open()
    for number in range(2):
        stage.request(session_id, number)
    members = {"session_id": session_id}
    await stage.result("caller_tool_response", **members, request_id=request_id(), result=1)
    await stage.result("caller_tool_response", **members, request_id=request_id(1), error="no")
    counted = [stage.hub.counted("caller_tool_requests_total", code=code) for code in ("ok", "E_INTERNAL")]
    assert counted == [1, 1]
    outcomes = [
        (line["outcome"], line["code"])
        for line in stage.hub.audited()
        if line.get("event") == "caller_tool" and "outcome" in line
    ]
    assert outcomes == [("ok", "ok"), ("error", "E_INTERNAL")]


def test_every_reason_that_a_node_is_given_is_one_that_the_document_knows(registry: SchemaRegistry) -> None:
    reason = registry.document("session.session_end@1.0.0")["properties"]["payload"]["properties"]["reason"]
    told = set(SessionEnding) - {SessionEnding.NODE_REVOKED, SessionEnding.DISCONNECTED}
    assert told == set(reason["enum"])
