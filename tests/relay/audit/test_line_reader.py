"""Reading an audit while it is written, rotated and moved away, and however long its lines are."""

import json
import tracemalloc
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest

from relay.audit.chain import MAX_LINE_BYTES
from relay.audit.line_reader import AuditLines
from tests.fakes.audits import WrittenAudit


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[WrittenAudit]:
    audit = WrittenAudit(tmp_path)
    yield audit
    audit.close()


class Reading:
    """A reader that tells lines by their numbers."""

    def __init__(self, path: Path) -> None:
        self.lines = AuditLines(path)

    def new(self) -> list[int]:
        return [json.loads(line.data)["number"] for line in self.lines.read()]


@pytest.fixture
def reading(audit: WrittenAudit) -> Iterator[Reading]:
    reading = Reading(audit.path)
    yield reading
    reading.lines.close()


def in_three_files(audit: WrittenAudit) -> None:
    for _ in range(3):
        audit.rotate()
        audit.write(3)


def test_lines_come_through_all_files_in_the_order_in_which_they_were_written(
    audit: WrittenAudit, reading: Reading
) -> None:
    in_three_files(audit)
    found = list(reading.lines.read())
    assert [json.loads(line.data)["number"] for line in found] == list(range(1, 10))
    assert [line.number for line in found] == [1, 2, 3] * 3


def test_what_is_read_is_not_read_again_and_what_comes_is(audit: WrittenAudit, reading: Reading) -> None:
    assert reading.new() == []
    audit.write(2)
    assert (reading.new(), reading.new()) == ([1, 2], [])
    audit.write()
    assert reading.new() == [3]


def test_a_reader_follows_through_rotations_and_loses_no_line(audit: WrittenAudit, reading: Reading) -> None:
    audit.write()
    found = reading.new()
    for _ in range(3):
        audit.write()  # unread when the file is put aside
        audit.rotate()
        audit.write()
        found += reading.new()
    audit.write()
    in_three_files(audit)  # several at once
    found += reading.new()
    assert found == list(range(1, 18))


def test_a_line_written_between_the_last_look_and_the_rotation_is_read(audit: WrittenAudit) -> None:
    class Slow(AuditLines):
        """Meanwhile the relay is quick."""

        def _successor(self) -> tuple[int, FileIO] | None:
            if not rotated:
                rotated.append(True)
                audit.write()
                audit.rotate()
                audit.write()
            return super()._successor()

    rotated: list[bool] = []
    audit.write()
    lines = Slow(audit.path)
    assert [json.loads(line.data)["number"] for line in lines.read()] == [1, 2, 3]
    lines.close()


@pytest.mark.parametrize("create", [False, True])
def test_a_reader_follows_when_the_operator_moves_the_file_away(
    audit: WrittenAudit, reading: Reading, *, create: bool
) -> None:
    audit.write()
    found = reading.new()
    audit.path.rename(audit.path.with_name("audit.jsonl.1"))
    if create:
        audit.path.touch()
    audit.write()  # the relay has not noticed yet
    found += reading.new()
    audit.write()
    audit.rotate()
    audit.write()
    assert found + reading.new() == [1, 2, 3, 4]


def test_a_line_without_its_end_is_waited_for(audit: WrittenAudit) -> None:
    audit.write(2)
    whole = audit.path.read_bytes()
    for end in range(len(whole) - 20, len(whole)):
        audit.path.write_bytes(whole[:end])
        half = Reading(audit.path)
        assert (half.new(), half.lines.unfinished) == ([1], True)
        audit.path.write_bytes(whole)
        assert (half.new(), half.lines.unfinished) == ([2], False)
        half.lines.close()


def test_a_piece_at_the_end_of_a_file_that_is_over_counts_as_a_line(
    audit: WrittenAudit, reading: Reading
) -> None:
    audit.write()
    audit.path.rename(audit.path.with_name("audit-000001.jsonl"))
    audit.files[0].write_bytes(audit.files[0].read_bytes() + b'{"pr')
    audit.rotate()
    audit.write()
    assert [line.data for line in reading.lines.read()][1] == b'{"pr'


@pytest.mark.parametrize("count", range(11))
def test_the_last_lines_are_found_in_whatever_file_they_begin(
    audit: WrittenAudit, reading: Reading, count: int
) -> None:
    in_three_files(audit)
    reading.lines.skip_to_last(count)
    assert reading.new() == list(range(1, 10))[max(0, 9 - count) :]
    audit.write()
    assert reading.new() == [10]


def test_the_last_lines_are_found_behind_a_line_of_many_blocks(audit: WrittenAudit, reading: Reading) -> None:
    audit.write(2)
    audit.change(lambda lines: lines.insert(1, b"x" * 500_000))
    reading.lines.skip_to_last(2)
    long, last = reading.lines.read()
    assert (long.overlong, last.overlong) == (True, False)
    assert json.loads(last.data)["number"] == 2


def test_a_line_without_end_costs_no_memory(audit: WrittenAudit, reading: Reading) -> None:
    audit.write()
    with audit.path.open("r+b") as file:
        file.truncate(32 * 1024 * 1024)  # one line of zeros behind the first
        file.seek(0, 2)
        file.write(b"\n")
    tracemalloc.start()
    try:
        lines = list(reading.lines.read())
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [(len(line.data), line.overlong) for line in lines[1:]] == [(MAX_LINE_BYTES, True)]
    assert peak < 1024 * 1024


def test_where_no_audit_is_that_is_said(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"there is no audit in {place}"):
            AuditLines(place / "audit.jsonl")
