import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from relay.caller_tools.limits import MAX_POLLS
from schemas.frame_types import OneWayType
from tests.fakes.caller_stage import CallerStage, request_id
from tests.fakes.polling import until

LOGS = {"io.modelcontextprotocol/logLevel": "info"}
BOUND_S = 10


class Stream:
    """The response stream of a call."""

    def __init__(self) -> None:
        self.sent: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    async def emit(self, method: str, params: Mapping[str, Any]) -> None:
        assert method == "notifications/message"
        assert (params["level"], params["logger"]) == ("info", "oubliette.session")
        self.sent.put_nowait(params["data"])

    async def next(self) -> Mapping[str, Any]:
        return await asyncio.wait_for(self.sent.get(), BOUND_S)


def streaming(
    stage: CallerStage, session_id: str, stream: Stream, wait_ms: int = 60_000
) -> "asyncio.Task[tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]]":
    call = stage.call(
        "session_events", session_id=session_id, wait_ms=wait_ms, stream=True, emit=stream.emit, meta=LOGS
    )
    return asyncio.create_task(call)


async def waiting(stage: CallerStage) -> None:
    """Wait until a call waits for events of the only session."""
    (session,) = stage.hub.caller_sessions
    await until(lambda: session.unreachable_s(stage.hub.seconds.now + 1) == 0)


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
        stage.request(session_id, after)
        assert all(error is None for _, error in await asyncio.gather(*polls))


async def test_a_stream_sends_each_event_and_the_answer_has_them_too(stage: CallerStage) -> None:
    session_id, stream = await stage.open(), Stream()
    streamed = streaming(stage, session_id, stream)
    await waiting(stage)
    for number in range(2):
        stage.request(session_id, number)
        assert (await stream.next())["request_id"] == request_id(number)
    await stage.result("session_message", session_id=session_id, end=True)
    result, _ = await streamed
    assert result is not None
    assert result["ended"] is True


async def test_what_a_stream_sent_before_it_ended_in_order_is_delivered(stage: CallerStage) -> None:
    session_id, stream = await stage.open(), Stream()
    stage.request(session_id)
    result, _ = await streaming(stage, session_id, stream, wait_ms=1)
    assert result is not None
    assert [event["request_id"] for event in result["events"]] == [request_id()]
    stage.hub.seconds.now += 11
    stage.hub.caller_tools.expiry.sweep_requests()
    assert stage.results() == {}


@pytest.mark.parametrize("is_polled_too", [False, True])
async def test_a_request_that_was_sent_on_a_stream_alone_ends_with_it(
    stage: CallerStage,
    is_polled_too: bool,  # noqa: FBT001 - of the table
) -> None:
    session_id, stream = await stage.open(), Stream()
    streamed = streaming(stage, session_id, stream)
    await waiting(stage)
    stage.request(session_id)
    await stream.next()
    if is_polled_too:
        await stage.events(session_id)
    streamed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await streamed
    assert stage.results() == ({} if is_polled_too else {request_id(): "caller_disconnected"})
