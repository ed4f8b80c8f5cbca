"""Lines are written and synced by threads: what a power cut takes, and what a disk that stalls holds up."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from relay.audit.log import AuditLog, AuditUnavailableError, Chained, NewLine
from relay.audit.verify import verify
from relay.audit.writer import AuditWriter
from relay.settings.config import KEEP_ALL, AuditKeep
from schemas.process.logs import make_logger
from tests.fakes.audits import WrittenAudit
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.fuse_disk import FuseDisk, fuse_disk
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NOW_MS


class Stage:
    """The audit of one directory, and its writer."""

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

    async def record(self, number: int, **options: Any) -> None:
        async with asyncio.timeout(BOUND_S):
            await self.writer.record(f'"number":{number}', **options)

    async def until_synced(self, head: str) -> None:
        await until(lambda: self.writer.head == head)


def numbers(path: Path) -> list[int]:
    return [json.loads(line)["number"] for line in path.read_bytes().splitlines()]


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
    stage.writer.append('"number":2')
    stage.writer.note('"number":3')
    late = threading.Thread(target=lambda: stage.writer.append('"number":4'))
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


@pytest.mark.parametrize("turns", [0, 100], ids=["with the next", "before the next"])
async def test_a_line_that_is_withdrawn_is_not_written_and_those_after_it_continue_the_chain(
    tmp_path: Path, turns: int
) -> None:
    file = HeldLog(tmp_path / "audit.jsonl", FakeClock(NOW_MS))
    stage = Stage(tmp_path, file=file)
    first = asyncio.create_task(stage.record(1))
    await asyncio.to_thread(file.writes.wait, BOUND_S)
    withdrawn = asyncio.create_task(stage.record(2))
    for _ in range(turns):  # after which it has been handed over by itself
        await asyncio.sleep(0)
    third = asyncio.create_task(stage.record(3))
    for _ in range(100):
        await asyncio.sleep(0)
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
        stage.writer.append('"number":5')
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
        stage.writer.append('"number":3')
    with pytest.raises(AuditUnavailableError, match="does not answer in time"):
        await waiting
    disk.resume()
    stage.writer.close()


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
