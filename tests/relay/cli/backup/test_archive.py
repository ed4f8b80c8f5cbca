import io
import tarfile

import pytest

from relay.cli.backup import archive
from relay.cli.backup.archive import ArchiveError, ArchiveTooLargeError, pack, unpack
from tests.fakes.signer import NOW_MS

FILES = {"ca/root.pem": b"root", "ca/root.key": b"\x00" * 5000, "token.key": b""}


def archive_of(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.PAX_FORMAT) as archive:
        for member, data in members:
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def member(name: str, data: bytes = b"x", **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for fact, value in facts.items():
        setattr(info, fact, value)
    return info, data


def test_what_was_packed_is_unpacked() -> None:
    assert unpack(pack(FILES, NOW_MS), FILES.keys()) == FILES


@pytest.mark.parametrize(
    "hostile",
    [
        pytest.param(member("../token.key"), id="above"),
        pytest.param(member("/etc/passwd"), id="absolute"),
        pytest.param(member("ca/../../token.key"), id="above, from below"),
        pytest.param(member("ca/other"), id="another name"),
        pytest.param(member("token.key\x1b[31m"), id="control characters"),
        pytest.param(member("token.key/" + "x" * 300), id="a long name"),
        pytest.param(
            member("token.key", b"", type=tarfile.SYMTYPE, linkname="/etc/shadow"), id="symbolic link"
        ),
        pytest.param(member("token.key", b"", type=tarfile.LNKTYPE, linkname="ca/root.key"), id="hard link"),
        pytest.param(member("ca", b"", type=tarfile.DIRTYPE), id="directory"),
        pytest.param(member("token.key", b"", type=tarfile.FIFOTYPE), id="pipe"),
        pytest.param(member("token.key", b"", type=tarfile.CHRTYPE), id="device"),
        pytest.param(member("token.key", b"", type=tarfile.GNUTYPE_SPARSE), id="sparse"),
        pytest.param(
            member("token.key", pax_headers={"GNU.sparse.size": "99", "GNU.sparse.map": "0,1"}), id="pax"
        ),
    ],
)
def test_what_is_no_plain_file_of_a_backup_is_refused(hostile: tuple[tarfile.TarInfo, bytes]) -> None:
    archive = archive_of(member("ca/root.pem"), hostile)
    with pytest.raises(ArchiveError) as caught:
        unpack(archive, FILES.keys())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 200


def test_a_file_that_is_there_twice_is_refused() -> None:
    with pytest.raises(ArchiveError, match="twice"):
        unpack(archive_of(member("token.key"), member("token.key", b"y")), FILES.keys())


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"no archive" * 200, id="something else"),
        pytest.param(pack(FILES, NOW_MS)[:1024], id="cut short after the first file"),
        pytest.param(pack(FILES, NOW_MS)[:3000], id="cut short in a file"),
        pytest.param(pack(FILES, NOW_MS)[:3000] + bytes(1024), id="cut short in a file, and ended"),
    ],
)
def test_what_is_no_whole_archive_is_refused(data: bytes) -> None:
    with pytest.raises(ArchiveError):
        unpack(data, FILES.keys())


def test_what_is_compressed_is_refused_whatever_its_size() -> None:
    buffer = io.BytesIO()
    info, data = member("token.key")
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.addfile(info, io.BytesIO(data))
    with pytest.raises(ArchiveError):
        unpack(buffer.getvalue() + bytes(1024), FILES.keys())


def test_a_state_that_is_too_large_to_be_restored_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_BYTES", 20_480)
    pack({"token.key": bytes(10_000)}, NOW_MS)
    with pytest.raises(ArchiveTooLargeError, match="20480 bytes"):
        pack({"token.key": bytes(30_000)}, NOW_MS)
