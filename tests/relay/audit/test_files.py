"""The files of an audit: the chain of its lines, and how they are read."""

import hashlib
import json
import os
import tracemalloc
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.audit.files import (
    GENESIS,
    MAX_LINE_BYTES,
    AuditLines,
    LineBuffer,
    end_of_chain,
    line_hash,
    named,
    number_before,
    numbered,
    opening,
)
from schemas.files import UntrustedFileError
from tests.fakes.audits import WrittenAudit

HASH = "ab" * 32


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def linked(prev: str, text: bytes = b"") -> bytes:
    return opening(prev) + b',"text":"%b"}' % text


# --- one line -----------------------------------------------------------------------------------------


def test_the_hash_of_a_line_is_that_of_its_bytes() -> None:
    line = linked(HASH)
    assert line_hash(HASH, line) == sha256(line)


def test_a_piece_that_names_no_line_stands_for_what_came_before_all_the_same() -> None:
    assert line_hash(HASH, b'{"prev":"ab') == sha256(HASH.encode() + b'{"prev":"ab')
    assert line_hash(HASH, b"") == sha256(HASH.encode())


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{}",
        b'{"prev":"' + b"g" * 64 + b'"',
        b'{"prev":"' + b"a" * 63 + b'"',
        b'{"prev": "' + b"a" * 64 + b'"',
        b'{"ts_ms":1,"prev":"' + b"a" * 64 + b'"',
    ],
)
def test_what_is_not_of_the_form_names_no_line(line: bytes) -> None:
    assert named(line) is None
    assert named(opening(HASH)) == HASH


# --- cutting ------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab\n", max_size=20).map(str.encode)))
def test_however_it_is_cut_into_chunks_the_lines_are_the_same(chunks: list[bytes]) -> None:
    buffer = LineBuffer()
    lines = [line for chunk in chunks for line, _ in buffer.feed(chunk)]
    assert [*lines, buffer.unfinished] == b"".join(chunks).split(b"\n")


@pytest.mark.parametrize(("length", "overlong"), [(MAX_LINE_BYTES, False), (MAX_LINE_BYTES + 1, True)])
@pytest.mark.parametrize("chunk", [1000, MAX_LINE_BYTES, 10 * MAX_LINE_BYTES])
def test_of_a_line_no_more_is_kept_than_the_limit(length: int, overlong: bool, chunk: int) -> None:  # noqa: FBT001 - the table's column
    data = b"x" * length + b"\nnext\n"
    buffer = LineBuffer()
    parts = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    found = [ended for part in parts for ended in buffer.feed(part)]
    assert found == [(b"x" * MAX_LINE_BYTES, overlong), (b"next", False)]


# --- where a chain ends -------------------------------------------------------------------------------

LINES = st.lists(st.sampled_from([linked(HASH, b"one"), linked(GENESIS, b"two"), b"{}", b"", b"x" * 70_000]))


def fold(lines: list[bytes], head: str = GENESIS) -> str:
    for line in lines:
        head = line_hash(head, line[:MAX_LINE_BYTES])
    return head


@given(older=LINES, newer=LINES, piece=st.sampled_from([b"", b'{"prev":"0', linked(HASH)[:-1]]))
def test_the_end_is_found_from_behind_as_a_walk_from_the_front_finds_it(
    tmp_path_factory: pytest.TempPathFactory, older: list[bytes], newer: list[bytes], piece: bytes
) -> None:
    directory = tmp_path_factory.mktemp("chain")
    files = [directory / "older", directory / "newer"]
    for file, lines in zip(files, (older, newer), strict=True):
        file.write_bytes(b"".join(line + b"\n" for line in lines) + (piece if file.name == "newer" else b""))
    end = end_of_chain(files)
    assert (end.head, end.unfinished) == (fold([*older, *newer]), piece)
    assert end.linked == any(map(named, newer))
    assert end.prev == (fold([piece], end.head) if piece else end.head)


def test_without_files_the_end_is_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert end_of_chain([]).prev == end_of_chain([tmp_path / "empty"]).prev == GENESIS


def test_what_a_full_disk_cut_short_at_the_end_of_an_older_file_counts_as_its_last_line(
    tmp_path: Path,
) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    older.write_bytes(linked(GENESIS) + b'\n{"prev":"12')
    newer.touch()
    assert end_of_chain([older, newer]).prev == fold([linked(GENESIS), b'{"prev":"12'])


def test_what_the_last_blocks_begin_with_in_the_midst_of_a_line_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    first = b"xx" + linked(HASH)
    last = b"y" * (2 * MAX_LINE_BYTES - len(linked(HASH)) - 2)
    path.write_bytes(first + b"\n" + last + b"\n")
    assert end_of_chain([path]).head == fold([first, last])


def bytes_read() -> int:
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"])


def test_of_a_large_file_only_the_end_is_read(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with path.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
        file.seek(0, 2)
        file.write(b"\n" + linked(HASH) + b"\n")
    before = bytes_read()
    assert end_of_chain([path]).head == sha256(linked(HASH))
    assert bytes_read() - before < 4 * MAX_LINE_BYTES


# --- files --------------------------------------------------------------------------------------------


def test_full_files_come_by_their_numbers_and_nothing_else_does(tmp_path: Path) -> None:
    names = ["audit-000010.jsonl", "audit-000009.jsonl", "audit-1000000.jsonl"]
    others = ["audit.jsonl", "audit-1.jsonl", "audit-000001.jsonl.gz", "audit.jsonl.1", "xaudit-000001.jsonl"]
    for name in names + others:
        (tmp_path / name).touch()
    found = numbered(tmp_path / "audit.jsonl")
    assert [(number, path.name) for number, path in found] == [
        (9, "audit-000009.jsonl"),
        (10, "audit-000010.jsonl"),
        (1_000_000, "audit-1000000.jsonl"),
    ]


def test_where_there_is_no_directory_there_are_no_files(tmp_path: Path) -> None:
    assert numbered(tmp_path / "nowhere" / "audit.jsonl") == []


@pytest.mark.parametrize(
    ("first", "number"),
    [
        (opening(HASH) + b',"after":"audit-000007.jsonl","ts_ms":1}', 7),
        (opening(HASH) + b',"after":null,"ts_ms":1}', 0),
        (opening(HASH) + b',"ts_ms":1,"tool":"audit-000007.jsonl"}', 0),
        (b"", 0),
    ],
)
def test_a_file_says_after_which_one_it_was_begun(tmp_path: Path, first: bytes, number: int) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_bytes(first + b"\n")
    assert number_before(path) == number


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


@pytest.mark.parametrize("name", ["audit.jsonl", "audit-000001.jsonl"])
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UntrustedFileError, match=f"{name} is no regular file"):
        AuditLines(tmp_path / "audit.jsonl")
