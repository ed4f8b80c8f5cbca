import base64
import io
import tarfile

import pyrage  # type: ignore[import-untyped]  # the library brings no types
import pytest

from relay.cli.backup import archive
from relay.cli.backup.archive import (
    ArchiveError,
    ArchiveTooLargeError,
    EncryptionError,
    decrypt_for,
    decrypt_with,
    encrypt_for,
    is_encrypted,
    pack,
    unpack,
)
from schemas.error_roots import CommandLineError
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


@pytest.mark.parametrize("damage", [b"\xff", bytes(512)], ids=["a byte", "a block of zeros"])
def test_a_head_that_is_damaged_does_not_hide_what_comes_behind_it(damage: bytes) -> None:
    packed = pack({"a": b"1", "b": b"2", "c": b"3"}, NOW_MS)
    head = 2 * tarfile.BLOCKSIZE  # that of the second file
    with pytest.raises(ArchiveError, match="damaged"):
        unpack(packed[:head] + damage + packed[head + len(damage) :], {"a", "b", "c"})


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


SECRET = b"the root's key"
ONE, TWO, OTHER = (pyrage.x25519.Identity.generate() for _ in range(3))
# Of the age format, with a work factor of 2: the library reads it, and writes only what takes seconds.
WITH_PASSPHRASE = base64.b64decode(
    "YWdlLWVuY3J5cHRpb24ub3JnL3YxCi0+IHNjcnlwdCB6OHViOXMrc3YxV0xyUi9SbXcyMElRIDIKaDBOcW54OFlqSm1pdHNVc2k2dVRZ"
    "UDRBZEMyOVVEMFU1b2s3TTZLMDdVUQotLS0gd1dtZ0Q3NGNVczY0VkJyZEo0RnFzYXh4Mm1abFhFQ0VneDZoVkFlMkl3SQrlSI3+hA4K"
    "LW3mgTn3/aUmadvIFofydTZUbYcYgmn4/djgpbtVFErGNBl4aPqI"
)
FOR_TWO = encrypt_for(SECRET, [str(ONE.to_public()), str(TWO.to_public())])


def test_each_recipient_can_read_it_and_no_other_key_can() -> None:
    assert is_encrypted(FOR_TWO)
    assert SECRET not in FOR_TWO
    for identity in (ONE, TWO):
        assert decrypt_for(FOR_TWO, f"# created by age-keygen\n\n{identity}\n") == SECRET
    with pytest.raises(EncryptionError, match="not for this identity"):
        decrypt_for(FOR_TWO, str(OTHER))


def test_an_identity_file_may_hold_several() -> None:
    assert decrypt_for(FOR_TWO, f"{OTHER}\n{TWO}\n") == SECRET


def test_what_another_program_encrypted_is_read_with_its_passphrase_and_no_other() -> None:
    assert is_encrypted(WITH_PASSPHRASE)
    assert decrypt_with(WITH_PASSPHRASE, "correct horse") == SECRET
    with pytest.raises(EncryptionError, match="passphrase"):
        decrypt_with(WITH_PASSPHRASE, "another horse")


def test_a_key_that_would_take_this_machine_hours_is_not_a_wrong_passphrase() -> None:
    hours = WITH_PASSPHRASE.replace(b" 2\n", b" 40\n", 1)
    assert hours != WITH_PASSPHRASE
    with pytest.raises(EncryptionError, match="too busy or too slow"):
        decrypt_with(hours, "correct horse")


@pytest.mark.parametrize("place", [0, 30, -1])
def test_a_changed_byte_is_found(place: int) -> None:
    data = bytearray(FOR_TWO)
    data[place] ^= 1
    with pytest.raises(EncryptionError):
        decrypt_for(bytes(data), str(ONE))


@pytest.mark.parametrize("left", [0, 21, 100, -1])
def test_what_is_cut_short_is_found(left: int) -> None:
    with pytest.raises(EncryptionError):
        decrypt_for(FOR_TWO[:left], str(ONE))


@pytest.mark.parametrize("recipient", ["", "age1", "nonsense", "AGE-SECRET-KEY-1"])
def test_what_is_no_recipient_is_refused(recipient: str) -> None:
    with pytest.raises(CommandLineError, match="age1"):
        encrypt_for(SECRET, [str(ONE.to_public()), recipient])


@pytest.mark.parametrize("text", ["", "# only a comment\n", "a secret that is no identity\n"])
def test_what_is_no_identity_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(EncryptionError) as caught:
        decrypt_for(FOR_TWO, text)
    assert "a secret" not in str(caught.value)
