"""One client's configuration file: what it holds, the change that is planned, and the file with its backup.

A file is written only through ``FileChange.write``, which keeps the file as it was beside it. Must not know
any client, and must not hold a token.
"""

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from relay.client.connect.errors import ConnectError, UnreadableConfigError
from schemas.files import PRIVATE, PRIVATE_DIRECTORY, write_atomic

_MAX_BYTES = 16 << 20
"""Claude Code keeps a history in its configuration."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """What a configuration file holds, and what it is to hold. ``mode`` is None if there is no such file."""

    path: Path
    before: str
    after: str
    mode: int | None

    @property
    def is_needed(self) -> bool:
        """Whether the file is to become another one."""
        return self.before != self.after

    @property
    def backup(self) -> Path:
        """Where the file is kept as it was before the change."""
        return self.path.with_name(f"{self.path.name}.before-edge")

    def write(self) -> None:
        """Keep the file as it was, and write it as it is to be.

        Raises:
            ConnectError: another program has changed the file meanwhile.
            OSError: it cannot be written.
        """
        if _read(self.path)[0] != self.before:
            raise ConnectError(f"{self.path} was changed meanwhile: try again")
        self.path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        if self.mode is not None:
            write_atomic(self.backup, self.before, self.mode)
        # Behind a link, as tools that manage dotfiles lay it, the file itself is replaced and not the link.
        write_atomic(self.path.resolve(), self.after, PRIVATE if self.mode is None else self.mode)


def planned(path: Path, edit: Callable[[str], str]) -> FileChange:
    """Return the change that ``edit`` makes of the file's text; a missing file has none.

    Raises:
        ConnectError: the file cannot be changed without loss; it is named.
        OSError: it cannot be read.
    """
    before, mode = _read(path)
    try:
        return FileChange(path, before, edit(before), mode)
    except UnreadableConfigError as error:
        raise ConnectError(f"{path} {error}") from None


def _read(path: Path) -> tuple[str, int | None]:
    try:
        with path.open("rb") as file:
            data, mode = file.read(_MAX_BYTES + 1), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    except FileNotFoundError:
        return "", None
    if len(data) > _MAX_BYTES:
        raise ConnectError(f"{path} is larger than any client's configuration")
    try:
        return data.decode("utf-8"), mode
    except UnicodeDecodeError:
        raise ConnectError(f"{path} is not UTF-8") from None
