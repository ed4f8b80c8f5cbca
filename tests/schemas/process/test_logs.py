import asyncio
import gc
import io
import json
import logging
import os
import threading
import warnings
from datetime import UTC, datetime
from pathlib import Path

import pytest

from schemas.lines import LogLevel, LogThreshold
from schemas.process.logs import is_journal, make_logger, open_log, with_priority
from tests.fakes.lines import BOUND_S, LogLines, Terminal


def test_programs_get_one_line_of_json_an_event() -> None:
    stream = io.StringIO()
    log = make_logger("kubelet", stream)
    log.info("first", code=4001, text="a\nb\x1b[31m")
    log.error("second")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert list(first)[:4] == ["ts", "level", "component", "event"]
    stamp = datetime.fromisoformat(first.pop("ts"))
    assert stamp.tzinfo == UTC
    expected = {
        "level": "info",
        "component": "kubelet",
        "event": "first",
        "code": 4001,
        "text": "a\nb\x1b[31m",
    }
    assert first == expected
    assert (second["event"], second["level"]) == ("second", "error")


def test_the_journal_gets_the_same_with_the_priority_in_front() -> None:
    stream = io.StringIO()
    log = make_logger("kubelet", stream, to_journal=True)
    log.info("first")
    log.error("second")
    first, second = stream.getvalue().splitlines()
    assert (first[:4], second[:4]) == ("<6>{", "<3>{")
    assert (json.loads(first[3:])["event"], json.loads(second[3:])["level"]) == ("first", "error")


async def test_standard_error_that_is_the_journal_is_found_by_what_systemd_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, begins in (("journal", "<6>{"), ("file", "{")):
        with (tmp_path / name).open("w") as stream:
            facts = os.fstat(stream.fileno())
            if name == "journal":
                monkeypatch.setenv("JOURNAL_STREAM", f"{facts.st_dev}:{facts.st_ino}")
            with open_log("kubelet", stream) as (log, _lines):
                log.info("started")
        assert (tmp_path / name).read_text().startswith(begins)


def test_people_get_a_line_to_read() -> None:
    stream = Terminal()
    make_logger("kubelet", stream).warning("relay lost", code=4008)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "relay lost" in text
    assert "4008" in text
    assert not text.startswith("{")


def test_what_is_only_for_developers_is_left_out() -> None:
    stream = io.StringIO()
    make_logger("kubelet", stream).debug("detail")
    assert stream.getvalue() == ""


def test_an_exception_stays_on_its_line() -> None:
    stream = io.StringIO()
    log = make_logger("kubelet", stream)
    try:
        int("a bug")
    except ValueError:
        log.exception("it broke")
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: invalid literal" in json.loads(stream.getvalue())["exception"]


def test_two_loggers_do_not_share_a_stream() -> None:
    first, second = io.StringIO(), io.StringIO()
    make_logger("kubelet", first).info("one")
    make_logger("kubelet", second).info("two")
    assert json.loads(first.getvalue())["event"] == "one"
    assert json.loads(second.getvalue())["event"] == "two"


# --- faults ---------------------------------------------------------------------------------------------


class Clock:
    """A clock that stands still until a test moves it."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def fail(message: str = "planted") -> None:
    raise LookupError(message)


def test_a_fault_has_its_traceback_once_a_minute_and_is_counted_each_time() -> None:
    lines, clock, counted = LogLines(), Clock(), list[str]()
    log = make_logger("kubelet", lines, monotonic=clock, on_fault=counted.append)
    for clock.now_s in (0.0, 1.0, 2.0, 61.0):
        try:
            fail("a\n\x1b[31mb")
        except LookupError:
            log.exception("it broke")
    first, second = lines.entries()
    assert first["error"] == r"LookupError: a\n\x1b[31mb"
    assert "in fail: raise LookupError" in first["exception"]
    assert "kept_back" not in first
    assert second["kept_back"] == 2
    assert counted == ["kubelet"] * 4


async def test_what_a_library_logs_is_a_line_of_ours_once_a_minute() -> None:
    lines, counted = LogLines(), list[str]()
    library = logging.getLogger("uvicorn.error")
    with open_log("kubelet", lines, on_fault=counted.append):
        library.info("for developers")
        for _ in range(3):
            library.warning("a \x1b[31m%s", "warning " + "x" * 500)
        misfit = library.makeRecord("x", logging.ERROR, __file__, 1, "no %d argument", ("fitting",), None)
        logging.getLogger().handlers[-1].handle(misfit)
        try:
            fail()
        except LookupError:
            library.exception("it broke: %s", "y" * 40)
    library.warning("afterwards")
    warning, error, fault = lines.entries()
    assert (warning["event"], warning["library"]) == ("a library reports", "uvicorn")
    assert warning["level"] == "warning"
    assert warning["text"] == r"a \x1b[31mwarning (left out)"
    assert (error["level"], error["text"]) == ("error", "no %d argument")
    assert (fault["error"], fault["text"]) == ("LookupError: planted", "it broke: (left out)")
    assert "in fail: raise LookupError" in fault["exception"]
    assert counted == ["x", "uvicorn"]


async def test_what_is_not_caught_in_a_task_a_callback_and_a_thread_is_told_with_its_traceback() -> None:
    lines, counted = LogLines(), list[str]()
    handler = asyncio.get_running_loop().get_exception_handler()

    async def forgotten() -> None:
        fail("in a task")

    with open_log("kubelet", lines, on_fault=counted.append):
        asyncio.get_running_loop().call_soon(fail, "in a callback with a secret argument")
        await lines.until("fault in the background")
        task = asyncio.create_task(forgotten())
        await asyncio.wait([task])
        del task
        gc.collect()
        thread = threading.Thread(target=lambda: fail("in a thread"))  # another place: the lambda is not
        thread.start()
        thread.join()
    told = lines.entries()
    assert [line["text"] for line in told if "text" in line] == ["Exception in callback fail"]
    assert "secret" not in told[0]["text"]
    assert all("in fail: raise LookupError" in line["exception"] for line in told)
    assert counted == ["asyncio", "asyncio", "kubelet"]
    assert asyncio.get_running_loop().get_exception_handler() is handler
    assert threading.excepthook is not None


async def test_a_task_that_is_forgotten_is_named() -> None:
    lines = LogLines()

    async def forgotten() -> None:
        raise ArithmeticError

    with open_log("kubelet", lines):
        task = asyncio.create_task(forgotten())
        await asyncio.wait([task])
        del task
        gc.collect()
        line = await lines.until("fault in the background")
    assert line["of"].endswith("forgotten")
    assert line["error"] == "ArithmeticError"


async def test_a_coroutine_that_is_never_awaited_is_told() -> None:
    lines = LogLines()

    async def unwaited() -> None:
        await asyncio.sleep(0)

    with open_log("kubelet", lines), warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=False)  # the block above has its own way of showing them
        logging.captureWarnings(capture=True)
        unwaited()  # type: ignore[unused-coroutine]  # what is tested
        gc.collect()
    (line,) = lines.entries()
    assert "was never awaited" in line["text"]


async def test_work_that_is_cancelled_is_no_fault() -> None:
    lines = LogLines()
    with open_log("kubelet", lines):
        logging.getLogger("uvicorn.error").error("Exception", exc_info=asyncio.CancelledError())
    assert lines.entries() == []


async def test_lines_that_are_lost_are_counted_and_said() -> None:
    lost: list[int] = []
    stream = Failing()
    with open_log("kubelet", stream, on_lost=lost.append) as (log, _):
        log.info("one")
        assert await asyncio.to_thread(stream.tried.acquire, timeout=BOUND_S)
        stream.fails = False
        log.info("two")
    two, told = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert two["event"] == "two"
    assert (told["event"], told["level"], told["count"]) == ("log lines lost", "warning", 1)
    assert lost == [1]


class Failing(io.StringIO):
    """A stream on a full disk, as long as that is so."""

    def __init__(self) -> None:
        super().__init__()
        self.fails = True
        self.tried = threading.Semaphore(0)

    def write(self, text: str) -> int:
        self.tried.release()
        if self.fails:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_the_level_from_which_on_lines_are_logged_can_be_changed() -> None:
    stream, threshold = io.StringIO(), LogThreshold()
    log = make_logger("kubelet", stream, threshold=threshold)
    for level in (LogLevel.ERROR, LogLevel.WARNING):
        threshold.level = level
        log.info("info")
        log.warning("warning")
        log.error("error")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == [
        "error",
        "warning",
        "error",
    ]


def test_the_stream_that_systemd_names_is_the_journal_and_no_other(tmp_path: Path) -> None:
    with (tmp_path / "one").open("w") as one, (tmp_path / "other").open("w") as other:
        facts = os.fstat(one.fileno())
        environment = {"JOURNAL_STREAM": f"{facts.st_dev}:{facts.st_ino}"}
        assert (is_journal(one, environment), is_journal(other, environment)) == (True, False)
        assert not is_journal(one, {})
    assert not is_journal(one, environment)  # closed
    assert not is_journal(io.StringIO(), environment)


@pytest.mark.parametrize(
    ("level", "number"), [("info", 6), ("warning", 4), ("error", 3), ("critical", 2), ("another", 6)]
)
def test_a_line_begins_with_its_priority(level: str, number: int) -> None:
    assert with_priority(level, '{"event": "x"}') == f'<{number}>{{"event": "x"}}'
