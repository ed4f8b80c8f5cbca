"""A handler that does what it must not: it harms its own callers alone."""

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from kubelet.handlers.base import Handler
from kubelet.handlers.own_thread import MAX_BEHIND, HandlerInThread
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES
from schemas.threads import NoThreadError

BOUND_S = 10
CAPABILITY = {"cap_id": "played"}


class PlayedHandler(Handler):
    """Does what ``act`` does."""

    def __init__(self) -> None:
        self.begun: list[Mapping[str, Any]] = []
        self.act: Any = dict
        self.ran = threading.Event()

    @property
    def capability(self) -> Mapping[str, Any]:
        return CAPABILITY

    async def invoke(self, _verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.begun.append(arguments)
        result: dict[str, Any] = self.act()
        return result

    async def run(self) -> None:
        self.ran.set()
        await asyncio.Event().wait()


@pytest.fixture
def played() -> PlayedHandler:
    return PlayedHandler()


@pytest.fixture
def handler(played: PlayedHandler) -> HandlerInThread:
    return HandlerInThread(played, CAPABILITY)


async def test_it_runs_in_a_thread_of_its_own(played: PlayedHandler, handler: HandlerInThread) -> None:
    played.act = lambda: {"thread": threading.current_thread().name}
    assert handler.capability is CAPABILITY
    assert await handler.invoke("set", {"on": True}) == {"thread": "played"}


async def test_its_work_in_the_background_runs_there_too_and_is_cancelled(
    played: PlayedHandler, handler: HandlerInThread
) -> None:
    running = asyncio.create_task(handler.run())
    assert await asyncio.to_thread(played.ran.wait, BOUND_S)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_while_it_blocks_its_callers_stop_waiting_and_what_they_asked_for_never_runs(
    played: PlayedHandler, handler: HandlerInThread
) -> None:
    blocks, go_on = threading.Event(), threading.Event()

    def block() -> dict[str, Any]:
        blocks.set()
        assert go_on.wait(BOUND_S)
        return {}

    played.act = block
    first = asyncio.create_task(handler.invoke("set", {"number": 1}))
    assert await asyncio.to_thread(blocks.wait, BOUND_S)
    second = asyncio.create_task(handler.invoke("set", {"number": 2}))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    played.act = dict
    third = asyncio.create_task(handler.invoke("set", {"number": 3}))
    await asyncio.sleep(0)
    go_on.set()
    assert [await first, await third] == [{}, {}]
    assert [arguments["number"] for arguments in played.begun] == [1, 3]


async def test_what_waits_for_it_is_bounded(played: PlayedHandler, handler: HandlerInThread) -> None:
    blocks, go_on = threading.Event(), threading.Event()

    def block() -> dict[str, Any]:
        blocks.set()
        return {"on": go_on.wait(BOUND_S)}

    played.act = block
    calls = [asyncio.create_task(handler.invoke("set", {}))]
    assert await asyncio.to_thread(blocks.wait, BOUND_S)
    calls += [asyncio.create_task(handler.invoke("set", {})) for _ in range(MAX_BEHIND + 1)]
    await asyncio.sleep(0)
    with pytest.raises(ToolError) as refused:
        await handler.invoke("set", {})
    assert (refused.value.failure, refused.value.retry_after_ms) == (Failure.RATE_LIMITED, 1000)
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    played.act = dict
    go_on.set()
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                assert await handler.invoke("set", {}) == {}
                break
            except ToolError:
                continue


def cyclic() -> dict[str, Any]:
    itself: dict[str, Any] = {}
    itself["itself"] = [itself]
    return itself


def deep() -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(10_000):
        inner = {"in": inner}
    return inner


@pytest.mark.parametrize(
    ("result", "error"),
    [
        pytest.param(lambda: None, TypeError, id="nothing"),
        pytest.param(lambda: [1], TypeError, id="no object"),
        pytest.param(lambda: {"on": object()}, TypeError, id="no JSON"),
        pytest.param(lambda: {"on": b"bytes"}, TypeError, id="bytes"),
        pytest.param(lambda: {"on": float("nan")}, ValueError, id="no number"),
        pytest.param(cyclic, ValueError, id="contains itself"),
        pytest.param(deep, RecursionError, id="deep"),
        pytest.param(lambda: {"on": "x" * 100_000_000}, ValueError, id="100 MB in one string"),
        pytest.param(lambda: {"on": [[]] * MAX_FRAME_BYTES}, ValueError, id="many values"),
        pytest.param(lambda: {"x" * MAX_FRAME_BYTES: 1}, ValueError, id="a long name"),
    ],
)
async def test_a_result_that_no_frame_can_hold_is_an_error(
    played: PlayedHandler, handler: HandlerInThread, result: Any, error: type[Exception]
) -> None:
    played.act = result
    with pytest.raises(error):
        await handler.invoke("set", {})
    played.act = dict
    assert await handler.invoke("set", {}) == {}


@pytest.mark.parametrize(
    "error",
    [SystemExit(1), KeyboardInterrupt(), asyncio.CancelledError(), MemoryError(), ZeroDivisionError()],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_it_raises_is_an_error_of_its_call(
    played: PlayedHandler, handler: HandlerInThread, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    played.act = fail
    with pytest.raises(Exception, match=r"(?s).*"):
        await asyncio.wait_for(handler.invoke("set", {}), BOUND_S)
    played.act = dict
    assert await handler.invoke("set", {}) == {}


def test_a_system_without_a_thread_left_is_an_error(
    played: PlayedHandler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_thread_left(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", no_thread_left)
    with pytest.raises(NoThreadError):
        HandlerInThread(played, CAPABILITY)
