from pathlib import Path

import pytest

from kubelet.announce.signer import RESERVED_MS, LastIssued
from schemas.process.logs import make_logger
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.signer import NOW_MS

GREATEST = NOW_MS * 2


class Rig:
    """One node's file, and what is made of it at each start."""

    def __init__(self, file: Path, log: LogLines) -> None:
        self.file = file
        self.ticks = FakeClock(5_000)
        self._log = make_logger("kubelet", log)

    def start(self) -> LastIssued:
        return LastIssued(self.file, GREATEST, self.ticks, self._log)

    @property
    def kept(self) -> int:
        return int(self.file.read_text())


@pytest.fixture
def rig(tmp_path: Path, log: LogLines) -> Rig:
    return Rig(tmp_path / "last_issued_ms", log)


def test_the_file_is_never_behind_and_is_written_once_for_ten_seconds(rig: Rig) -> None:
    last = rig.start()
    for passed_ms in (0, 1, 5_000, RESERVED_MS):
        last.advance(NOW_MS + passed_ms, NOW_MS + passed_ms)
        assert rig.kept == NOW_MS + RESERVED_MS
    last.advance(NOW_MS + RESERVED_MS + 1, NOW_MS + RESERVED_MS + 1)
    assert rig.kept == NOW_MS + 2 * RESERVED_MS + 1


def test_a_time_that_was_not_reserved_waits_for_its_write(rig: Rig) -> None:
    last = rig.start()
    assert last.wait_ms(NOW_MS) == 0
    last.advance(NOW_MS, NOW_MS)
    rig.ticks.advance(4_000)
    assert last.wait_ms(NOW_MS + RESERVED_MS) == 0
    assert last.wait_ms(NOW_MS + RESERVED_MS + 1) == RESERVED_MS - 4_000
    rig.ticks.advance(6_000)
    assert last.wait_ms(NOW_MS + RESERVED_MS + 1) == 0


def test_a_restart_goes_on_behind_what_was_reserved(rig: Rig) -> None:
    rig.start().advance(NOW_MS, NOW_MS)
    assert rig.start().ms == NOW_MS + RESERVED_MS


def test_a_node_that_restarts_all_the_time_does_not_move_ahead_of_its_clock(rig: Rig) -> None:
    now = NOW_MS
    for _ in range(100):
        last = rig.start()
        last.advance(max(now, last.ms + 1), now)
        assert rig.kept <= now + RESERVED_MS + 1
        now += 1_000


@pytest.mark.parametrize("text", ["", "-1", "x", "1e3", str(GREATEST + 1)])
def test_what_can_be_no_time_counts_as_nothing(rig: Rig, text: str) -> None:
    rig.file.write_text(text)
    assert rig.start().ms == 0


def test_a_number_that_is_torn_counts_as_nothing(rig: Rig) -> None:
    rig.file.write_text(f"{NOW_MS}"[:-1])
    assert rig.start().ms == 0


def test_going_back_to_an_earlier_time_is_kept_too(rig: Rig) -> None:
    last = rig.start()
    last.advance(NOW_MS + 1_000_000, NOW_MS)
    rig.ticks.advance(RESERVED_MS)
    last.replace(NOW_MS - 1)
    last.advance(NOW_MS, NOW_MS)
    assert rig.kept == NOW_MS + RESERVED_MS


def test_a_node_without_disk_never_waits(log: LogLines) -> None:
    last = LastIssued(None, GREATEST, FakeClock(0), make_logger("kubelet", log))
    last.advance(NOW_MS, NOW_MS)
    assert last.wait_ms(NOW_MS + 1_000_000) == 0


def test_what_is_beyond_the_greatest_counts_as_nothing(rig: Rig) -> None:
    rig.file.write_text(f"{GREATEST}\n")
    assert rig.start().ms == GREATEST
    rig.file.write_text(f"{GREATEST + 1}\n")
    assert rig.start().ms == 0


def test_a_file_that_cannot_be_written_is_not_tried_again_at_once(rig: Rig, log: LogLines) -> None:
    rig.file = rig.file.parent / "gone" / "last_issued_ms"
    last = rig.start()
    for passed_ms in (0, 1, RESERVED_MS + 1):
        last.advance(NOW_MS + passed_ms, NOW_MS + passed_ms)
    assert len(log.entries("the time of the newest manifest is not kept")) == 2
