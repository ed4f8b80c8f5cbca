import asyncio
import os
from collections.abc import Mapping
from typing import Any
from uuid import UUID

import pytest

from kubelet.caller_tools import requests
from kubelet.caller_tools.requests import CallerRequests
from kubelet.caller_tools.sessions import Session
from relay.http.websocket_protocol import FrameMeter
from schemas.caller_tools import MAX_PENDING, MAX_VALUE_BYTES, size_of
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.websocket_frames import FrameHead
from tests.fakes.caller_tools import ANT, BEE, OWNER
from tests.fakes.polling import until
from tests.fakes.seconds import LoopSeconds


class Relay:
    def __init__(self) -> None:
        self.sent: list[tuple[str, Mapping[str, Any]]] = []
        self.takes = True
        self.bug_with: object = None

    def send(self, type_: OneWayType, payload: Mapping[str, Any]) -> bool:
        if self.takes and payload["session_id"] == self.bug_with:
            raise KeyError
        if self.takes:
            self.sent.append((type_.value, payload))
        return self.takes

    def of(self, type_: str) -> list[Mapping[str, Any]]:
        return [payload for sent, payload in self.sent if sent == type_]


@pytest.fixture
def relay() -> Relay:
    return Relay()


@pytest.fixture
def calls(relay: Relay) -> CallerRequests:
    calls = CallerRequests(relay.send, os.urandom)
    calls.expect_requests()
    return calls


@pytest.fixture
def session() -> Session:
    return Session(ANT, "ant", OWNER, {"get_memory": {"name": "get_memory"}})


def ids(request: Mapping[str, Any]) -> Any:
    return {name: request[name] for name in ("session_id", "request_id")}


def answered(request: Mapping[str, Any], **members: Any) -> Any:
    return {**ids(request), **members}


async def failure_of(task: "asyncio.Task[Any]") -> Failure:
    with pytest.raises(ToolError) as raised:
        await task
    return raised.value.failure


async def started(calls: CallerRequests, session: Session, arguments: Any = None) -> "asyncio.Task[Any]":
    task = asyncio.create_task(calls.request(session, "get_memory", arguments or {}))
    await asyncio.sleep(0)
    return task


@pytest.mark.holds("CALLER-TOOLS/data/request-event")
async def test_a_request_is_sent_with_a_random_id_and_ends_with_its_answer(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    task = await started(calls, session, {"a": 1})
    [(type_, sent)] = relay.sent
    assert type_ == "caller_tool"
    assert (sent["session_id"], sent["tool"], sent["arguments"]) == (ANT, "get_memory", {"a": 1})
    assert UUID(sent["request_id"]).version == 4
    assert calls.answer(answered(sent, result=[1]))
    assert await task == [1]
    assert calls.in_flight == 0
    assert relay.of("caller_tool_cancel") == []


@pytest.mark.holds("CALLER-TOOLS/security/replay")
async def test_an_id_is_good_once(calls: CallerRequests, relay: Relay, session: Session) -> None:
    task = await started(calls, session)
    [sent] = relay.of("caller_tool")
    assert calls.answer(answered(sent, result=1))
    assert not calls.answer(answered(sent, result=2))
    assert await task == 1
    assert not calls.answer(answered(sent, result=3))


@pytest.mark.holds("CALLER-TOOLS/security/session-scoped")
async def test_an_answer_under_another_session_is_ignored(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    task = await started(calls, session)
    [sent] = relay.of("caller_tool")
    assert not calls.answer(answered({**sent, "session_id": BEE}, result="evil"))
    calls.answer(answered(sent, result="good"))
    assert await task == "good"


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("caller_disconnected", Failure.CALLER_DISCONNECTED),
        ("timeout", Failure.CALLER_TIMEOUT),
        ("tool_unknown", Failure.CALLER_TOOL_UNKNOWN),
        ("invalid", Failure.ARGUMENTS_INVALID),
        ("over_capacity", Failure.RATE_LIMITED),
        ("tool_failed", Failure.CALLER_TOOL_FAILED),
    ],
)
async def test_an_error_of_the_relay_is_its_row_of_the_table(
    calls: CallerRequests, relay: Relay, session: Session, code: str, failure: Failure
) -> None:
    task = await started(calls, session)
    [sent] = relay.of("caller_tool")
    calls.answer(answered(sent, error={"code": code, "message": "text"}))
    assert await failure_of(task) is failure


@pytest.mark.holds("CALLER-TOOLS/errors/timeout")
async def test_without_an_answer_it_times_out_and_is_cancelled(relay: Relay, session: Session) -> None:
    calls = CallerRequests(relay.send, os.urandom, margin_s=0.01)
    session.timeout_s = 0.0
    assert await failure_of(await started(calls, session)) is Failure.CALLER_TIMEOUT
    [sent] = relay.of("caller_tool")
    assert relay.of("caller_tool_cancel") == [ids(sent)]
    assert not calls.answer(answered(sent, result="late"))


async def test_a_client_that_leaves_cancels_its_request(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    task = await started(calls, session)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert relay.of("caller_tool_cancel") == [ids(relay.of("caller_tool")[0])]
    assert calls.in_flight == 0


async def test_a_cancellation_that_the_connection_does_not_take_is_sent_soon(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    task = await started(calls, session)
    relay.takes = False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert relay.of("caller_tool_cancel") == []
    relay.takes = True
    await until(lambda: relay.of("caller_tool_cancel") == [ids(relay.of("caller_tool")[0])])


async def test_nothing_is_cancelled_of_a_session_that_has_ended(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    task = await started(calls, session)
    relay.takes = False
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    calls.end_session(ANT)
    relay.takes = True
    other = await started(calls, session)
    await until(lambda: len(relay.of("caller_tool")) == 2)
    assert relay.of("caller_tool_cancel") == []
    calls.end_session(ANT)
    await failure_of(other)


async def test_only_so_many_are_pending_at_the_relay_and_the_others_follow(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    tasks = [await started(calls, session) for _ in range(MAX_PENDING + 2)]
    assert len(relay.of("caller_tool")) == MAX_PENDING
    for sent in list(relay.of("caller_tool")):
        calls.answer(answered(sent, result=None))
    await until(lambda: len(relay.of("caller_tool")) == MAX_PENDING + 2)
    for sent in relay.of("caller_tool")[MAX_PENDING:]:
        calls.answer(answered(sent, result=None))
    assert await asyncio.gather(*tasks) == [None] * (MAX_PENDING + 2)


async def test_beyond_the_queue_they_are_refused(
    calls: CallerRequests, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_PENDING", 1)
    monkeypatch.setattr(requests, "MAX_QUEUED", 1)
    first, second = await started(calls, session), await started(calls, session)
    with pytest.raises(ToolError) as raised:
        await calls.request(session, "get_memory", {})
    assert raised.value.failure is Failure.RATE_LIMITED
    assert raised.value.retry_after_ms
    calls.end_session(ANT)
    assert await failure_of(first) is await failure_of(second) is Failure.CALLER_DISCONNECTED


async def test_arguments_have_a_size_as_they_travel(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    text = "ö" * (MAX_VALUE_BYTES // 6)  # six bytes each as an escape
    assert await failure_of(await started(calls, session, {"text": text})) is Failure.ARGUMENTS_INVALID
    assert relay.sent == []


async def test_the_arguments_of_all_requests_have_a_limit(
    calls: CallerRequests, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_HELD_BYTES", 100)
    task = await started(calls, session, {"text": "x" * 60})
    assert await failure_of(await started(calls, session, {"text": "x" * 60})) is Failure.RATE_LIMITED
    calls.end_session(ANT)
    await failure_of(task)
    again = await started(calls, session, {"text": "x" * 60})
    calls.end_session(ANT)
    await failure_of(again)


async def test_what_the_connection_does_not_take_is_sent_soon(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    relay.takes = False
    task = await started(calls, session)
    relay.takes = True
    await until(lambda: relay.of("caller_tool"))
    calls.answer(answered(relay.of("caller_tool")[0], result=1))
    assert await task == 1


async def test_nothing_is_sent_faster_than_the_relay_reads_it(
    relay: Relay, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay disconnects a node that stays behind its rate."""
    clock = LoopSeconds(monkeypatch)
    meter, waits = FrameMeter(lambda: clock.now), []

    def send(type_: OneWayType, payload: Mapping[str, Any]) -> bool:
        size = size_of({"type": type_, "msg_id": 26 * "0", "payload": payload})
        head = FrameHead(is_control=False, is_text=True, payload_bytes=size, head_bytes=0)
        waits.append(meter.take(head))
        return relay.send(type_, payload)

    calls = CallerRequests(send, os.urandom)
    calls.reachable()
    meter.admit()
    calls.expect_requests()
    meter.expect(256)  # what the session adds
    session.timeout_s = 600
    tasks = [await started(calls, session, {"text": "x" * 190_000}) for _ in range(12)]
    small = [await started(calls, session) for _ in range(MAX_PENDING)]
    for task in small:
        task.cancel()
    for _ in range(200):
        await clock.pass_by(1)
    assert len(relay.of("caller_tool")) >= len(tasks)
    assert max(waits) == 0
    calls.end_session(ANT)
    await asyncio.gather(*tasks, *small, return_exceptions=True)


async def test_a_bug_with_one_session_ends_its_requests_alone(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    faults: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _loop, context: faults.append(context["exception"]))
    relay.takes = False
    faulty = await started(calls, session)
    task = await started(calls, Session(BEE, "bee", OWNER, session.tools))
    relay.takes, relay.bug_with = True, ANT
    assert await failure_of(faulty) is Failure.CALLER_DISCONNECTED
    await until(lambda: relay.of("caller_tool"))
    calls.answer(answered(relay.of("caller_tool")[0], result=1))
    assert await task == 1
    assert [type(fault) for fault in faults] == [KeyError]
    loop.set_exception_handler(None)


async def test_unreachable_ends_what_was_never_sent_and_nothing_else(
    calls: CallerRequests, relay: Relay, session: Session
) -> None:
    sent = await started(calls, session)
    relay.takes = False
    unsent = await started(calls, session)
    calls.unreachable()
    assert await failure_of(unsent) is Failure.CALLER_DISCONNECTED
    assert not sent.done()
    assert await failure_of(await started(calls, session)) is Failure.CALLER_DISCONNECTED
    relay.takes = True
    calls.reachable()
    calls.answer(answered(relay.of("caller_tool")[0], result=1))
    assert await sent == 1
