"""Lines are written off the event loop: what a power cut takes, and what a disk that stalls holds up.

All of it holds for the thread that writes and, where calls are many, for the process that appends.
"""

import asyncio
import errno
import gc
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import psutil
import pytest

from relay.audit.appender import Appender
from relay.audit.files import numbered
from relay.audit.log import AuditInUseError, AuditLog, AuditUnavailableError, Chained, NewLine
from relay.audit.verify import verify
from relay.audit.writer import BUSY_LINES, WAIT_S, AuditWriter
from relay.settings.config import KEEP_ALL, AuditKeep
from schemas.process.logs import make_logger
from tests.fakes.audits import WrittenAudit
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.fuse_disk import FuseDisk, fuse_disk
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until, wait_until
from tests.fakes.signer import NOW_MS

NEVER = 1 << 30


class Stage:
    """The audit of one directory, and its writer: the first call waits for its process, if it has one."""

    busy_lines = NEVER

    def __init__(
        self,
        directory: Path,
        *,
        always: bool = False,
        max_bytes: int = 1 << 26,
        keep: AuditKeep = KEEP_ALL,
        file: AuditLog | None = None,
    ) -> None:
        self.path, self.clock, self.lines = directory / "audit.jsonl", FakeClock(NOW_MS), LogLines()
        file = file or AuditLog(self.path, self.clock, max_bytes)
        self.writer = AuditWriter(file, self.clock, make_logger("relay", self.lines), always, keep)
        self.writer.busy_lines = self.busy_lines
        self._starts = self.busy_lines == 0 and not always

    async def record(self, number: int, **options: Any) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.writer.record(f'"number":{number}', **options)
        if self._starts:
            self._starts = False
            await until(lambda: self.writer.has_process)

    async def until_synced(self, head: str) -> None:
        await until(lambda: self.writer.head == head)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_bytes().splitlines()]


@pytest.fixture(autouse=True, params=[NEVER, 0], ids=["thread", "process"])
def busy_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Stage, "busy_lines", request.param)
    return int(request.param)


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    found = Stage(tmp_path)
    yield found
    found.writer.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FuseDisk]:
    with fuse_disk(tmp_path / "disk") as found:
        yield found


async def test_what_is_recorded_is_in_the_file_in_the_order_of_its_beginning(stage: Stage) -> None:
    await asyncio.gather(*(stage.record(number) for number in range(50)))
    assert numbers(stage.path) == list(range(50))
    assert verify(stage.path).intact


async def test_what_is_noted_is_written_soon_and_before_what_comes_after_it(stage: Stage) -> None:
    stage.writer.note('"number":1')
    await stage.record(2)
    assert numbers(stage.path) == [1, 2]
    stage.writer.note('"number":3')
    await until(lambda: len(numbers(stage.path)) == 3)


async def test_a_line_of_another_thread_does_not_look_like_a_clock_that_was_set_back(stage: Stage) -> None:
    stage.writer.note('"number":1')
    stage.clock.advance(5)
    stage.writer.write(number=2)
    stage.writer.note('"number":3')
    late = threading.Thread(target=lambda: stage.writer.write(number=4))
    late.start()
    late.join()
    assert numbers(stage.path) == [1, 2, 3, 4]
    assert verify(stage.path).backwards == 0


async def test_only_the_lines_that_do_not_fit_are_refused_and_the_chain_holds(stage: Stage) -> None:
    await stage.record(1)
    stage.writer.note('"number":2', "01J0")
    size = stage.path.stat().st_size
    with full_disk(size + size // 2), pytest.raises(AuditUnavailableError):
        await stage.record(3)
    assert stage.lines.entries("outcome not recorded")[0]["correlation_id"] == "01J0"
    available = [stage.writer.available]
    await stage.record(4)
    assert [*available, stage.writer.available] == [False, True]
    report = verify(stage.path)
    assert (report.intact, report.torn) == (True, 1)


async def test_of_several_lines_at_once_those_that_fit_are_recorded(stage: Stage) -> None:
    await stage.record(0)
    size = stage.path.stat().st_size
    with full_disk(2 * size + size // 2):
        found = await asyncio.gather(*(stage.record(number) for number in range(3)), return_exceptions=True)
    assert [type(one) for one in found] == [type(None), AuditUnavailableError, AuditUnavailableError]
    await stage.record(9)
    assert verify(stage.path).intact


class HeldLog(AuditLog):
    """Writes nothing until it is released."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.writes, self.released = threading.Event(), threading.Event()

    def append_all(self, lines: Sequence[NewLine], ready: Chained | None = None) -> int:
        self.writes.set()
        assert self.released.wait(BOUND_S)
        return super().append_all(lines, ready)


@pytest.mark.parametrize("count", [0, 100], ids=["with the next", "before the next"])
async def test_a_line_that_is_withdrawn_is_not_written_and_those_after_it_continue_the_chain(
    tmp_path: Path, count: int
) -> None:
    file = HeldLog(tmp_path / "audit.jsonl", FakeClock(NOW_MS))
    stage = Stage(tmp_path, file=file)
    first = asyncio.create_task(stage.record(1))
    await asyncio.to_thread(file.writes.wait, BOUND_S)
    withdrawn = asyncio.create_task(stage.record(2))
    await turns(count)  # after which it has been handed over by itself
    third = asyncio.create_task(stage.record(3))
    await turns(100)
    withdrawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await withdrawn
    file.released.set()
    await asyncio.gather(first, third)
    await stage.record(4)
    stage.writer.close()
    assert numbers(stage.path) == [1, 3, 4]
    assert verify(stage.path).intact


# --- a power cut


@pytest.mark.integration
async def test_with_always_a_power_cut_takes_no_line_that_was_recorded(
    disk: FuseDisk, tmp_path: Path
) -> None:
    stage = Stage(disk.path, always=True)
    await asyncio.gather(*(stage.record(number) for number in range(20)))
    head = stage.writer.head
    held = disk.cut_power(tmp_path / "held") / "audit.jsonl"
    stage.writer.close()
    assert numbers(held) == list(range(20))
    assert verify(held, expect=head).intact


@pytest.mark.integration
async def test_a_power_cut_takes_the_newest_lines_and_no_head_that_was_shown(
    disk: FuseDisk, tmp_path: Path
) -> None:
    stage = Stage(disk.path)
    await stage.record(1)
    shown = stage.writer.head
    at_once = disk.cut_power(tmp_path / "at once") / "audit.jsonl"
    assert verify(at_once, expect=None if set(shown) == {"0"} else shown).intact
    await stage.until_synced(verify(stage.path).head)
    await stage.record(2)
    held = disk.cut_power(tmp_path / "held") / "audit.jsonl"
    assert numbers(held) == [1]
    assert verify(held, expect=stage.writer.head).intact
    stage.writer.close()
    closed = disk.cut_power(tmp_path / "closed") / "audit.jsonl"
    assert numbers(closed) == [1, 2]


@pytest.mark.integration
async def test_a_power_cut_after_a_rotation_leaves_a_whole_chain(disk: FuseDisk, tmp_path: Path) -> None:
    stage = Stage(disk.path, max_bytes=1)
    for number in range(4):
        await stage.record(number)
        stage.clock.advance(1000)
        held = disk.cut_power(tmp_path / f"held {number}") / "audit.jsonl"
        report = verify(held)
        assert report.intact
        assert report.lines >= number
    stage.writer.close()


# --- a disk that stalls


def never_sent(_error: BaseException) -> str:
    return '"number":0,"outcome":"error"'


@pytest.mark.integration
@pytest.mark.parametrize("always", [False, True])
async def test_a_disk_that_stalls_holds_up_no_loop_and_what_waited_was_never_done(
    disk: FuseDisk, *, always: bool
) -> None:
    stage = Stage(disk.path, always=always)
    await stage.record(1)
    disk.stall()  # until `resume`: what waits for the disk in this loop waits longer than the test may take
    waiting = [asyncio.create_task(stage.record(number, otherwise=never_sent)) for number in (2, 3)]
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await waiting[0]
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await stage.record(4)  # at once
    with pytest.raises(AuditUnavailableError):
        stage.writer.write(number=5)
    with pytest.raises(AuditUnavailableError):
        stage.writer.decide('"number":7', never_sent(AuditUnavailableError()))
    assert not stage.writer.available
    disk.resume()
    await until(lambda: stage.writer.available)
    await stage.record(6)
    with suppress(AuditUnavailableError):
        await waiting[1]
    stage.writer.close()
    lines = [json.loads(line) for line in stage.path.read_bytes().splitlines()]
    allowed = [line["number"] for line in lines if "outcome" not in line]
    assert {1, 6} <= set(allowed) <= {1, 2, 3, 6}
    # What is in the file all the same is followed by its outcome.
    assert [line["number"] for line in lines if "outcome" in line] == [0] * (len(allowed) - 2)
    assert verify(stage.path).intact


@pytest.mark.integration
@pytest.mark.parametrize("always", [False, True])
async def test_a_decision_that_the_disk_takes_too_late_is_followed_by_its_outcome(
    disk: FuseDisk, *, always: bool
) -> None:
    stage = Stage(disk.path, always=always)
    await stage.record(1)
    disk.stall()
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        stage.writer.decide('"number":2', never_sent(AuditUnavailableError()))
    disk.resume()
    await until(lambda: stage.writer.available)
    stage.writer.close()
    numbers = [json.loads(line)["number"] for line in stage.path.read_bytes().splitlines()]
    # A thread that had no time in a tenth of a second has not begun to write it.
    assert numbers in ([1, 2, 0], [1])


@pytest.mark.integration
async def test_a_call_whose_line_goes_with_one_that_is_no_calls_is_refused_in_time(
    disk: FuseDisk,
) -> None:
    stage = Stage(disk.path)
    await stage.record(1)
    disk.stall()
    waiting = asyncio.create_task(stage.record(2))
    await asyncio.sleep(0)  # its line is gathered in this turn
    with pytest.raises(AuditUnavailableError):
        stage.writer.write(number=3)
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await waiting
    disk.resume()
    stage.writer.close()


# --- the process that appends

BY_PROCESS = pytest.mark.parametrize("busy_lines", [0], ids=["process"], indirect=True)
BY_DEFAULT = pytest.mark.parametrize("busy_lines", [BUSY_LINES], ids=["default"], indirect=True)


def appenders(audit: Path, pid: int | None = None) -> list[psutil.Process]:
    """Return the processes that append to ``audit``: other tests' relays may have theirs in this process."""
    found = list[psutil.Process]()
    for child in psutil.Process(pid).children():
        with suppress(psutil.Error, OSError):  # it has just ended
            appends = Path(f"/proc/{child.pid}/fd/1").readlink().parent == audit.parent
            found += [child] * (appends and "append.py" in " ".join(child.cmdline()))
    return found


async def hanging(stage: Stage) -> psutil.Process:
    """Record a line, and return the process of ``stage``, which hangs from now on."""
    await stage.record(1)
    [process] = appenders(stage.path)
    process.suspend()
    return process


@BY_DEFAULT
async def test_only_while_calls_are_many_there_is_a_process(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    for number in range(20):
        await stage.record(number)
    assert not appenders(stage.path)
    await asyncio.gather(*(stage.record(number) for number in range(20, 20 + BUSY_LINES)))
    await until(lambda: stage.writer.has_process)
    await stage.record(-1)
    assert len(numbers(stage.path)) == 21 + BUSY_LINES
    stage.writer.close()
    assert not appenders(stage.path)


@BY_PROCESS
async def test_what_a_process_was_sent_and_has_not_written_is_written_by_the_thread(stage: Stage) -> None:
    process = await hanging(stage)
    sent = [asyncio.create_task(stage.record(number)) for number in (2, 3)]
    await asyncio.sleep(0)
    stage.writer.note('"number":4')
    process.kill()
    await asyncio.gather(*sent)
    await stage.record(5)
    assert numbers(stage.path) == [1, 2, 3, 4, 5]
    assert verify(stage.path).intact
    assert (
        stage.lines.entries("audit process ended; a thread writes the audit")[0]["status"] == -signal.SIGKILL
    )
    assert stage.writer.available


@BY_PROCESS
async def test_a_process_that_is_killed_while_it_waits_is_replaced_by_the_thread(stage: Stage) -> None:
    await stage.record(1)
    appenders(stage.path)[0].kill()
    await stage.lines.until("audit process ended; a thread writes the audit")
    assert stage.writer.available
    await stage.record(2)
    assert verify(stage.path).intact


@BY_PROCESS
async def test_what_ends_a_relay_does_not_end_its_process(stage: Stage) -> None:
    await stage.record(1)
    [process] = appenders(stage.path)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    await stage.record(2)
    assert appenders(stage.path) == [process]
    assert not stage.lines.entries("audit process ended; a thread writes the audit")


@BY_PROCESS
async def test_a_line_of_a_process_that_hangs_is_refused_in_time(stage: Stage) -> None:
    process = await hanging(stage)
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await stage.record(2, otherwise=never_sent)
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await stage.record(3)  # at once
    assert not stage.writer.available
    process.resume()
    await until(lambda: stage.writer.available)
    await stage.record(4)
    assert numbers(stage.path) == [1, 2, 0, 4]


@BY_PROCESS
async def test_a_process_that_hangs_is_killed_and_the_thread_writes_what_it_was_sent(stage: Stage) -> None:
    await hanging(stage)
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await stage.record(2, otherwise=never_sent)
    await until(lambda: stage.writer.available)
    await stage.record(3)
    assert numbers(stage.path) == [1, 2, 0, 3]
    assert verify(stage.path).intact
    assert not appenders(stage.path)


@BY_PROCESS
async def test_a_process_that_hangs_with_what_no_call_waits_for_is_killed_too(stage: Stage) -> None:
    await hanging(stage)
    stage.writer.note('"number":2')
    await until(lambda: numbers(stage.path) == [1, 2])


@BY_PROCESS
async def test_a_process_that_hangs_when_its_relay_ends_keeps_the_lock_from_no_other(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    await hanging(stage)
    stage.writer.note('"number":2')
    stage.writer.close()
    AuditLog(stage.path, FakeClock(NOW_MS)).close()
    assert numbers(stage.path) == [1, 2]


@pytest.mark.integration
@BY_PROCESS
async def test_what_a_process_writes_that_is_killed_while_the_disk_stalls_is_not_written_again(
    disk: FuseDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(disk.path)
    await stage.record(1)
    [process] = appenders(stage.path)
    monkeypatch.setattr("relay.audit.writer._HANGS_S", 0)
    disk.stall()
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await stage.record(2, otherwise=never_sent)
    status = Path(f"/proc/{process.pid}/status")
    await until(lambda: "ShdPnd:\t0000000000000100" in status.read_text())  # SIGKILL waits for the disk
    with pytest.raises(AuditInUseError):
        AuditLog(stage.path, FakeClock(NOW_MS))
    disk.resume()
    await until(lambda: stage.writer.available)
    await stage.record(3)
    stage.writer.close()
    assert numbers(stage.path) == [1, 2, 0, 3]
    assert verify(stage.path).intact


@BY_PROCESS
async def test_lines_that_one_message_does_not_hold_are_recorded(stage: Stage) -> None:
    await stage.record(1)
    for number in range(2, 300):
        stage.writer.note(f'"number":{number},"text":"{"x" * 600}"')
    await stage.record(300)
    assert numbers(stage.path) == list(range(1, 301))
    assert verify(stage.path).intact


@BY_PROCESS
async def test_each_file_has_a_process_of_its_own(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_bytes=1)
    await stage.record(0)
    seen = set(appenders(stage.path))
    for number in range(1, 4):
        stage.clock.advance(1000)
        await stage.record(number)
        await until(lambda: set(appenders(stage.path)) - seen)
        await until(lambda: stage.writer.has_process)
        assert len(appenders(stage.path)) == 1
        seen.update(appenders(stage.path))
    stage.writer.close()
    assert not appenders(stage.path)
    assert verify(stage.path).intact


@BY_PROCESS
async def test_a_process_that_hangs_with_all_written_is_ended_at_the_next_file_in_time(
    tmp_path: Path,
) -> None:
    stage = Stage(tmp_path, max_bytes=1)
    process = await hanging(stage)
    stage.clock.advance(1000)
    stage.writer.note('"number":2')
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    await stage.record(3)  # while the thread waits for the process
    await until(lambda: process not in appenders(stage.path))
    stage.writer.close()
    assert not appenders(stage.path)
    assert numbers(stage.path) == [2, 3]


@BY_PROCESS
async def test_without_a_process_the_thread_goes_on(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    await stage.writer.record('"number":1')
    await stage.writer.record('"number":2')
    entries = stage.lines.entries("audit process not started; a thread writes the audit")
    assert [entry["reason"] for entry in entries] == [f"[Errno 2] {os.strerror(2)}: '/nowhere/python'"]


@BY_PROCESS
async def test_a_line_that_is_withdrawn_before_it_is_sent_is_not_written(stage: Stage) -> None:
    await stage.record(0)
    await asyncio.gather(*(stage.record(number) for number in range(1, 5)))  # so that more are waited for
    withdrawn = asyncio.create_task(stage.record(5))
    await asyncio.sleep(0)  # its line is gathered in this turn
    withdrawn.cancel()
    with pytest.raises(asyncio.CancelledError):
        await withdrawn
    await stage.record(6)
    assert numbers(stage.path) == [0, 1, 2, 3, 4, 6]
    assert verify(stage.path).intact


@BY_PROCESS
async def test_the_thread_goes_on_where_the_loop_has_just_read_what_it_waits_for(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, read = threading.Event(), threading.Event()
    wait = Appender.wait

    def late(appender: Appender) -> None:
        waits.set()
        assert read.wait(BOUND_S)
        wait(appender)

    process = await hanging(stage)
    sent = asyncio.create_task(stage.record(2))
    await turns(100)  # after which it has been sent
    monkeypatch.setattr(Appender, "wait", late)
    flushed = asyncio.create_task(asyncio.to_thread(stage.writer.flush))
    await asyncio.to_thread(waits.wait, BOUND_S)
    process.resume()
    await sent
    read.set()
    await flushed


@BY_PROCESS
async def test_a_process_that_has_ended_does_not_run_again(tmp_path: Path) -> None:
    """What it has answered before may be read after its end."""
    file = AuditLog(tmp_path / "audit.jsonl", FakeClock(NOW_MS))
    appender = Appender(*file.descriptors)
    await until(lambda: appender.answered() or appender.runs)
    assert appender.send(b"1\n")
    appender.wait()
    [process] = appenders(file.path)
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert appender.send(b"2\n")
    process.kill()
    assert appender.end() == -signal.SIGKILL
    while not appender.ended:
        appender.answered()
    assert not appender.answered()
    assert (appender.ended, appender.runs) == (True, False)
    appender.close()
    file.close()


@BY_PROCESS
async def test_a_disk_that_does_not_tell_the_size_of_its_file_holds_up_no_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, released = threading.Event(), threading.Event()
    has_appended_part = AuditLog.has_appended_part

    def held(file: AuditLog, data: bytes) -> int:
        asked.set()
        assert released.wait(BOUND_S)
        return has_appended_part(file, data)

    monkeypatch.setattr(AuditLog, "has_appended_part", held)
    await stage.record(1)
    appenders(stage.path)[0].kill()
    await asyncio.to_thread(asked.wait, BOUND_S)
    waits = asyncio.create_task(stage.record(2))
    await turns(100)
    released.set()
    await waits


ENDS = """
import os
os.write(0, b"+")
data = os.read(0, 1 << 17)
os.write(1, data[:{written}])
"""


@BY_PROCESS
@pytest.mark.parametrize("written", ["0", "1", "100", "-1", "-2", "None"])
@pytest.mark.parametrize("cut", [False, True])
async def test_what_a_process_that_ends_before_it_answers_has_written_is_not_written_again(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, written: str, *, cut: bool
) -> None:
    program = stage.path.with_name("ends.py")
    program.write_text(ENDS.format(written=written))
    monkeypatch.setattr("relay.audit.appender._PROGRAM", program)
    await stage.record(1)
    if cut:  # by who looks after the disk
        os.truncate(stage.path, 0)
        stage.clock.advance(1000)
        stage.writer.write(number=2)
    await asyncio.gather(*(stage.record(number) for number in (3, 4)))
    await stage.lines.until("audit process ended; a thread writes the audit")
    whole = list[int]()
    for line in stage.path.read_bytes().splitlines():
        with suppress(ValueError):
            whole.append(json.loads(line)["number"])
    assert whole == [2 if cut else 1, 3, 4]
    assert verify(stage.path).intact != cut


@BY_PROCESS
async def test_what_a_relay_has_sent_is_written_though_it_was_killed_with_an_answer_unread(
    tmp_path: Path,
) -> None:
    file = AuditLog(tmp_path / "audit.jsonl", FakeClock(NOW_MS))
    appender = Appender(*file.descriptors)
    await until(lambda: appender.answered() or appender.runs)
    assert appender.send(b"1\n")
    await until(lambda: file.path.read_bytes() == b"1\n")
    [process] = appenders(file.path)
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    assert appender.send(b"2\n")
    appender.close()  # as where the relay was killed
    process.resume()
    assert appender.end() == 0
    assert file.path.read_bytes() == b"1\n2\n"
    file.close()


@BY_PROCESS
async def test_a_loop_that_was_held_up_takes_the_answer_for_the_disks(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await hanging(stage)
    call = asyncio.create_task(stage.record(2))
    await turns(100)  # after which it has been sent
    process.resume()
    wait_until(lambda: len(numbers(stage.path)) == 2)  # the loop is held up
    monkeypatch.setattr("relay.audit.writer.monotonic", lambda: monotonic() + WAIT_S / 2)
    stage.writer.write(number=3)
    await call
    assert numbers(stage.path) == [1, 2, 3]


@BY_PROCESS
async def test_a_writer_may_be_closed_while_its_process_starts(tmp_path: Path) -> None:
    problems = list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _, found: problems.append(found))
    stage = Stage(tmp_path)
    await stage.writer.record('"number":1')
    stage.writer.close()
    await asyncio.sleep(0)
    assert not problems
    assert not appenders(stage.path)


@BY_PROCESS
def test_a_writer_outlives_its_loop(tmp_path: Path) -> None:
    stage = Stage(tmp_path, max_bytes=1)
    asyncio.run(stage.record(1))
    asyncio.run(stage.record(2))
    stage.clock.advance(1000)
    stage.writer.write(number=3)  # to a new file
    asyncio.run(stage.record(4))
    stage.writer.close()
    gc.collect()
    assert numbers(stage.path) == [3, 4]
    assert not appenders(stage.path)


@BY_PROCESS
def test_no_process_leaves_the_signals_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    file = AuditLog(tmp_path / "audit.jsonl", FakeClock(NOW_MS))
    monkeypatch.setattr("socket.socketpair", fail)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        Appender(*file.descriptors)
    assert signal.pthread_sigmask(signal.SIG_SETMASK, before) == before
    file.close()


KILLED = """
import asyncio, sys, structlog
from pathlib import Path
from relay.audit.log import AuditLog
from relay.audit.writer import AuditWriter

async def main():
    now_ms = lambda: 1
    writer = AuditWriter(AuditLog(Path(sys.argv[1]), now_ms), now_ms, structlog.get_logger(), busy_lines=0)
    await writer.record('"number":1')
    while not writer.has_process:
        await asyncio.sleep(0)
    print("runs", flush=True)
    sys.stdin.readline()
    calls = [asyncio.create_task(writer.record(f'"number":{number}')) for number in (2, 3)]
    for _ in range(100):
        await asyncio.sleep(0)
    print("sent", flush=True)
    await asyncio.wait(calls)

asyncio.run(main())
"""


@BY_PROCESS
def test_what_a_relay_that_is_killed_has_sent_is_written_before_another_begins(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    command = [sys.executable, "-P", "-c", KILLED, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdin is not None
        assert relay.stdout is not None
        assert relay.stdout.readline() == "runs\n"
        [process] = appenders(path, relay.pid)
        process.suspend()
        relay.stdin.write("\n")
        relay.stdin.flush()
        assert relay.stdout.readline() == "sent\n"
        relay.kill()
        relay.wait(BOUND_S)
        with pytest.raises(AuditInUseError):
            AuditLog(path, FakeClock(NOW_MS))
        process.resume()
        process.wait(BOUND_S)
    AuditLog(path, FakeClock(NOW_MS)).close()
    assert numbers(path) == [1, 2, 3]
    assert verify(path).intact


class Chance:
    """Does by chance what callers, the disk and an operator may, and knows what must be in the files then."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.stage = Stage(directory, max_bytes=2000)
        self.random = Random(seed)  # noqa: S311 - a test
        self.begun = 0
        self.recorded, self.explained = set[int](), set[int]()
        self.calls = list[asyncio.Task[None]]()

    async def call(self, number: int) -> None:
        def otherwise(_: BaseException) -> str:
            self.explained.add(number)
            return f'"number":{-number}'

        with suppress(AuditUnavailableError, asyncio.CancelledError):
            await self.stage.writer.record(f'"number":{number}', otherwise=otherwise)
            self.recorded.add(number)

    def begin(self, count: int) -> None:
        for _ in range(count):
            self.begun += 1
            self.calls.append(asyncio.create_task(self.call(self.begun)))

    def append(self) -> None:
        self.begun += 1
        with suppress(AuditUnavailableError):
            self.stage.writer.write(number=self.begun)
            self.recorded.add(self.begun)
        self.explained.add(self.begun)  # it is no call's

    async def turns(self) -> None:
        await turns(self.random.randrange(40))

    async def full(self) -> None:
        more = self.random.randrange(600)
        with suppress(FileNotFoundError), full_disk(self.stage.path.stat().st_size + more):
            self.begin(9)  # unless a new file is just begun
            await self.turns()

    def to_processes(self, number: signal.Signals) -> None:
        for process in appenders(self.stage.path):
            with suppress(psutil.Error):
                process.send_signal(number)

    def cancel(self) -> None:
        if self.calls:
            self.random.choice(self.calls[-20:]).cancel()

    def advance(self) -> None:
        self.stage.clock.advance(self.random.choice([1, 400, 1000, -2000]))

    async def step(self) -> None:
        acts: dict[Callable[[], Awaitable[None] | None], int] = {
            self.turns: 6,
            lambda: self.begin(1): 3,
            lambda: self.begin(30): 1,
            self.append: 1,
            lambda: asyncio.to_thread(self.append): 2,
            self.cancel: 1,
            self.advance: 1,
            self.full: 1,
            lambda: self.to_processes(signal.SIGKILL): 1,
            lambda: self.to_processes(signal.SIGSTOP): 1,
            lambda: self.to_processes(signal.SIGCONT): 2,
        }
        [act] = self.random.choices(list(acts), list(acts.values()))
        if (awaited := act()) is not None:
            await awaited


@BY_PROCESS
@pytest.mark.parametrize("seed", range(3))
async def test_whatever_happens_what_was_recorded_is_in_the_files_and_what_was_not_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr("relay.audit.writer._START_AGAIN_S", 0)
    monkeypatch.setattr("relay.audit.writer.WAIT_S", 0.1)
    monkeypatch.setattr("relay.audit.writer._EXPIRY_S", 0.02)
    monkeypatch.setattr("relay.audit.writer._HANGS_S", 0.2)
    chance = Chance(tmp_path, seed)
    await chance.stage.record(0)
    for _ in range(150):
        await chance.step()
    chance.to_processes(signal.SIGCONT)
    _, waiting = await asyncio.wait(chance.calls, timeout=BOUND_S)
    assert not waiting
    chance.stage.writer.close()
    lines = list[int]()
    for file in (*(file for _, file in numbered(chance.stage.path)), chance.stage.path):
        for line in file.read_bytes().splitlines():
            with suppress(ValueError):  # a piece
                lines.append(json.loads(line)["number"])
    begun = [number for number in lines if number >= 0]
    assert len(set(lines)) == len(lines)
    assert chance.recorded <= set(begun) <= {0} | chance.recorded | chance.explained
    assert verify(chance.stage.path).intact
    assert not appenders(chance.stage.path)


# --- old files


async def test_a_smaller_audit_leaves_the_newest_of_what_there_is(stage: Stage) -> None:
    """What is kept may be set while the relay runs."""
    for number in range(100):
        await stage.record(number)
    stage.writer.retain(AuditKeep(max_bytes=4000))
    for number in range(100, 400):
        stage.clock.advance(1000)
        await stage.record(number)
    left = sorted(stage.path.parent.glob("audit*.jsonl"))
    assert all(file.stat().st_size < 1300 for file in left[1:])


@pytest.mark.integration
async def test_old_files_are_removed_after_a_synced_line_that_names_each_with_its_head(
    disk: FuseDisk, tmp_path: Path
) -> None:
    written = WrittenAudit(disk.path)
    for _ in range(4):
        written.rotate()
        written.write(4)
    written.close()
    noted = verify(written.path).head
    stage = Stage(disk.path, keep=AuditKeep(max_age_ms=1, max_bytes=1))
    await until(lambda: len(written.files) == 2)
    held = disk.cut_power(tmp_path / "held")
    stage.writer.close()
    removed = [entry["file"] for entry in stage.lines.entries("audit file removed")]
    assert removed == ["audit-000001.jsonl", "audit-000002.jsonl"]
    # The line that names a file is on the disk before the file is gone from it.
    on_disk = verify(held / "audit.jsonl", noted)
    assert on_disk.intact
    assert {each.file for each in verify(written.path, noted).removed} == set(removed)


@pytest.mark.integration
async def test_while_the_line_that_names_it_cannot_be_written_a_file_is_kept(tmp_path: Path) -> None:
    written = WrittenAudit(tmp_path)
    for _ in range(3):
        written.rotate()
        written.write(4)
    written.close()
    with full_disk():
        stage = Stage(tmp_path, keep=AuditKeep(max_bytes=1))
        await stage.lines.until("audit file not removed")
        assert len(written.files) == 3
    stage.writer.close()
