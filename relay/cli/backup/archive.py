"""A backup as one tar archive of plain files, and what is accepted of one that is restored.

A backup that is not encrypted with a passphrase can have been changed where it was kept, so an archive is
read as hostile input: regular files under expected names, each once, and not larger than the archive. It is
encrypted in the age format (age-encryption.org/v1), for recipients or with a passphrase.

The one module that imports the library of that, and only for a backup: the help of the commands is shown
without it, where the extra ``[client]`` alone is installed. Must not touch the disk, read, log or repeat a
secret, or know what belongs in a backup.
"""

import io
import tarfile
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from schemas.error_roots import CommandLineError, OperatorError, StateError
from schemas.text import printable

MAX_BYTES = 256 << 20
"""Of an archive: far more than the ledger of 100 000 nodes."""


class ArchiveError(OperatorError):
    """The archive is not one that this program has made; the text says why."""


class ArchiveTooLargeError(StateError):
    """The state is larger than one archive may be."""


def pack(files: Mapping[str, bytes], modified_ms: int) -> bytes:
    """Return an archive that holds ``files`` by name.

    Raises:
        ArchiveTooLargeError: it would be larger than can be restored.
    """
    buffer = io.BytesIO()
    # Plain ustar: it has no extended headers, which ``unpack`` rejects.
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.mtime, member.size = 0o600, modified_ms // 1000, len(data)
            archive.addfile(member, io.BytesIO(data))
    if buffer.tell() > MAX_BYTES:
        raise ArchiveTooLargeError(f"the state is larger than {MAX_BYTES} bytes: it cannot be one archive")
    return buffer.getvalue()


def unpack(archive: bytes, expected: AbstractSet[str]) -> dict[str, bytes]:
    """Return the files of an archive by name.

    Raises:
        ArchiveError: it is not one, or holds anything but regular files whose names are ``expected``.
    """
    files: dict[str, bytes] = {}
    if not archive.endswith(bytes(2 * tarfile.BLOCKSIZE)):
        # An archive cut between two files would otherwise be read as one of the files before the cut.
        raise ArchiveError("it is no backup, or it was cut short")
    try:
        # Not "r:*": what is compressed could be of any size.
        with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
            for member in tar:
                _check(member, expected, files.keys())
                content = tar.extractfile(member)
                files[member.name] = content.read() if content else b""
            rest = archive[tar.offset :]
    except (tarfile.TarError, ValueError, EOFError, OverflowError):
        raise ArchiveError("it is no backup, or it is damaged") from None
    if rest.strip(b"\0"):
        # The library takes a head that is damaged for the end: what was revoked may be behind it.
        raise ArchiveError("it is no backup, or it is damaged")
    return files


def _check(member: tarfile.TarInfo, expected: AbstractSet[str], seen: AbstractSet[str]) -> None:
    name = printable(member.name, 64)
    # A sparse file can claim to be larger than the archive; extended headers can rename what follows them.
    if member.type != tarfile.REGTYPE or member.issparse() or member.pax_headers:
        raise ArchiveError(f"it holds {name}, which is no plain file")
    if member.name not in expected:
        raise ArchiveError(f"it holds {name}, which is no part of a backup")
    if member.name in seen:
        raise ArchiveError(f"it holds {name} twice")


_HEADER = b"age-encryption.org/v1\n"
_MEASUREMENTS = 5
_TOO_MUCH_WORK = "Excessive work"


class EncryptionError(OperatorError):
    """A backup cannot be encrypted or decrypted with this; the text says why."""


def _library() -> Any:
    import pyrage  # type: ignore[import-untyped]  # noqa: PLC0415 - see above; the library brings no types

    return pyrage


def is_encrypted(data: bytes) -> bool:
    """Return whether ``data`` begins as a file of the age format does."""
    return data.startswith(_HEADER)


def encrypt_for(data: bytes, recipients: Sequence[str]) -> bytes:
    """Return ``data`` encrypted for the identities of ``recipients`` (``age1…``); any one can decrypt it.

    Raises:
        CommandLineError: one of them is not a recipient.
    """
    pyrage = _library()
    try:
        keys = [pyrage.x25519.Recipient.from_str(each) for each in recipients]
    except pyrage.RecipientError:
        raise CommandLineError("a recipient is not of the form age1…, as `age-keygen -y` prints it") from None
    return bytes(pyrage.encrypt(data, keys))


def encrypt_with(data: bytes, passphrase: str) -> bytes:
    """Return ``data`` encrypted with ``passphrase``."""
    return bytes(_library().passphrase.encrypt(data, passphrase))


def decrypt_for(data: bytes, identities: str) -> bytes:
    """Return what was encrypted for one of ``identities``, the text of a file that age-keygen wrote.

    Raises:
        EncryptionError: that is no identity file, or ``data`` is damaged or not for any of them.
    """
    pyrage = _library()
    lines = [line.strip() for line in identities.splitlines()]
    try:
        keys = [pyrage.x25519.Identity.from_str(line) for line in lines if line and not line.startswith("#")]
    except pyrage.IdentityError:
        # Without the library's text, which might repeat a secret.
        raise EncryptionError("the identity file is not of the form that age-keygen writes") from None
    try:
        return bytes(pyrage.decrypt(data, keys))
    except pyrage.DecryptError:
        raise EncryptionError("the backup is not for this identity, or it is damaged") from None


def decrypt_with(data: bytes, passphrase: str) -> bytes:
    """Return what was encrypted with ``passphrase``.

    The library refuses to derive a key that takes longer than a multiple of what this machine should take. It
    measures for milliseconds: a machine that is busy in that moment is measured again.

    Raises:
        EncryptionError: it was another passphrase, or none; ``data`` is damaged; or the machine is too slow.
    """
    pyrage = _library()
    for _ in range(_MEASUREMENTS):
        try:
            return bytes(pyrage.passphrase.decrypt(data, passphrase))
        except pyrage.DecryptError as error:
            if not str(error).startswith(_TOO_MUCH_WORK):
                raise EncryptionError("the passphrase is another one, or the backup is damaged") from None
    raise EncryptionError(
        "this machine is too busy or too slow to derive the key from the passphrase: try again later, or "
        "decrypt the backup elsewhere with `age --decrypt`, and restore what that writes"
    )
