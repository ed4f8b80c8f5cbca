"""The handlers of the kinds that the operator named."""

import asyncio
import io
import sys
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kubelet.handlers.base import Handler, work_in_background
from kubelet.handlers.factory import make_handlers
from kubelet.handlers.named import MAX_BEHIND, HandlerInThread
from schemas.error_roots import ConfigError
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES
from schemas.process.logs import make_logger
from schemas.registry import read_contract
from schemas.threads import NoThreadError
from tests.fakes.kind_package import HANDLER, KIND, KindPackage
from tests.fakes.signer import NODE_ID


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_relay_board"]:
        del sys.modules[name]


def refusal_of(handler: str, site: Path, log: io.StringIO | None = None) -> str:
    KindPackage(handler=handler).install(site)
    with pytest.raises(ConfigError) as caught:
        make_handlers(NODE_ID, make_logger("kubelet", log or io.StringIO()), read_contract((KIND,)))
    [problem] = caught.value.problems
    assert problem.startswith(f"kinds: {KIND}: ")
    return problem


async def test_a_named_kind_is_a_capability_of_the_node(site: Path) -> None:
    KindPackage().install(site)
    *_, handler = make_handlers(NODE_ID, make_logger("kubelet", io.StringIO()), read_contract((KIND,)))
    assert handler.capability["kind"] == KIND
    assert await handler.invoke("set", {"on": True}) == {"node_id": NODE_ID, "on": True, "label": "pump 1"}


def test_a_kind_that_is_not_named_is_not_imported(site: Path) -> None:
    KindPackage(handler="raise SystemError").install(site)
    names = [
        each.capability["kind"] for each in make_handlers(NODE_ID, make_logger("kubelet", io.StringIO()))
    ]
    assert KIND not in names


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ('"read_only"', '"reversible"', "/safety_class must"),
        ('"rate_limit_rps": 10', '"rate_limit_rps": 11', "/constraints/rate_limit_rps must"),
        ('["set"]', '["get"]', "/verbs/0 must"),
        ('"acme.relay_board"', '"system.echo"', "must"),
        ("set.input@1.0.0", "set.output@1.0.0", "kind and schema_ref must be those of kind.json"),
        ('"relays"', '"echo"', "another capability has the cap_id echo"),
        ("(Handler)", "", "makes no kubelet.handlers.base.Handler"),
    ],
)
def test_a_capability_that_the_relay_would_refuse_is_not_announced(
    site: Path, before: str, after: str, said: str
) -> None:
    assert before in HANDLER
    assert said in refusal_of(HANDLER.replace(before, after), site)


@pytest.mark.parametrize(
    ("handler", "error"),
    [
        ("import smbus_that_is_not_there", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError"),
        (HANDLER.replace("self._node_id = node_id", "open('/dev/absent')"), "FileNotFoundError"),
        (HANDLER.replace('"cap_id": "relays"', '"cap_id": self.absent'), "AttributeError"),
    ],
)
def test_a_handler_that_fails_at_start_leaves_its_traceback(site: Path, handler: str, error: str) -> None:
    log = io.StringIO()
    assert f"its handler fails with {error}: see the log" in refusal_of(handler, site, log)
    assert error in log.getvalue()
    assert "acme_relay_board/handler.py" in log.getvalue()


def test_kinds_that_announce_more_than_the_node_can_remember_are_refused_with_the_numbers(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    KindPackage().install(site)
    made = partial(make_handlers, NODE_ID, make_logger("kubelet", io.StringIO()), read_contract((KIND,)))
    # No more than a thousand a second are allowed to one kind; with echo and metrics there are 25 here.
    monkeypatch.setattr("kubelet.handlers.named.MOST_COMMANDS_PER_S", 25)
    assert len(made()) == 3
    monkeypatch.setattr("kubelet.handlers.named.MOST_COMMANDS_PER_S", 24)
    with pytest.raises(ConfigError) as caught:
        made()
    (problem,) = caught.value.problems
    assert problem == (
        "kinds: what this node announces is 25 commands a second in all, and it can remember 24 while a call"
        " lasts: lower rate_limit_rps, or name fewer kinds (acme.relay_board 10)"
    )


BOUND_S = 10
CAPABILITY = {"cap_id": "played"}


class PlayedHandler(Handler):
    """Does what ``act`` does."""

    def __init__(self) -> None:
        self.begun: list[Mapping[str, Any]] = []
        self.act: Any = dict
        self.ran = threading.Event()
        self.failures: list[Exception] = []

    @property
    def capability(self) -> Mapping[str, Any]:
        return CAPABILITY

    async def invoke(self, _verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        self.begun.append(arguments)
        result: dict[str, Any] = self.act()
        return result

    async def run(self) -> None:
        if self.failures:
            raise self.failures.pop()
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


async def test_its_work_in_the_background_begins_again_where_it_fails(played: PlayedHandler) -> None:
    lines, waits = io.StringIO(), list[float]()

    async def sleep(wait_s: float) -> None:
        waits.append(wait_s)

    played.failures = [OSError("no such bus")] * 3
    handler = HandlerInThread(played, CAPABILITY)
    running = asyncio.create_task(work_in_background(handler, make_logger("kubelet", lines), sleep))
    assert await asyncio.to_thread(played.ran.wait, BOUND_S)
    running.cancel()
    assert waits == [1, 2, 4]
    assert '"background work failed"' in lines.getvalue()
    assert "OSError: no such bus" in lines.getvalue()


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
