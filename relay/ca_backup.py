"""An archive of the certificate authority, from which it can be restored.

Must not decide what belongs into it.
"""

import io
import os
import tarfile
from collections.abc import Iterable
from pathlib import Path

from schemas.files import PRIVATE, PRIVATE_DIRECTORY, sync_directory

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def write_backup(path: Path, directory: str, files: Iterable[Path], modified_ms: int) -> None:
    """Write ``files`` into a new archive that only its owner can read; in it they lie below ``directory``.

    Raises:
        FileExistsError: there is something already: an older archive may be the one that is needed.
        OSError: a file cannot be read, or the disk does not take the archive; nothing is left of it.
    """
    # All of it is read before anything is written: what cannot be read must not leave half an archive.
    archive = _archive(directory, files, modified_ms // 1000)
    descriptor = os.open(path, _NEW, PRIVATE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(archive)
            file.flush()
            os.fsync(descriptor)
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    sync_directory(path.parent)


def _archive(directory: str, files: Iterable[Path], modified_s: int) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        top = _member(directory, PRIVATE_DIRECTORY, modified_s)
        top.type = tarfile.DIRTYPE
        archive.addfile(top)
        for path in files:
            data = path.read_bytes()
            member = _member(f"{directory}/{path.name}", PRIVATE, modified_s)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return buffer.getvalue()


def _member(name: str, mode: int, modified_s: int) -> tarfile.TarInfo:
    # Without the owner: who restores it shall own it.
    member = tarfile.TarInfo(name)
    member.mode, member.mtime = mode, modified_s
    return member
