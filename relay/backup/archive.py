"""A backup as one tar archive of plain files, and what is believed of one that comes back.

Whoever keeps a backup can change it, unless it is encrypted for a passphrase. So an archive is read as if it
were hostile: regular files under expected names, each once, and not larger than the archive that holds them.
Must not touch the disk, and must not know what belongs into a backup.
"""

import io
import tarfile
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from schemas.error_roots import OperatorError
from schemas.text import printable

MAX_BYTES = 256 << 20
"""Of an archive: far more than the ledger of 100 000 nodes."""


class ArchiveError(OperatorError):
    """The archive is not one that this program has made; the text says why."""


def pack(files: Mapping[str, bytes], modified_ms: int) -> bytes:
    """Return an archive that holds ``files`` by name.

    Raises:
        ArchiveError: it would be larger than can be restored.
    """
    buffer = io.BytesIO()
    # Plain ustar: its headers say nothing that ``unpack`` would have to distrust.
    with tarfile.open(fileobj=buffer, mode="w:", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.mode, member.mtime, member.size = 0o600, modified_ms // 1000, len(data)
            archive.addfile(member, io.BytesIO(data))
    if buffer.tell() > MAX_BYTES:
        raise ArchiveError(f"the state is larger than {MAX_BYTES} bytes: it cannot be one archive")
    return buffer.getvalue()


def unpack(archive: bytes, expected: AbstractSet[str]) -> dict[str, bytes]:
    """Return the files of an archive by name.

    Raises:
        ArchiveError: it is none, or holds anything but regular files whose names are ``expected``.
    """
    files: dict[str, bytes] = {}
    if not archive.endswith(bytes(2 * tarfile.BLOCKSIZE)):
        # What ends between two files would otherwise be read as an archive of the first of them.
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
