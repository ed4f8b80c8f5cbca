from pathlib import Path

import pytest

from kubelet.caller_tools import sessions as caller_names
from kubelet.caller_tools.sessions import CallerNames, CallerNamesError
from schemas.files import UntrustedFileError
from schemas.process.logs import make_logger
from tests.fakes.lines import LogLines


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "caller_ids.json"


def names(file: Path | None, log: LogLines) -> CallerNames:
    return CallerNames(file, make_logger("kubelet", log))


def test_a_name_belongs_to_the_first_that_used_it(file: Path, log: LogLines) -> None:
    known = names(file, log)
    assert known.claim("ant", "a")
    assert known.claim("ant", "a")
    assert not known.claim("ant", "b")
    assert known.claim("bee", "b")


def test_it_still_does_after_a_restart(file: Path, log: LogLines) -> None:
    assert names(file, log).claim("ant", "a")
    assert not names(file, log).claim("ant", "b")
    assert names(file, log).claim("ant", "a")


def test_only_its_user_can_read_the_file(file: Path, log: LogLines) -> None:
    names(file, log).claim("ant", "a")
    assert file.stat().st_mode & 0o777 == 0o600


def test_one_owner_cannot_take_all_names(file: Path, log: LogLines) -> None:
    known = names(file, log)
    count = caller_names.MAX_NAMES_OF_ONE_OWNER
    assert [known.claim(f"ant-{number}", "a") for number in range(count + 1)] == [True] * count + [False]
    assert known.claim("bee", "b")
    assert log.entries("caller_id refused: no more are kept")


def test_all_owners_together_have_a_limit(log: LogLines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caller_names, "MAX_NAMES", 2)
    known = names(None, log)
    assert [known.claim(name, name) for name in "abc"] == [True, True, False]


def test_a_name_that_cannot_be_kept_is_refused(tmp_path: Path, log: LogLines) -> None:
    known = names(tmp_path / "missing" / "file", log)
    assert not known.claim("ant", "a")
    assert log.entries("caller_id refused: it cannot be kept")


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"ant":1}', b"\xff"])
def test_a_damaged_file_ends_the_start_with_what_to_do(file: Path, log: LogLines, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(CallerNamesError, match="is damaged: remove it"):
        names(file, log)


def test_a_link_is_not_read(tmp_path: Path, file: Path, log: LogLines) -> None:
    (tmp_path / "elsewhere").write_text('{"ant": "evil"}')
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedFileError):
        names(file, log)
