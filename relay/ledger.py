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
from pathlib import Path
from typing import Any

from schemas.files import PRIVATE

Entry = dict[str, Any]


class LedgerError(Exception):
    """The file is damaged; the text names it."""


class Ledger:
    """The ledger in ``path``, which is made with the first entry."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every append: a cheap look for whoever watches."""
        try:
            facts = self._path.stat()
        except FileNotFoundError:
            return (0, 0, 0)
        return (facts.st_ino, facts.st_size, facts.st_mtime_ns)

    def entries(self) -> list[Entry]:
        """Return every entry, oldest first.

        Raises:
            LedgerError: a line is not a JSON object.
        """
        try:
            text = self._path.read_text("utf-8")
        except FileNotFoundError:
            return []
        except UnicodeDecodeError:
            raise LedgerError(f"{self._path} is damaged: it is not text") from None
        # What stands behind the last line end was never said to be done.
        lines = text.split("\n")[:-1]
        return [self._parsed(number, line) for number, line in enumerate(lines, 1)]

    @contextmanager
    def held(self) -> Iterator[list[Entry]]:
        """Hold the ledger alone, and return its entries: what follows from them stays true until written.

        Raises:
            LedgerError: as ``entries``.
        """
        with self._opened() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            _cut_torn_end(descriptor)
            yield self.entries()

    def append(self, entry: Entry) -> None:
        """Add ``entry`` so that a power cut cannot undo it. Only while the ledger is ``held``.

        Raises:
            OSError: the disk did not take all of it; what it took will not count.
        """
        line = (json.dumps(entry, separators=(",", ":")) + "\n").encode("ascii")
        with self._opened() as descriptor:
            if os.write(descriptor, line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            os.fsync(descriptor)

    @contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, PRIVATE)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _parsed(self, number: int, line: str) -> Entry:
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            entry = None
        if not isinstance(entry, dict):
            raise LedgerError(f"{self._path} is damaged: line {number} is no entry")
        return entry


def _cut_torn_end(descriptor: int) -> None:
    """Remove what a full disk or a power cut left behind the last whole line."""
    size = os.fstat(descriptor).st_size
    end = size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        end -= 1
    if end != size:
        os.ftruncate(descriptor, end)
