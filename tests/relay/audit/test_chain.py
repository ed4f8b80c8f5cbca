"""What a line's hash is, where a chain ends, and in which order its files come."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.audit.chain import (
    GENESIS,
    MAX_LINE_BYTES,
    LineBuffer,
    end_of_chain,
    line_hash,
    named,
    number_before,
    numbered,
    opening,
)

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
