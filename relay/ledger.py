"""A file of JSON lines that is only ever appended to, by any process of the operator's, and survives each.

What the CA issued and revoked, who may join and which tokens are void lie in such files: the commands write
them, and a running relay looks at them. Must not know what an entry means.
"""

import errno
import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Literal

from schemas.files import open_state, sync_directory

Entry = dict[str, Any]

_READ = os.O_RDONLY
_WRITE = os.O_RDWR | os.O_CREAT | os.O_APPEND


class LedgerError(Exception):
    """The file is damaged; the text names it."""


class Ledger:
    """The ledger in ``path``, which is made with the first entry.

    ``secret``: its entries hold secrets, and a file that others can read is not used.
    """

    def __init__(self, path: Path, *, secret: bool = False) -> None:
        self.path = path
        self._secret = secret

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every append: a cheap look for whoever watches."""
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return (0, 0, 0)
        return (facts.st_ino, facts.st_size, facts.st_mtime_ns)

    def entries(self) -> list[Entry]:
        """Return every entry, oldest first.

        Raises:
            LedgerError: a line is not a JSON object.
            OSError: it cannot be read, or is exposed.
        """
        try:
            with self._opened(_READ) as file:
                return self._parsed(_whole_lines(file.readall()))
        except FileNotFoundError:
            return []

    @contextmanager
    def held(self) -> Iterator[list[Entry]]:
        """Hold the ledger alone, and return its entries: what follows from them stays true until written.

        Waits for whoever holds it: not to be called where nothing may wait.

        Raises:
            LedgerError, OSError: as ``entries``.
        """
        with self._opened(_WRITE) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            data = file.readall()
            whole = _whole_lines(data)
            if whole != data:
                # What a power cut left behind the last entry must not become the beginning of the next.
                file.truncate(len(whole))
            yield self._parsed(whole)

    def append(self, *entries: Entry) -> None:
        """Add ``entries``, all or none, so that a power cut cannot undo it. Only while it is ``held``.

        Raises:
            OSError: the disk did not take all of it; the ledger is as it was.
        """
        lines = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries).encode("ascii")
        with self._opened(_WRITE) as file:
            before = os.fstat(file.fileno()).st_size
            try:
                _write_through(file, lines)
                if not before:
                    sync_directory(self.path.parent)
            except OSError as error:
                file.truncate(before)
                raise OSError(error.errno, error.strerror, str(self.path)) from None

    @contextmanager
    def _opened(self, flags: int) -> Iterator[FileIO]:
        mode: Literal["rb", "rb+"] = "rb" if flags == _READ else "rb+"
        descriptor = open_state(self.path, flags, secret=self._secret)
        # Unbuffered: a write is one write, and what came of it is known at once.
        with os.fdopen(descriptor, mode, buffering=0) as file:
            yield file

    def _parsed(self, lines: bytes) -> list[Entry]:
        return [self._entry(number, line) for number, line in enumerate(lines.split(b"\n")[:-1], 1)]

    def _entry(self, number: int, line: bytes) -> Entry:
        try:
            entry = json.loads(line.decode("ascii"))
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise LedgerError(f"{self.path} is damaged: line {number} is no entry")
        return entry


def _write_through(file: FileIO, data: bytes) -> None:
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())


def _whole_lines(data: bytes) -> bytes:
    """Return ``data`` without what stands behind its last line end: that was never said to be done."""
    return data[: data.rfind(b"\n") + 1]
