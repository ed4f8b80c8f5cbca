import os
from pathlib import Path

import pytest

from relay.client.connect.config_file import planned
from relay.client.connect.errors import ConnectError, UnreadableConfigError


def test_a_change_is_written_and_the_file_stays_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("old\n")
    file.chmod(0o640)
    change = planned(file, lambda text: text + "new\n")
    assert file.read_text() == "old\n"
    change.write()
    assert (file.read_text(), change.backup.read_text()) == ("old\nnew\n", "old\n")
    assert [path.stat().st_mode & 0o777 for path in (file, change.backup)] == [0o640, 0o640]


def test_a_file_that_is_not_there_is_made_private_and_has_no_backup(tmp_path: Path) -> None:
    change = planned(tmp_path / "new" / "config.json", lambda text: text + "new\n")
    change.write()
    assert change.path.read_text() == "new\n"
    assert change.path.stat().st_mode & 0o777 == 0o600
    assert not change.backup.exists()


def test_a_link_stays_and_its_file_is_changed(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    planned(tmp_path / "link", lambda _: "new").write()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_file_that_was_changed_meanwhile_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("old")
    change = planned(file, lambda _: "new")
    file.write_text("other")
    with pytest.raises(ConnectError, match="meanwhile"):
        change.write()
    assert file.read_text() == "other"


def test_a_file_that_cannot_be_kept_whole_is_named(tmp_path: Path) -> None:
    def edit(_: str) -> str:
        raise UnreadableConfigError("is not JSON")

    with pytest.raises(ConnectError, match=r"config\.json is not JSON"):
        planned(tmp_path / "config.json", edit)


@pytest.mark.parametrize(("content", "why"), [(b"\xff", "UTF-8"), (b" " * ((16 << 20) + 1), "larger")])
def test_a_file_that_is_no_configuration_is_not_read(tmp_path: Path, content: bytes, why: str) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ConnectError, match=why):
        planned(file, lambda text: text)


def test_a_failed_write_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "config.json"
    file.write_text("old")
    change = planned(file, lambda _: "new")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        change.write()
    assert file.read_text() == "old"
