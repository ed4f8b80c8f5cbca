import json
import stat
from pathlib import Path

import pytest

from relay.audit import AuditLog, AuditUnavailableError
from tests.fakes.clock import FakeClock
from tests.fakes.disk import full_disk
from tests.fakes.signer import NOW_MS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def audit(path: Path) -> AuditLog:
    return AuditLog(path, FakeClock(NOW_MS))


def test_each_line_holds_the_time_and_the_facts(audit: AuditLog, path: Path) -> None:
    audit.write(decision="allow", code="ok")
    audit.write(decision="deny", code="E_SAFETY_DENIED", tenant=None)
    first, second = map(json.loads, path.read_text("ascii").splitlines())
    assert first.items() >= {"ts_ms": NOW_MS, "decision": "allow", "code": "ok"}.items()
    assert second.items() >= {"ts_ms": NOW_MS, "decision": "deny", "tenant": None}.items()


def test_a_line_is_in_the_file_when_write_returns(audit: AuditLog, path: Path) -> None:
    audit.write(number=1)
    assert path.read_bytes().endswith(b"}\n")
    assert audit.available


@pytest.mark.parametrize("text", ["\n{}\n", "\u202e", "\x1b[2J", '"'])
def test_no_text_can_make_a_line_of_its_own_or_reach_a_terminal(
    audit: AuditLog, path: Path, text: str
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


def test_a_link_that_somebody_put_there_is_not_followed(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "elsewhere"
    target.write_text("untouched")
    path.symlink_to(target)
    with pytest.raises(OSError, match="symbolic link"):
        AuditLog(path, FakeClock(NOW_MS))
    assert target.read_text() == "untouched"


def test_what_was_there_is_kept(audit: AuditLog, path: Path) -> None:
    audit.write(number=1)
    audit.close()
    AuditLog(path, FakeClock(NOW_MS)).write(number=2)
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_full_disk_is_told_and_over_when_there_is_room_again(audit: AuditLog, path: Path) -> None:
    audit.write(number=1)
    with full_disk(path.stat().st_size), pytest.raises(AuditUnavailableError):
        audit.write(number=2)
    availability = [audit.available]
    audit.write(number=3)
    availability.append(audit.available)
    assert availability == [False, True]
    assert [json.loads(line)["number"] for line in path.read_text().splitlines()] == [1, 3]


def test_a_line_that_was_cut_short_counts_as_not_written_and_spoils_no_other(
    audit: AuditLog, path: Path
) -> None:
    with full_disk(10), pytest.raises(AuditUnavailableError, match="part of the line"):
        audit.write(number=1)
    assert not audit.available
    audit.write(number=2)
    torn, whole = path.read_text().splitlines()
    assert len(torn) == 10
    assert json.loads(whole)["number"] == 2


def test_a_line_that_an_earlier_process_left_torn_spoils_no_other(path: Path) -> None:
    path.write_text('{"ts_ms":17')
    AuditLog(path, FakeClock(NOW_MS)).write(number=2)
    torn, whole = path.read_text().splitlines()
    assert torn == '{"ts_ms":17'
    assert json.loads(whole)["number"] == 2
