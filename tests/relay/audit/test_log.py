import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.audit.log import AuditInUseError, AuditLog, AuditUnavailableError
from tests.fakes.audits import LineLog
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.signer import NOW_MS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audit(path: Path) -> LineLog:
    return LineLog(path, FakeClock(NOW_MS))


def test_each_line_holds_the_time_and_the_facts(audit: LineLog, path: Path) -> None:
    audit.write(decision="allow", code="ok")
    audit.write(decision="deny", code="E_SAFETY_DENIED", tenant=None)
    first, second = map(json.loads, path.read_text("ascii").splitlines())
    assert first.items() >= {"ts_ms": NOW_MS, "decision": "allow", "code": "ok"}.items()
    assert second.items() >= {"ts_ms": NOW_MS, "decision": "deny", "tenant": None}.items()


def test_a_line_that_can_wait_is_not_written_into_the_space_for_calls(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    audit = LineLog(path, FakeClock(NOW_MS), reserved_bytes=2**80)
    with pytest.raises(AuditUnavailableError, match="MiB left, which is kept for calls"):
        audit.check_space()
    assert audit.available
    audit.write(decision="allow")
    audit.close()
    roomy = AuditLog(path, FakeClock(NOW_MS), reserved_bytes=0)
    roomy.check_space()
    monkeypatch.setattr("os.fstatvfs", fail)
    with pytest.raises(AuditUnavailableError, match="Input/output"):
        roomy.check_space()


def test_it_is_available_while_a_line_is_written(audit: LineLog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread asks for the health meanwhile: a write that succeeds must not look like a full disk."""
    found, write = list[bool](), os.write

    def written(descriptor: int, data: bytes) -> int:
        found.append(audit.available)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", written)
    audit.write(decision="allow")
    assert found == [True]


@pytest.mark.parametrize("text", ["\n{}\n", "\u202e", "\x1b[2J", '"'])
def test_no_text_can_make_a_line_of_its_own_or_reach_a_terminal(
    audit: LineLog, path: Path, text: str
) -> None:
    audit.write(tool=text)
    data = path.read_bytes()
    assert data.count(b"\n") == 1
    assert all(0x20 <= byte < 0x7F for byte in data[:-1])
    assert json.loads(data)["tool"] == text


@pytest.mark.parametrize("before", [0o600, 0o644])
def test_the_file_is_for_its_owner_alone(path: Path, before: int) -> None:
    path.touch()
    path.chmod(before)
    AuditLog(path, FakeClock(NOW_MS)).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_link_in_place_of_the_log_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        AuditLog(path, FakeClock(NOW_MS))
    assert target.read_text() == "untouched"


def test_a_full_disk_is_told_and_over_when_there_is_room_again(audit: LineLog, path: Path) -> None:
    audit.write(number=1)
    with full_disk(path.stat().st_size), pytest.raises(AuditUnavailableError):
        audit.write(number=2)
    availability = [audit.available]
    audit.write(number=3)
    availability.append(audit.available)
    assert availability == [False, True]
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_line_that_an_earlier_process_left_torn_spoils_no_other(path: Path) -> None:
    path.write_text('{"ts_ms":17')
    LineLog(path, FakeClock(NOW_MS)).write(number=2)
    torn, whole = path.read_text().splitlines()
    assert torn == '{"ts_ms":17'
    assert json.loads(whole)["number"] == 2


# --- the chain ----------------------------------------------------------------------------------------

GENESIS = "0" * 64
SECOND_MS = 1000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(path: Path) -> list[Path]:
    """Every file, oldest first; spelled out, so that no code under test says what the order is."""
    return [*sorted(path.parent.glob("audit-*.jsonl")), path]


def facts(*paths: Path) -> list[dict[str, Any]]:
    """The lines of ``paths``, once each has named the one before: the first of all names zeros."""
    prev, found = GENESIS, []
    for line in b"".join(path.read_bytes() for path in paths).splitlines():
        found.append(json.loads(line))
        assert found[-1]["prev"] == prev
        prev = sha256(line)
    return found


def numbers(*paths: Path) -> list[int]:
    return [line["number"] for line in facts(*paths)]


def test_each_line_names_the_hash_of_the_line_before(audit: LineLog, path: Path) -> None:
    heads = [audit.head]
    for number in range(5):
        audit.write(number=number)
        heads.append(audit.head)
    lines = facts(path)
    assert [line["prev"] for line in lines] == heads[:-1]
    assert heads[-1] == sha256(path.read_bytes().splitlines()[-1])
    assert list(lines[0])[:2] == ["prev", "ts_ms"]


def test_a_restart_goes_on_with_the_same_chain(path: Path) -> None:
    for number in range(3):
        audit = LineLog(path, FakeClock(NOW_MS))
        audit.write(number=number)
        audit.close()
    assert numbers(path) == [0, 1, 2]
    assert "after" not in facts(path)[-1]


@pytest.mark.parametrize("size", [1, 10, 73, 74, 75, 90])
@pytest.mark.parametrize("restart", [False, True])
def test_what_a_full_disk_cut_short_is_a_link_as_it_stands(path: Path, size: int, *, restart: bool) -> None:
    audit = LineLog(path, FakeClock(NOW_MS))
    audit.write(number=1)
    with (
        full_disk(path.stat().st_size + size),
        pytest.raises(AuditUnavailableError),
    ):
        audit.write(number=2)
    assert not audit.available
    assert audit.head == sha256(path.read_bytes().splitlines()[0])
    if restart:
        audit.close()
        audit = LineLog(path, FakeClock(NOW_MS))
    audit.write(number=3)
    whole, piece, after = path.read_bytes().splitlines()
    assert len(piece) == size
    assert json.loads(after)["number"] == 3
    names_a_line = size >= len('{"prev":""') + 64
    expected = sha256(piece) if names_a_line else sha256(sha256(whole).encode() + piece)
    assert json.loads(after)["prev"] == expected


def test_a_line_that_lacks_only_its_end_is_written(path: Path) -> None:
    audit = LineLog(path, FakeClock(NOW_MS))
    audit.write(number=1)
    with full_disk(2 * path.stat().st_size - 1):
        audit.write(number=2)
    assert audit.head == sha256(path.read_bytes().splitlines()[-1])
    audit.write(number=3)
    assert numbers(path) == [1, 2, 3]


@pytest.mark.parametrize("room", [0, 1, 5])
def test_a_disk_that_stays_full_leaves_pieces_that_are_all_links(path: Path, room: int) -> None:
    audit = LineLog(path, FakeClock(NOW_MS))
    with full_disk(10), pytest.raises(AuditUnavailableError):
        audit.write(number=1)
    with full_disk(10 + room), pytest.raises(AuditUnavailableError):
        audit.write(number=2)
    head = audit.head
    audit.write(number=3)
    *pieces, last = path.read_bytes().splitlines()
    assert head == (sha256(GENESIS.encode() + pieces[0]) if room else GENESIS)
    prev = GENESIS
    for piece in pieces:
        prev = sha256(prev.encode() + piece)
    assert len(pieces) == (2 if room > 1 else 1)
    assert json.loads(last)["prev"] == prev


# --- rotation -----------------------------------------------------------------------------------------


class Rotating:
    """An audit whose every look finds its file full, and that looks before every line."""

    def __init__(self, path: Path, max_bytes: int = 1) -> None:
        self.path = path
        self.clock = FakeClock(NOW_MS)
        self.audit = LineLog(path, self.clock, max_bytes)
        self.count = 0

    def write(self) -> None:
        self.clock.advance(SECOND_MS)
        self.count += 1
        self.audit.write(number=self.count)

    def restart(self) -> None:
        self.audit.close()
        self.audit = LineLog(self.path, self.clock, 1)

    @property
    def names(self) -> list[str]:
        return [file.name for file in files(self.path)]

    def holds(self) -> bool:
        """Whether every line is there, in order, in one chain through all files."""
        return numbers(*files(self.path)) == list(range(1, self.count + 1))


@pytest.fixture
def rotating(path: Path) -> Rotating:
    return Rotating(path)


def test_a_full_file_is_put_aside_and_the_next_goes_on_where_it_ended(rotating: Rotating) -> None:
    for _ in range(12):
        rotating.write()
    assert rotating.names == [*(f"audit-{number:06}.jsonl" for number in range(1, 12)), "audit.jsonl"]
    assert rotating.holds()
    assert {stat.S_IMODE(file.stat().st_mode) for file in files(rotating.path)} == {0o600}


def test_the_first_line_of_a_file_says_which_one_it_continues(rotating: Rotating) -> None:
    for _ in range(3):
        rotating.write()
    after = [facts_of_file.get("after") for facts_of_file in facts(*files(rotating.path))]
    assert after == [None, "audit-000001.jsonl", "audit-000002.jsonl"]


def test_a_file_is_looked_after_once_a_second_and_whichever_way_the_clock_goes(path: Path) -> None:
    rotating = Rotating(path)
    rotating.write()
    rotating.clock.advance(SECOND_MS - 1)
    rotating.audit.write(number=2)
    assert rotating.names == ["audit.jsonl"]
    rotating.clock.advance(-10 * SECOND_MS)
    rotating.audit.write(number=3)
    rotating.count = 3
    assert rotating.names == ["audit-000001.jsonl", "audit.jsonl"]
    assert rotating.holds()


def test_a_file_that_is_not_full_stays(path: Path) -> None:
    rotating = Rotating(path, max_bytes=10_000)
    for _ in range(5):
        rotating.write()
    assert rotating.names == ["audit.jsonl"]


def test_a_rename_that_fails_stops_nothing_and_is_tried_again(
    rotating: Rotating, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path, __: Path) -> Path:
        raise PermissionError

    rotating.write()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refuse)
        rotating.write()
    assert rotating.names == ["audit.jsonl"]
    rotating.write()
    assert rotating.names == ["audit-000001.jsonl", "audit.jsonl"]
    assert rotating.holds()


@pytest.mark.parametrize("left", [None, b"", b'{"prev":"', b'{"prev":"' + b"0" * 64 + b'","aft'])
def test_a_crash_between_the_old_file_and_the_new_breaks_nothing(
    rotating: Rotating, left: bytes | None
) -> None:
    rotating.write()
    rotating.write()
    rotating.path.rename(rotating.path.with_name("audit-000002.jsonl"))
    if left is not None:
        rotating.path.write_bytes(left)
    rotating.restart()
    before = rotating.audit.head
    rotating.audit.write(number=3)
    rotating.count = 3
    *pieces, line = rotating.path.read_bytes().splitlines()
    for piece in pieces:
        before = sha256(piece) if len(piece) > 74 else sha256(before.encode() + piece)
    assert json.loads(line).items() >= {"prev": before, "after": "audit-000002.jsonl"}.items()


def test_numbers_go_on_when_full_files_were_archived(rotating: Rotating, tmp_path: Path) -> None:
    for _ in range(3):
        rotating.write()
    for file in files(rotating.path)[:-1]:
        file.rename(tmp_path / f"archived-{file.name}")
    rotating.restart()
    rotating.write()
    assert rotating.names == ["audit-000003.jsonl", "audit.jsonl"]


def test_a_disk_that_is_full_at_rotation_makes_the_audit_unavailable_and_breaks_nothing(
    rotating: Rotating,
) -> None:
    rotating.write()
    with full_disk(), pytest.raises(AuditUnavailableError):
        rotating.write()
    availability = [rotating.audit.available]
    rotating.count = 1
    rotating.write()
    assert [*availability, rotating.audit.available] == [False, True]
    assert rotating.names == ["audit-000001.jsonl", "audit.jsonl"]
    assert rotating.holds()


def test_a_piece_at_the_end_of_a_full_file_is_a_link_to_the_next(rotating: Rotating) -> None:
    rotating.audit.write(number=1)
    with full_disk(rotating.path.stat().st_size + 5), pytest.raises(AuditUnavailableError):
        rotating.audit.write(number=2)
    with full_disk(), pytest.raises(AuditUnavailableError):
        rotating.write()
    head = rotating.audit.head
    rotating.write()
    whole, piece = rotating.path.with_name("audit-000001.jsonl").read_bytes().split(b"\n")
    (line,) = rotating.path.read_bytes().splitlines()
    assert json.loads(line)["prev"] == head == sha256(sha256(whole).encode() + piece)


# --- moved away ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("create", [False, True])
def test_a_file_that_was_moved_away_is_noticed_and_continued_in_a_new_one(
    path: Path, *, create: bool
) -> None:
    rotating = Rotating(path, max_bytes=10_000)
    rotating.write()
    moved = path.rename(path.with_name("audit.jsonl.1"))
    if create:
        path.touch(mode=0o644)
    rotating.audit.write(number=2)  # in the same second
    rotating.count = 2
    rotating.write()
    assert numbers(moved, path) == [1, 2, 3]
    assert facts(moved, path)[-1]["after"] is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_another_file_in_its_place_is_continued_without_harm_to_the_next_line(path: Path) -> None:
    rotating = Rotating(path, max_bytes=10_000)
    rotating.write()
    head = rotating.audit.head
    path.rename(path.with_name("audit.jsonl.1"))
    path.write_bytes(b'{"prev":"01')
    rotating.write()
    piece, line = path.read_bytes().splitlines()
    assert piece == b'{"prev":"01'
    assert json.loads(line)["prev"] == head


def test_while_no_new_file_can_be_made_the_moved_one_goes_on(path: Path, tmp_path: Path) -> None:
    rotating = Rotating(path, max_bytes=10_000)
    rotating.write()
    moved = path.rename(path.with_name("audit.jsonl.1"))
    path.symlink_to(tmp_path / "elsewhere")
    rotating.write()
    assert numbers(moved) == [1, 2]
    path.unlink()
    rotating.write()
    assert numbers(moved, path) == [1, 2, 3]
    assert not (tmp_path / "elsewhere").exists()


def test_lines_that_would_go_into_a_deleted_file_are_not_written(path: Path, tmp_path: Path) -> None:
    rotating = Rotating(path, max_bytes=10_000)
    rotating.write()
    path.unlink()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AuditUnavailableError, match="deleted"):
        rotating.write()
    with pytest.raises(AuditUnavailableError, match="deleted"):
        rotating.audit.write(number=3)  # in the same second
    assert not rotating.audit.takes_more(rotating.clock())
    availability = [rotating.audit.available]
    path.unlink()
    rotating.write()
    assert [*availability, rotating.audit.available] == [False, True]
    assert json.loads(path.read_bytes())["after"] is None


# --- one writer ---------------------------------------------------------------------------------------

HOLD = "import sys; from pathlib import Path; from relay.audit.log import AuditLog\n"
HOLD += "audit = AuditLog(Path(sys.argv[1]), lambda: 1); print('held', flush=True); sys.stdin.read()"


def test_two_relays_never_write_one_chain(rotating: Rotating) -> None:
    for _ in range(2):  # and not after a rotation either
        rotating.write()
        with pytest.raises(AuditInUseError, match=r"another relay uses .*: stop it first"):
            AuditLog(rotating.path, rotating.clock)
    rotating.restart()
    rotating.write()
    assert rotating.holds()


@pytest.mark.integration
def test_a_relay_that_was_killed_holds_nothing(path: Path) -> None:
    command = [sys.executable, "-P", "-c", HOLD, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(AuditInUseError, match="another relay"):
            AuditLog(path, FakeClock(NOW_MS))
        holder.kill()
    AuditLog(path, FakeClock(NOW_MS)).close()


def test_a_start_that_fails_holds_nothing(path: Path, tmp_path: Path) -> None:
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        AuditLog(path, FakeClock(NOW_MS))
    path.unlink()
    AuditLog(path, FakeClock(NOW_MS)).close()


def test_the_lock_is_no_way_out_of_the_directory(path: Path, tmp_path: Path) -> None:
    path.with_name("audit.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        AuditLog(path, FakeClock(NOW_MS))
    assert not (tmp_path / "elsewhere").exists()
