"""A backup as one tar archive of plain files, and what is accepted of one that is restored.

A backup that is not encrypted with a passphrase can have been changed where it was kept, so an archive is
read as hostile input: regular files under expected names, each once, and not larger than the archive. Must
not touch the disk, and must not know what belongs in a backup.
"""

import io
import tarfile
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from schemas.error_roots import OperatorError, StateError
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
    except (tarfile.TarError, ValueError, EOFError, OverflowError):
        raise ArchiveError("it is no backup, or it is damaged") from None
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
