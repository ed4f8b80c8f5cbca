import stat
import tarfile
from pathlib import Path

import pytest

from relay.ca_backup import write_backup
from tests.fakes.disk import full_disk
from tests.fakes.signer import NOW_MS


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    (tmp_path / "ca").mkdir()
    paths = [tmp_path / "ca" / name for name in ("root.pem", "root.key")]
    for path in paths:
        path.write_text(f"the content of {path.name}\n")
    return paths


def test_an_archive_holds_the_files_below_one_directory_for_their_owner_alone(
    tmp_path: Path, files: list[Path]
) -> None:
    archive = tmp_path / "ca.tar"
    write_backup(archive, "ca", files, NOW_MS)
    assert stat.S_IMODE(archive.stat().st_mode) == 0o600
    with tarfile.open(archive) as tar:
        members = [(member.name, member.mode, member.mtime) for member in tar.getmembers()]
        read = tar.extractfile("ca/root.key")
        assert read is not None
        assert read.read() == b"the content of root.key\n"
    second = NOW_MS // 1000
    assert members == [("ca", 0o700, second), ("ca/root.pem", 0o600, second), ("ca/root.key", 0o600, second)]


@pytest.mark.parametrize("there", ["file", "link", "link to nowhere", "directory"])
def test_what_is_there_is_never_overwritten(tmp_path: Path, files: list[Path], there: str) -> None:
    archive, other = tmp_path / "ca.tar", tmp_path / "other"
    match there:
        case "file":
            archive.write_text("an older archive")
        case "link":
            other.write_text("an older archive")
            archive.symlink_to(other)
        case "link to nowhere":
            archive.symlink_to(other)
        case _:
            archive.mkdir()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(FileExistsError):
        write_backup(archive, "ca", files, NOW_MS)
    assert sorted(tmp_path.iterdir()) == before
    if there in {"file", "link"}:
        assert archive.read_text() == "an older archive"


def test_a_full_disk_leaves_no_half_archive(tmp_path: Path, files: list[Path]) -> None:
    archive = tmp_path / "ca.tar"
    with full_disk(100), pytest.raises(OSError, match=r"ca\.tar"):
        write_backup(archive, "ca", files, NOW_MS)
    assert not archive.exists()
    write_backup(archive, "ca", files, NOW_MS)
    assert archive.exists()


def test_a_file_that_cannot_be_read_leaves_no_archive(tmp_path: Path, files: list[Path]) -> None:
    files[1].unlink()
    with pytest.raises(FileNotFoundError, match=r"root\.key"):
        write_backup(tmp_path / "ca.tar", "ca", files, NOW_MS)
    assert not (tmp_path / "ca.tar").exists()


def test_an_archive_that_is_interrupted_is_taken_away(
    tmp_path: Path, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_backup(tmp_path / "ca.tar", "ca", files, NOW_MS)
    assert not (tmp_path / "ca.tar").exists()
