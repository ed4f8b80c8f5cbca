"""The verification of an audit, the search in it, and the head that is kept of the last one."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relay.audit.files import AuditLines
from relay.audit.retention import (
    REMOVED_EVENT,
    BrokenSuccessionError,
    Removal,
    disk_full_ms,
    next_removal,
)
from relay.audit.verify import (
    ChainReport,
    VerifiedHead,
    VerifiedHeadError,
    as_text,
    keep_verified_head,
    matching,
    parsed,
    read_verified_head,
    verify,
)
from relay.settings.config import KEEP_ALL, AuditKeep
from schemas.files import UntrustedFileError
from tests.fakes.audits import WrittenAudit
from tests.fakes.signer import NOW_MS

GENESIS = "0" * 64
Lines = list[bytes]


@pytest.fixture
def audit(tmp_path: Path) -> Iterator[WrittenAudit]:
    """Three files of four lines."""
    audit = WrittenAudit(tmp_path)
    for _ in range(3):
        audit.rotate()
        audit.write(4)
    yield audit
    audit.close()


def where(report: ChainReport) -> tuple[str, int] | None:
    return (report.broken.file, report.broken.line) if report.broken else None


def test_what_a_relay_wrote_is_intact(audit: WrittenAudit) -> None:
    head = audit.write()
    report = verify(audit.path)
    assert report.intact
    assert report.files == ["audit-000001.jsonl", "audit-000002.jsonl", "audit.jsonl"]
    assert (report.lines, report.head, report.after) == (13, head, None)
    assert (report.first_ms, report.last_ms) == (NOW_MS + 1000, NOW_MS + 3000)
    assert (report.breaks, report.torn, report.backwards, report.unfinished) == (0, 0, 0, False)


def test_an_audit_without_a_line_is_intact(tmp_path: Path) -> None:
    (tmp_path / "audit.jsonl").touch()
    report = verify(tmp_path / "audit.jsonl")
    assert (report.intact, report.lines, report.head, report.first_ms) == (True, 0, GENESIS, None)


# --- what an intruder does ----------------------------------------------------------------------------


def swap(lines: Lines) -> None:
    lines[1], lines[2] = lines[2], lines[1]


def forge(lines: Lines) -> None:
    """Put in a line that names its predecessor as it should."""
    prev = hashlib.sha256(lines[1]).hexdigest()
    lines.insert(2, json.dumps({"prev": prev, "ts_ms": NOW_MS}, separators=(",", ":")).encode())


def replace(lines: Lines, number: int, old: bytes, new: bytes) -> None:
    assert old in lines[number]
    lines[number] = lines[number].replace(old, new)


@pytest.mark.parametrize(
    ("change", "file", "found"),
    [
        pytest.param(lambda lines: replace(lines, 1, b":6}", b":7}"), 1, 3, id="a value changed"),
        pytest.param(lambda lines: replace(lines, 1, b"}", b" }"), 1, 3, id="a space added"),
        pytest.param(
            lambda lines: replace(lines, 3, b":8}", b":9}"), 1, (2, 1), id="the last of a file changed"
        ),
        pytest.param(lambda lines: replace(lines, 0, b":5}", b":6}"), 1, 2, id="the first of a file changed"),
        pytest.param(lambda lines: lines.pop(1), 1, 2, id="one taken out"),
        pytest.param(lambda lines: lines.pop(0), 1, 1, id="the first of a file taken out"),
        pytest.param(lambda lines: lines.pop(), 1, (2, 1), id="the last of a file taken out"),
        pytest.param(swap, 1, 2, id="two swapped"),
        pytest.param(lambda lines: lines.insert(1, lines[1]), 1, 3, id="one repeated"),
        pytest.param(forge, 1, 4, id="one put in that names its predecessor"),
        pytest.param(lambda lines: lines.insert(1, b"{}"), 1, 2, id="one put in that names nothing"),
        pytest.param(lambda lines: lines.insert(1, b""), 1, 2, id="an empty one put in"),
        pytest.param(lambda lines: lines.insert(1, b"\0" * 40), 1, 2, id="zeros put in"),
        pytest.param(lambda lines: lines.insert(1, b"x" * 70_000), 1, 2, id="an endless one put in"),
        pytest.param(lambda lines: lines.append(b"{}"), -1, 5, id="one added at the end that names nothing"),
        pytest.param(lambda lines: replace(lines, 1, b"}", b""), 1, 3, id="one made to look torn"),
        pytest.param(
            lambda lines: replace(lines, 1, lines[1], b'{"prev":"'), 1, 3, id="one cut down to nothing"
        ),
        pytest.param(lambda lines: replace(lines, 1, b'{"prev"', b'{"Prev"'), 1, 2, id="a link renamed"),
        pytest.param(lambda lines: lines.pop(0), 0, 1, id="the first of all taken out"),
        pytest.param(lambda lines: lines.__delitem__(slice(3)), 0, 1, id="the head cut off"),
        pytest.param(lambda lines: lines.clear(), 1, (2, 1), id="a file emptied"),
    ],
)
def test_the_first_line_that_does_not_belong_is_named(
    audit: WrittenAudit, change: Callable[[Lines], None], file: int, found: int | tuple[int, int]
) -> None:
    audit.change(change, file)
    at_file, at_line = found if isinstance(found, tuple) else (file, found)
    report = verify(audit.path)
    assert not report.intact
    assert where(report) == (audit.files[at_file].name, at_line)


def test_a_line_that_no_relay_would_write_is_not_taken_for_one_cut_short(audit: WrittenAudit) -> None:
    start = b'{"prev":"%b","tool":"' % verify(audit.path).head.encode()
    audit.change(lambda lines: lines.append(start + b"x" * 70_000 + b'"}'))
    report = verify(audit.path)
    assert (where(report), report.torn) == (("audit.jsonl", 5), 0)


def test_a_file_missing_between_others_is_a_break_and_says_which(audit: WrittenAudit) -> None:
    audit.files[1].unlink()
    report = verify(audit.path)
    assert where(report) == ("audit.jsonl", 1)
    assert report.broken is not None
    assert "audit-000002.jsonl" in report.broken.text


def test_files_that_changed_places_are_a_break(audit: WrittenAudit, tmp_path: Path) -> None:
    first, second, _ = audit.files
    first.rename(tmp_path / "aside")
    second.rename(first)
    (tmp_path / "aside").rename(second)
    assert where(verify(audit.path)) == ("audit-000002.jsonl", 1)


def test_each_break_is_counted_and_the_walk_goes_on(audit: WrittenAudit) -> None:
    audit.change(lambda lines: replace(lines, 1, b":2}", b":7}"), 0)
    audit.change(lambda lines: lines.pop(1), 1)
    report = verify(audit.path)
    assert (report.breaks, report.lines) == (2, 11)
    assert where(report) == ("audit-000001.jsonl", 3)


# --- what the chain alone does not show ---------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_lines_cut_off_at_the_end_show_by_a_hash_that_was_noted_and_by_nothing_else(
    audit: WrittenAudit, kept: int
) -> None:
    noted = verify(audit.path).head
    audit.change(lambda lines: lines.__delitem__(slice(kept, None)))
    assert verify(audit.path).intact
    report = verify(audit.path, noted)
    assert (report.intact, report.expected, report.broken) == (False, False, None)


def test_a_whole_audit_put_in_the_place_of_another_shows_by_a_hash_that_was_noted(
    audit: WrittenAudit, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    other = WrittenAudit(tmp_path / "other")
    other.clock.advance(1)
    other.write(4)
    other.close()
    assert verify(other.path).intact
    assert not verify(other.path, verify(audit.path).head).intact


def test_a_hash_that_was_noted_at_any_time_still_stands(audit: WrittenAudit) -> None:
    heads = [audit.write() for _ in range(3)]
    audit.rotate()
    heads.append(audit.write())
    assert all(verify(audit.path, head).expected for head in [GENESIS, *heads])
    assert verify(audit.path).expected is None


def test_a_hash_that_was_noted_holds_no_longer_when_its_line_was_changed(audit: WrittenAudit) -> None:
    noted = audit.write()
    audit.change(lambda lines: replace(lines, -1, b":13}", b":14}"))
    assert verify(audit.path).intact
    assert not verify(audit.path, noted).intact


# --- files that the relay has removed -----------------------------------------------------------------


def remove_oldest(audit: WrittenAudit) -> Removal:
    """Remove the oldest file as the relay does."""
    removal = next_removal(audit.path, AuditKeep(max_age_ms=1), audit.clock() + 10**9)
    assert removal is not None
    audit.write_facts(
        event=REMOVED_EVENT, file=removal.file.name, head=removal.head, until_ms=removal.until_ms
    )
    removal.file.unlink()
    return removal


def test_what_is_left_continues_from_the_head_of_what_was_removed(audit: WrittenAudit) -> None:
    first, second = remove_oldest(audit), remove_oldest(audit)
    report = verify(audit.path)
    assert (report.intact, report.after) == (True, second.file.name)
    assert [each.head for each in report.removed] == [first.head, second.head]


def test_another_beginning_than_that_of_the_removed_head_is_a_break(audit: WrittenAudit) -> None:
    remove_oldest(audit)
    other = b"1" * 64
    # All that is left is written anew after another first line, which the chain alone does not show.
    lines = [line for file in audit.files for line in file.read_bytes().splitlines()]
    prev, rewritten = other, list[bytes]()
    for line in lines:
        rewritten.append(line.replace(line[9:73], prev, 1))
        prev = hashlib.sha256(rewritten[-1]).hexdigest().encode()
    audit.files[0].write_bytes(b"".join(line + b"\n" for line in rewritten[:4]))
    audit.path.write_bytes(b"".join(line + b"\n" for line in rewritten[4:]))
    report = verify(audit.path)
    assert where(report) == (audit.files[0].name, 1)


def test_a_head_that_was_removed_with_its_file_is_said_to_be(audit: WrittenAudit) -> None:
    middle = hashlib.sha256(audit.files[0].read_bytes().splitlines()[1]).hexdigest()
    removal = remove_oldest(audit)
    assert verify(audit.path, removal.head).intact
    assert not verify(audit.path, middle).intact
    noted = verify(audit.path, middle, noted_ms=removal.until_ms)
    assert (noted.intact, noted.expected_removed_ms) == (True, audit.clock())
    assert not verify(audit.path, middle, noted_ms=removal.until_ms + 1).intact
    kept = verify(audit.path, last=VerifiedHead(middle, removal.until_ms))
    assert (kept.intact, kept.last_removed_ms) == (True, audit.clock())
    assert not verify(audit.path, last=VerifiedHead(middle, removal.until_ms + 1)).intact


def test_a_file_whose_successor_does_not_continue_it_is_kept(audit: WrittenAudit) -> None:
    audit.change(lambda lines: lines.pop(0), 1)
    with pytest.raises(BrokenSuccessionError, match=r"does not continue audit-000001\.jsonl"):
        next_removal(audit.path, AuditKeep(max_bytes=1), audit.clock())


@pytest.mark.parametrize("number", [0, 1], ids=["oldest", "successor"])
def test_a_pipe_in_the_place_of_a_full_file_is_not_waited_for(audit: WrittenAudit, number: int) -> None:
    file = audit.files[number]
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(OSError, match="is no regular file"):
        next_removal(audit.path, AuditKeep(max_age_ms=1), audit.clock() + 10**9)


def test_a_file_is_removed_by_its_newest_line_or_by_the_size_of_all(audit: WrittenAudit) -> None:
    (oldest, *_), now_ms = audit.files, audit.clock()
    size, until_ms = sum(file.stat().st_size for file in audit.files), NOW_MS + 1000

    def removed(keep: AuditKeep, now_ms: int = now_ms) -> list[Path]:
        removal = next_removal(audit.path, keep, now_ms)
        return [] if removal is None else [removal.file]

    assert removed(KEEP_ALL) == removed(AuditKeep(max_bytes=size)) == []
    assert removed(AuditKeep(max_bytes=size - 1)) == [oldest]
    assert removed(AuditKeep(max_age_ms=5000), until_ms + 5000) == []
    assert removed(AuditKeep(max_age_ms=5000), until_ms + 5001) == [oldest]
    remove_oldest(audit)
    assert removed(AuditKeep(max_bytes=1)) == []  # nor is the last full one removed for its size
    remove_oldest(audit)
    assert removed(AuditKeep(1, 1), now_ms + 10**9) == []  # the file that is written to stays


def test_the_disk_is_full_at_the_rate_of_the_last_week(audit: WrittenAudit) -> None:
    hour_ms, free = 3_600_000, os.statvfs(audit.path.parent)
    size = sum(file.stat().st_size for file in audit.files)
    assert disk_full_ms(audit.path, NOW_MS + hour_ms) is None
    now_ms = NOW_MS + 2 * hour_ms
    full_ms = disk_full_ms(audit.path, now_ms)
    assert full_ms is not None
    rate = size / (now_ms - NOW_MS - 1000)
    assert full_ms - now_ms == pytest.approx(free.f_bavail * free.f_frsize / rate, rel=0.2)
    assert disk_full_ms(audit.path, NOW_MS + 30 * 24 * hour_ms) is None  # nothing was written for weeks


# --- archived files -----------------------------------------------------------------------------------


def test_it_starts_with_the_oldest_file_that_is_there(audit: WrittenAudit) -> None:
    end_of_first = hashlib.sha256(audit.files[0].read_bytes().splitlines()[-1]).hexdigest()
    first_line = hashlib.sha256(audit.files[0].read_bytes().splitlines()[0]).hexdigest()
    audit.files[0].unlink()
    report = verify(audit.path)
    assert (report.intact, report.lines, report.after) == (True, 8, "audit-000001.jsonl")
    assert verify(audit.path, end_of_first).expected
    assert not verify(audit.path, first_line).expected
    assert not verify(audit.path, GENESIS).expected


def test_a_file_that_begins_in_its_midst_is_no_archive(audit: WrittenAudit) -> None:
    audit.files[0].unlink()
    audit.change(lambda lines: lines.pop(0), 0)
    report = verify(audit.path)
    assert where(report) == ("audit-000002.jsonl", 1)
    assert report.broken is not None
    assert "cut off" in report.broken.text


def test_what_goes_on_after_a_file_that_was_moved_away_is_intact(audit: WrittenAudit) -> None:
    audit.files[0].unlink()
    audit.files[0].unlink()
    audit.path.unlink()
    audit.rotate()
    audit.write(2)
    report = verify(audit.path)
    assert (report.intact, report.lines) == (True, 2)
    assert report.after == "a file that was moved away"


# --- pieces, clocks, and a relay at work --------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 9, 40, 73, 74, 90])
def test_a_piece_that_a_full_disk_left_is_a_warning_and_a_link(audit: WrittenAudit, size: int) -> None:
    before = verify(audit.path).head
    piece = (b'{"prev":"%b","ts_ms":1700000000000}' % before.encode())[:size]
    own = piece if size >= 74 else before.encode() + piece
    after = b'{"prev":"%b","ts_ms":1700000000000}' % hashlib.sha256(own).hexdigest().encode()
    audit.change(lambda lines: lines.extend([piece, after]))
    report = verify(audit.path)
    assert (report.intact, report.torn) == (True, 1)
    assert report.first_torn is not None
    assert report.first_torn.line == 5
    # And what stood before it cannot be changed behind its back.
    audit.change(lambda lines: replace(lines, 3, b":12}", b":13}"))
    assert not verify(audit.path).intact


def test_a_clock_that_was_set_back_is_noted(audit: WrittenAudit) -> None:
    audit.clock.advance(-100)
    audit.write(2)
    report = verify(audit.path)
    assert (report.intact, report.backwards) == (True, 1)
    assert report.first_backwards is not None
    assert (report.first_backwards.file, report.first_backwards.line) == ("audit.jsonl", 5)


def test_a_line_that_is_being_written_is_neither_counted_nor_a_break(audit: WrittenAudit) -> None:
    head = verify(audit.path).head
    with audit.path.open("ab") as file:
        file.write(b'{"prev":"')
    report = verify(audit.path)
    assert (report.intact, report.lines, report.head, report.unfinished) == (True, 12, head, True)


@pytest.mark.parametrize("emptied", [True, False], ids=["in its place", "behind its lines"])
def test_a_hole_longer_than_any_line_is_a_break_and_no_line_that_is_being_written(
    audit: WrittenAudit, *, emptied: bool
) -> None:
    if emptied:
        os.truncate(audit.path, 0)
    os.truncate(audit.path, audit.path.stat().st_size + 1_000_000)
    report = verify(audit.path)
    assert (report.intact, report.breaks, report.unfinished) == (False, 1, False)
    assert report.broken is not None
    assert "no relay wrote it" in report.broken.text


def test_rotations_during_the_walk_break_nothing(audit: WrittenAudit) -> None:
    told: list[int] = []

    def rotate_meanwhile(bytes_read: int) -> None:
        told.append(bytes_read)
        for _ in range(3):
            audit.rotate()
            audit.write()

    report = verify(audit.path, progress=rotate_meanwhile)
    assert told
    assert (report.intact, report.lines) == (True, 15)


# --- looking for lines --------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"[]", b"1", b"{", b"\xff", b"[" * 60_000, b'{"a":"\xff"}'])
def test_what_is_no_object_holds_no_facts(data: bytes) -> None:
    assert parsed(data) is None


@pytest.mark.parametrize(
    ("value", "text"), [("ok", "ok"), (None, "null"), (3, "3"), (1.5, "1.5"), (True, "true"), ("", "")]
)
def test_a_value_reads_as_a_person_types_it(value: Any, text: str) -> None:
    assert as_text(value) == text


@pytest.mark.parametrize(
    ("wanted", "since_ms", "found"),
    [
        ({}, None, list(range(1, 13))),
        ({"number": "5"}, None, [5]),
        ({"number": "05"}, None, []),
        ({"number": "5", "after": "x"}, None, []),
        ({"number": "5", "after": "audit-000001.jsonl"}, None, [5]),
        ({"absent": "null"}, None, []),
        ({}, NOW_MS + 3000, [9, 10, 11, 12]),
        ({}, NOW_MS + 3001, []),
        ({"number": "1"}, NOW_MS + 3000, []),
    ],
)
def test_lines_are_found_by_all_that_they_must_say(
    audit: WrittenAudit, wanted: dict[str, str], since_ms: int | None, found: list[int]
) -> None:
    audit.change(lambda lines: lines.insert(0, b"no line"), 1)
    lines = AuditLines(audit.path)
    assert [facts["number"] for _, facts in matching(lines.read(), wanted, since_ms)] == found
    lines.close()


HEAD = "a" * 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit-verified.json"


def test_what_was_kept_is_read_back(path: Path) -> None:
    assert read_verified_head(path) is None
    for head in (HEAD, "b" * 64):
        keep_verified_head(path, head, NOW_MS)
        assert read_verified_head(path) == VerifiedHead(head, NOW_MS)


def test_of_an_audit_without_a_line_nothing_is_kept(path: Path) -> None:
    keep_verified_head(path, GENESIS, NOW_MS)
    assert not path.exists()


DAMAGED = {
    "nothing": b"",
    "no members": b"{}",
    "an array": b"[]",
    "null": b"null",
    "cut": b"{",
    "no text": b"\xff",
    "no time": b'{"head":"a"}',
    "a time without end": b'{"head":"a","verified_at_ms":Infinity}',
    "deep": b"[" * 1000,
    "long": b" " * 2000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_a_damaged_file_is_an_error_and_never_one_that_says_nothing(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises((VerifiedHeadError, OSError), match=path.name):
        read_verified_head(path)


def test_a_link_is_not_followed(path: Path) -> None:
    keep_verified_head(path.with_name("other"), HEAD, NOW_MS)
    path.symlink_to("other")
    with pytest.raises(UntrustedFileError, match="symbolic link"):
        read_verified_head(path)
