import asyncio
import json

import pytest

from relay.streams.caller_tools import endings as module
from relay.streams.caller_tools.endings import SessionEnding, error_payload
from schemas.caller_tools import CallerToolError
from schemas.frames import MAX_FRAME_BYTES, FrameReader, OneWayType
from schemas.labels import NodeName
from schemas.registry import SchemaRegistry
from tests.fakes.caller_stage import SCOPE, CallerStage, answer_to, request_id
from tests.fakes.frames import SESSION_ID, message
from tests.fakes.polling import until
from tests.fakes.signer import TENANT


@pytest.mark.parametrize("error", CallerToolError)
def test_every_error_of_a_request_is_a_frame_with_the_text_of_its_row(
    reader: FrameReader, error: CallerToolError
) -> None:
    payload = error_payload(SESSION_ID, request_id(), error)
    assert payload["error"] == {"code": error.value, "message": error.failure.value.message}
    frame = {**message("caller_tool_result"), "payload": payload}
    assert reader.read(json.dumps(frame), MAX_FRAME_BYTES).payload == payload


async def test_an_end_is_counted_and_recorded_with_its_code(stage: CallerStage) -> None:
    session_id = await stage.open()
    for number in range(2):
        stage.request(session_id, number)
    await stage.result("caller_tool_response", **answer_to(session_id, result=1))
    await stage.result("caller_tool_response", **answer_to(session_id, 1, error="no"))
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


@pytest.mark.holds("CALLER-TOOLS/timeout", "CALLER-TOOLS/errors/timeout")
async def test_a_request_that_was_delivered_waits_its_full_time(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    await stage.events(session_id)
    stage.later(59.9)
    assert stage.results() == {}
    stage.later(0.2)
    assert stage.results() == {request_id(): "timeout"}
    (event,) = await stage.events(session_id)
    assert (event["type"], event["reason"]) == ("caller_tool_ended", "timeout")
    error = await stage.error("caller_tool_response", **answer_to(session_id, result=1))
    assert "no such pending request" in error["message"]


async def test_a_request_that_a_node_repeats_as_late_as_it_may_does_not_reach_the_caller_again(
    stage: CallerStage,
) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    (event,) = await stage.events(session_id)
    await stage.result("caller_tool_response", **answer_to(session_id, result=1))
    stage.lose()
    stage.later(64.9)  # a node waits five seconds longer than the relay
    stage.link("S1")
    stage.sent()
    stage.request(session_id)
    assert stage.results() == {request_id(): 1}
    assert await stage.events(session_id, event["cursor"]) == []


@pytest.mark.holds("CALLER-TOOLS/errors/timeout")
async def test_a_request_that_reaches_no_caller_ends_after_ten_seconds(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.hub.seconds.now += 100
    stage.request(session_id)
    stage.later(9.9)
    assert stage.results() == {}
    stage.later(0.2)
    assert stage.results() == {request_id(): "caller_disconnected"}


async def test_the_ten_seconds_begin_anew_when_the_caller_was_there(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    stage.later(5)
    await stage.result("session_events", session_id=session_id, after=1, wait_ms=1)
    stage.later(9.9)
    assert stage.results() == {}
    stage.later(0.2)
    assert stage.results() == {request_id(): "caller_disconnected"}


async def test_a_session_without_use_ends(stage: CallerStage) -> None:
    used, unused = await stage.open(), await stage.open()
    stage.later(1790)
    stage.send(OneWayType.SESSION_EVENT, used, message="Hello")
    stage.sent()
    stage.later(20)
    assert stage.sent() == [("session_end", {"session_id": unused, "reason": "idle"})]
    assert (await stage.error("session_events", session_id=unused))["code"] == "E_SAFETY_DENIED"
    assert len(await stage.events(used)) == 1


async def test_a_session_lasts_as_long_as_one_of_the_tokens_that_used_it(stage: CallerStage) -> None:
    hub = stage.hub
    first, second = hub.token([SCOPE], ttl_s=100), hub.token([SCOPE], ttl_s=5000)
    session_id = await stage.open(first)
    await stage.result("session_events", second, session_id=session_id, wait_ms=0)
    hub.clock.advance(200_000)
    stage.later(1)
    assert len(hub.caller_sessions) == 1
    jti = hub.authenticator.identify(second).jti
    hub.authenticator.revoke(frozenset({jti}))
    stage.request(session_id)
    stage.sent()
    stage.later(1)
    types = [type_ for type_, _ in stage.sent()]
    assert types == ["caller_tool_result", "session_end"]
    assert len(hub.caller_sessions) == 0


async def test_a_session_ends_with_the_tag_that_its_token_is_for(stage: CallerStage) -> None:
    hub, tagged = stage.hub, NodeName(TENANT, "", ("greenhouse",))
    hub.fleet.rename({stage.node.node_id: tagged})
    narrow, wide = hub.token([SCOPE], nodes=["tag:greenhouse"]), hub.token([SCOPE])
    session_id, other = await stage.open(narrow), await stage.open(wide)
    hub.fleet.rename({stage.node.node_id: None})
    refused = await stage.error("session_events", narrow, session_id=other, wait_ms=0)
    unknown = await stage.error("session_events", narrow, session_id=f"{other[:-1]}x", wait_ms=0)
    assert refused == unknown
    stage.later(1)
    assert [session.session_id for session in hub.caller_sessions] == [other]
    assert session_id != other


async def test_the_revocation_of_the_node_ends_its_sessions(stage: CallerStage) -> None:
    hub, session_id = stage.hub, await stage.open()
    stage.request(session_id)
    polling = asyncio.create_task(
        stage.result("session_events", session_id=session_id, after=1, wait_ms=60_000)
    )
    session = next(iter(hub.caller_sessions))
    await until(lambda: session.unreachable_s(hub.seconds.now + 1) == 0)
    hub.fleet.drop_leaves(lambda leaf: leaf.kid == stage.node.kid)
    stage.later(1)
    result = await polling
    assert result["ended"] is True
    assert [event.get("reason") for event in result["events"]] == ["caller_disconnected", "node_revoked"]
    assert len(hub.caller_sessions) == 0


async def test_a_node_with_another_key_is_another_node(stage: CallerStage) -> None:
    await stage.open()
    other = stage.hub.ca.issue(now_ms=stage.hub.clock() + 1000, key=stage.hub.ca.issue("0" * 26).key)
    stage.hub.clock.advance(2000)
    stage.hub.fleet.drop_leaves(lambda leaf: leaf.kid == stage.node.kid)
    stage.hub.connect(other)
    stage.later(1)
    assert len(stage.hub.caller_sessions) == 0


async def test_a_node_that_moves_to_another_tenant_leaves_its_sessions(stage: CallerStage) -> None:
    await stage.open()
    stage.hub.clock.advance(2000)
    moved = stage.hub.ca.issue(tenant="globex", key=stage.node.key, now_ms=stage.hub.clock())
    stage.hub.announce(moved)
    stage.later(1)
    assert len(stage.hub.caller_sessions) == 0


@pytest.mark.parametrize("broken", ["_left", "requests"])
async def test_a_bug_with_one_session_does_not_keep_the_others_open(
    stage: CallerStage, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    await stage.open()
    session_id = await stage.open()
    stage.request(session_id)
    faulty = next(iter(stage.hub.caller_sessions))
    monkeypatch.setattr(faulty, broken, object())
    stage.later(10.1)
    assert stage.results() == {request_id(): "caller_disconnected"}
    stage.later(1800)
    assert [session.session_id for session in stage.hub.caller_sessions] in ([], [faulty.session_id])
    assert stage.hub.lines.entries("session not swept")


async def test_it_sweeps_until_cancelled_and_a_bug_does_not_stop_it(
    stage: CallerStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 0.001)
    session_id = await stage.open()
    stage.request(session_id)
    stage.hub.seconds.now += 100
    expiry = stage.hub.expiry
    with monkeypatch.context() as patch:
        patch.setattr(type(stage.hub.caller_sessions), "__iter__", lambda _: 1 / 0)
        running = asyncio.create_task(expiry.run())
        await stage.hub.lines.until("sessions not swept")
    await until(lambda: stage.hub.counted("caller_tool_requests_total", code="E_DEADLINE_EXCEEDED") == 1)
    running.cancel()
