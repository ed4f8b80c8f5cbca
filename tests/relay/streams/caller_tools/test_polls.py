import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.streams.caller_tools.session import GRACE_S, MAX_POLLS
from schemas.frames import OneWayType
from schemas.projection import META_IDEMPOTENCY_KEY
from tests.fakes.caller_stage import SCOPE, CallerStage, ResponseStream, answer_to, request_id
from tests.fakes.polling import until

LOGS = {"io.modelcontextprotocol/logLevel": "info"}


async def waiting(stage: CallerStage) -> None:
    """Wait until a call waits for events of the only session."""
    (session,) = stage.hub.caller_sessions
    await until(lambda: session.unreachable_s(stage.hub.seconds.now + 1) == 0)


async def streaming(
    stage: CallerStage, session_id: str, stream: ResponseStream
) -> "asyncio.Task[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]":
    """Return a call that waits, and sends each event on ``stream``."""
    members: dict[str, Any] = {"session_id": session_id, "wait_ms": 60_000, "stream": True}
    call = asyncio.create_task(stage.call("session_events", emit=stream.emit, meta=LOGS, **members))
    await waiting(stage)
    return call


async def polled(
    stage: CallerStage, session_id: str, after: int, **options: Any
) -> "asyncio.Task[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]":
    """Return a long poll that waits."""
    (session,) = stage.hub.caller_sessions
    before = session.polls
    call = stage.call("session_events", session_id=session_id, after=after, wait_ms=60_000, **options)
    polling = asyncio.create_task(call)
    await until(lambda: session.polls > before)
    return polling


async def broken_off(call: "asyncio.Task[Any]") -> None:
    """Close a call before its response, as its client does."""
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_a_poll_returns_at_the_first_event(stage: CallerStage) -> None:
    session_id = await stage.open()
    call = stage.result("session_events", session_id=session_id, wait_ms=60_000)
    polling = asyncio.create_task(call)
    await waiting(stage)
    stage.send(OneWayType.SESSION_EVENT, session_id, message="Hello")
    result = await polling
    assert [event["message"] for event in result["events"]] == ["Hello"]
    assert (result["next"], result["more"], result["missed"], result["ended"]) == (1, False, False, False)


async def test_a_poll_without_an_event_ends_after_its_time(stage: CallerStage) -> None:
    session_id = await stage.open()
    result = await stage.result("session_events", session_id=session_id, wait_ms=1)
    assert (result["events"], result["next"]) == ([], 0)


async def test_a_message_can_wait_for_the_reply(stage: CallerStage) -> None:
    session_id = await stage.open()
    call = stage.result("session_message", session_id=session_id, message="Hello", wait_ms=60_000)
    asking = asyncio.create_task(call)
    await waiting(stage)
    stage.send(OneWayType.SESSION_EVENT, session_id, message="Hello yourself")
    assert [event["message"] for event in (await asking)["events"]] == ["Hello yourself"]


async def test_a_poll_ends_with_the_session(stage: CallerStage) -> None:
    session_id = await stage.open()
    call = stage.result("session_events", session_id=session_id, wait_ms=60_000)
    polling = asyncio.create_task(call)
    await waiting(stage)
    await stage.result("session_message", session_id=session_id, end=True)
    result = await polling
    assert ([event["type"] for event in result["events"]], result["ended"]) == (["session_ended"], True)


async def test_an_agent_has_a_limited_number_of_polls_and_can_still_call(stage: CallerStage) -> None:
    session_id = await stage.open()
    for after in (0, 1):  # those that have ended do not count
        polls = {
            asyncio.create_task(
                stage.call("session_events", session_id=session_id, after=after, wait_ms=60_000)
            )
            for _ in range(MAX_POLLS + 1)
        }
        (refused,), polls = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        _, error = await refused
        assert error is not None
        assert error["code"] == "E_RATE_LIMITED"
        stage.sent()
        error = await stage.error("session_message", session_id=session_id, message="do it", wait_ms=1000)
        assert (error["code"], stage.sent()) == ("E_RATE_LIMITED", [])  # refused before it was sent
        stage.request(session_id, after)
        assert all(error is None for _, error in await asyncio.gather(*polls))


async def test_a_stream_sends_each_event_and_the_answer_has_them_too(stage: CallerStage) -> None:
    session_id, stream = await stage.open(), ResponseStream()
    streamed = await streaming(stage, session_id, stream)
    for number in range(2):
        stage.request(session_id, number)
        assert (await stream.next())["request_id"] == request_id(number)
    await stage.result("session_message", session_id=session_id, end=True)
    result, _ = await streamed
    assert result is not None
    assert result["ended"] is True


async def test_what_a_stream_sent_before_it_ended_in_order_is_delivered(stage: CallerStage) -> None:
    session_id, stream = await stage.open(), ResponseStream()
    stage.request(session_id)
    members: dict[str, Any] = {"session_id": session_id, "wait_ms": 1, "stream": True}
    result = await stage.result("session_events", emit=stream.emit, meta=LOGS, **members)
    assert [event["request_id"] for event in result["events"]] == [request_id()]
    stage.later(11)
    assert stage.results() == {}


@pytest.mark.parametrize("is_read_too", [False, True])
async def test_a_caller_whose_stream_breaks_off_is_gone_at_once(
    stage: CallerStage, *, is_read_too: bool
) -> None:
    session_id, stream = await stage.open(), ResponseStream()
    streamed = await streaming(stage, session_id, stream)
    stage.request(session_id)
    await stream.next()
    if is_read_too:
        await stage.events(session_id)
    await broken_off(streamed)
    assert stage.results() == {request_id(): "caller_disconnected"}
    stage.request(session_id, 1)
    assert stage.results() == {request_id(1): "caller_disconnected"}


async def test_a_stream_that_breaks_off_beside_an_open_poll_ends_what_it_alone_has_sent(
    stage: CallerStage,
) -> None:
    session_id, stream = await stage.open(), ResponseStream()
    streamed = await streaming(stage, session_id, stream)
    for number in range(2):
        stage.request(session_id, number)
        await stream.next()
    await stage.events(session_id, 1)
    polling = await polled(stage, session_id, after=1000)
    await broken_off(streamed)
    assert stage.results() == {request_id(): "caller_disconnected"}
    await broken_off(polling)
    assert stage.results() == {request_id(1): "caller_disconnected"}


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
async def test_a_caller_that_closes_a_poll_and_does_not_come_back_is_gone_and_so_is_its_session(
    stage: CallerStage,
) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    await stage.events(session_id)
    await broken_off(await polled(stage, session_id, after=1))
    stage.later(GRACE_S - 0.1)
    stage.request(session_id, 1)
    stage.sent()
    stage.later(0.2)
    (first, second, end) = stage.sent()
    assert [payload["error"]["code"] for _, payload in (first, second)] == ["caller_disconnected"] * 2
    # The documents of nodes have no reason of its own for this end.
    assert end == ("session_end", {"session_id": session_id, "reason": "ended"})
    assert (await stage.error("session_events", session_id=session_id))["code"] == "E_SAFETY_DENIED"
    (line,) = [line for line in stage.hub.audited() if line.get("event") == "caller_session_ended"]
    assert line["reason"] == "caller_disconnected"


@pytest.mark.parametrize("back", ["poll", "answer"])
async def test_a_caller_that_closes_a_poll_and_comes_back_loses_nothing(
    stage: CallerStage, back: str
) -> None:
    session_id = await stage.open()
    for number in range(2):
        stage.request(session_id, number)
    await stage.events(session_id)
    await broken_off(await polled(stage, session_id, after=2))
    stage.later(GRACE_S - 0.1)
    if back == "poll":
        await stage.events(session_id)
    else:
        await stage.result("caller_tool_response", **answer_to(session_id, result=1))
        stage.sent()
    stage.later(59 - GRACE_S)
    assert stage.results() == {}


async def test_a_poll_that_the_relay_ends_is_not_closed_by_its_caller(stage: CallerStage) -> None:
    session_id = await stage.open()
    await stage.result("session_events", stage.hub.token([SCOPE]), session_id=session_id, wait_ms=0)
    stage.request(session_id)
    await stage.events(session_id)
    polling = await polled(stage, session_id, after=1)
    jti = stage.hub.authenticator.identify(stage.token).jti
    stage.gateway.revoke(frozenset({jti}))
    _, error = await polling
    assert error is not None
    stage.later(GRACE_S + 1)
    assert stage.results() == {}


async def test_a_poll_with_an_idempotency_key_ends_with_its_caller_too(stage: CallerStage) -> None:
    session_id = await stage.open()
    stage.request(session_id)
    keyed = {META_IDEMPOTENCY_KEY: "01ARZ3NDEKTSV4RRFFQ69G5FAV"}
    await broken_off(await polled(stage, session_id, after=1, meta=keyed))
    stage.later(GRACE_S)
    assert stage.results() == {request_id(): "caller_disconnected"}
