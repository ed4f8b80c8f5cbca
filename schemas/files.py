"""Files that must be whole or absent, and files that nobody else may read.

Must not be used for logs or audits: those are appended to.
"""

import os
import stat
import tempfile
from pathlib import Path

PRIVATE = 0o600
PUBLIC = 0o644
PRIVATE_DIRECTORY = 0o700


class ExposedFileError(PermissionError):
    """A secret lies in a file that others can read."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} can be read by others: chmod 600 {path}")


def write_atomic(path: Path, content: str | bytes, mode: int = PUBLIC) -> None:
    """Write ``content`` to ``path`` so that it is there whole, or as it was before, whatever happens."""
    data = content.encode("utf-8") if isinstance(content, str) else content
    # mkstemp makes a file that is new, ours alone, and no link that somebody put there.
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the new name itself survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_private(path: Path) -> str:
    """Return the text of a secret's file.

    Raises:
        ExposedFileError: group or others have any right to it.
        OSError: it cannot be read.
    """
    # The mode of what was opened, not of the name: the name can change in between.
    with path.open("rb") as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise ExposedFileError(path)
        return file.read().decode("utf-8")


def make_private_directory(path: Path) -> None:
    """Make ``path``, and what is missing above it, readable by its owner alone."""
    # One by one: `parents=True` would make those above with the default mode.
    for directory in (*reversed(path.parents), path):
        directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
