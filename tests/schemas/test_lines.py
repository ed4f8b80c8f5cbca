"""Lines on their way to pipes and streams that do not take them."""

import fcntl
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import TextIO

import pytest

from schemas.lines import LineWriter, LogLevel, LogThreshold

BOUND_S = 30
F_SETPIPE_SZ = 1031  # fcntl.F_SETPIPE_SZ, which not every build of Python has
PIPE_BYTES = 4096


class Pipe:
    """A small pipe that is read when the test requests it."""

    def __init__(self) -> None:
        self.read_end, write_end = os.pipe()
        fcntl.fcntl(write_end, F_SETPIPE_SZ, PIPE_BYTES)
        self.stream: TextIO = os.fdopen(write_end, "w")

    def read_all(self) -> list[str]:
        """Return the lines that come until the other end is closed."""
        with os.fdopen(self.read_end) as reader:
            return reader.read().splitlines()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    if not made.stream.closed:
        made.stream.close()


class Broken(io.StringIO):
    """A stream that fails as long as ``error`` is set."""

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error = error
        self.tried = threading.Semaphore(0)

    def write(self, text: str) -> int:
        self.tried.release()
        if self.error is not None:
            raise self.error
        return super().write(text)


def lost_line(count: int) -> str:
    return f"lost {count}\n"


def writer(stream: TextIO, on_lost: Callable[[int], None] = lambda _: None, most: int = 1000) -> LineWriter:
    return LineWriter(stream, lost_line, on_lost, most)


def test_lines_come_out_whole_and_in_order(pipe: Pipe) -> None:
    lines = writer(pipe.stream, most=1 << 20)
    for number in range(50):
        lines.write(f"line {number} \u00e9\n")
    lines.close(BOUND_S)
    pipe.stream.close()
    assert pipe.read_all() == [f"line {number} \u00e9" for number in range(50)]


def test_a_writer_never_waits_for_a_pipe_that_is_not_read_and_says_what_was_lost_once_it_is(
    pipe: Pipe,
) -> None:
    counted: list[int] = []
    lines = writer(pipe.stream, counted.append)
    written = [f"{number:04} {'x' * 94}\n" for number in range(1000)]
    for line in written:
        lines.write(line)  # would block for good after 40 of them
    assert sum(counted) > 900
    read: list[str] = []
    reading = threading.Thread(target=lambda: read.extend(pipe.read_all()))
    reading.start()
    lines.close(BOUND_S)
    pipe.stream.close()
    reading.join(BOUND_S)
    reported = [line for line in read if line.startswith("lost")]
    kept = [line for line in read if not line.startswith("lost")]
    assert kept == [line.rstrip("\n") for line in written[: len(kept)]]
    assert [sum(int(line.split()[1]) for line in reported)] == [sum(counted)]
    assert len(kept) + sum(counted) == len(written)


def test_closing_waits_no_longer_than_it_was_told_to(pipe: Pipe) -> None:
    lines = writer(pipe.stream, most=1 << 20)
    for _ in range(100):
        lines.write("x" * 100 + "\n")
    lines.close(0.001)  # returns: the test's own time limit is the bound
    lines.write("too late\n")
    assert "too late" not in os.read(pipe.read_end, PIPE_BYTES).decode()
    os.close(pipe.read_end)


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(OSError(28, "No space left on device"), id="no space"),
        pytest.param(BrokenPipeError(), id="a dead reader"),
        pytest.param(ValueError("I/O operation on closed file."), id="closed"),
    ],
)
def test_lines_that_cannot_be_written_are_counted_and_said_when_that_works_again(error: Exception) -> None:
    counted: list[int] = []
    stream = Broken(error)
    lines = writer(stream, counted.append)
    lines.write("one\n")
    assert stream.tried.acquire(timeout=BOUND_S)
    lines.write("two\n")
    assert stream.tried.acquire(timeout=BOUND_S)
    stream.error = None
    lines.write("three\n")
    lines.close(BOUND_S)
    assert counted == [1, 1]
    assert sorted(stream.getvalue().splitlines()) == ["lost 2", "three"]


def test_a_stream_that_never_works_keeps_no_one_from_ending() -> None:
    others = set(threading.enumerate())
    counted: list[int] = []
    lines = writer(Broken(BrokenPipeError()), counted.append)
    lines.write("one\n")
    lines.close(BOUND_S)
    assert counted == [1]
    assert not [thread for thread in set(threading.enumerate()) - others if thread.name == "log"]


def test_a_line_that_was_cut_off_does_not_swallow_the_next(
    monkeypatch: pytest.MonkeyPatch, pipe: Pipe
) -> None:
    outcomes: list[int | OSError] = [2, OSError(28, "No space left on device")]
    real, refused = os.write, threading.Event()

    def write(descriptor: int, data: memoryview) -> int:
        outcome = outcomes.pop(0) if outcomes else len(data)
        if isinstance(outcome, OSError):
            refused.set()
            raise outcome
        return real(descriptor, data[:outcome])

    monkeypatch.setattr(os, "write", write)
    lines = writer(pipe.stream)
    lines.write("first\n")
    assert refused.wait(BOUND_S)
    lines.write("second\n")
    lines.close(BOUND_S)
    pipe.stream.close()
    assert pipe.read_all() == ["fi", "second", "lost 1"]


def test_it_tells_whether_a_person_looks_at_the_stream() -> None:
    assert not writer(io.StringIO()).isatty()


def test_lines_that_come_together_are_written_together() -> None:
    counted = Broken(None)
    lines = writer(counted, most=1 << 20)
    for number in range(200):
        lines.write(f"line {number}\n")
    lines.close(BOUND_S)
    writes = 0
    while counted.tried.acquire(blocking=False):
        writes += 1
    assert counted.getvalue().count("\n") == 200
    assert writes < 100


@pytest.mark.parametrize(
    ("level", "admitted"),
    [
        (LogLevel.INFO, ["info", "warning", "error", "critical"]),
        (LogLevel.WARNING, ["warning", "error", "critical"]),
        (LogLevel.ERROR, ["error", "critical"]),
    ],
)
def test_a_level_admits_itself_and_what_is_more_severe(level: LogLevel, admitted: list[str]) -> None:
    threshold = LogThreshold()
    threshold.level = level
    names = ("debug", "info", "warning", "error", "critical")
    assert [name for name in names if threshold.admits(name)] == admitted
