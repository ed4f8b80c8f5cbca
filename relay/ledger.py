"""A file of JSON lines that is only ever appended to, by any process of the operator's, and survives each.

What the CA issued and revoked, who may join and which tokens are void lie in such files: the commands write
them, and a running relay looks at them. A reader keeps the file open and parses what was appended since its
last look: a look needs no new descriptor, and costs what is new. Must not know what an entry means.
"""

import errno
import fcntl
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Protocol, Self, TypeVar

from schemas.error_roots import StateError
from schemas.files import check_state, open_state, sync_directory

Entry = dict[str, Any]

_WRITE = os.O_RDWR | os.O_CREAT | os.O_APPEND


class LedgerError(StateError):
    """The file is damaged; the text names it."""


class LedgerState(Protocol):
    """What the entries of one kind of ledger add up to."""

    def copy(self) -> Self:
        """Return another state with the same contents; ``apply`` to one must not show in the other."""
        ...

    def apply(self, entry: Entry) -> None:
        """Take in the next entry.

        Raises:
            KeyError, ValueError, TypeError, AttributeError: it is no entry of this kind. What is not
                understood must not be skipped: it may be a revocation.
        """
        ...


StateT = TypeVar("StateT", bound=LedgerState)


class _KeptFile:
    """A file that stays open for reading until ``close``, or until it is collected."""

    def __init__(self, path: Path, *, secret: bool) -> None:
        self._descriptor = open_state(path, secret=secret)
        self.close = weakref.finalize(self, os.close, self._descriptor)

    def facts(self) -> os.stat_result:
        return os.fstat(self._descriptor)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from ``start`` up to ``end``, or to the end of the file if that comes first."""
        pieces = []
        while start < end and (piece := os.pread(self._descriptor, end - start, start)):
            pieces.append(piece)
            start += len(piece)
        return b"".join(pieces)


@dataclass(frozen=True, slots=True)
class _Parsed(Generic[StateT]):
    """What was read of a file: where it ends, how many lines, the last of them, and what they come to."""

    state: StateT
    end: int = 0
    number: int = 0
    last: bytes = b""
    stamp: tuple[int, int, int] | None = None


class Ledger(Generic[StateT]):
    """The ledger in ``path``, which is made with the first entry; ``empty`` is what none come to.

    Can be read on several threads at once. A state that ``read`` or ``locked`` has returned never changes:
    the next entries are applied to a copy.

    ``secret``: its entries hold secrets, and a file that others can read is not used.
    """

    def __init__(self, path: Path, empty: StateT, *, secret: bool = False) -> None:
        self.path = path
        self._secret = secret
        self._nothing = _Parsed(empty)
        self._parsed = self._nothing
        self._damage = ""
        self._damaged_at: tuple[int, int, int] | None = None
        self._file: _KeptFile | None = None
        self._lock = Lock()

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every append: a cheap look for whoever watches."""
        try:
            return _stamp(self.path.lstat())
        except FileNotFoundError:
            return (0, 0, 0)

    def read(self) -> StateT:
        """Return what the entries come to.

        Raises:
            LedgerError: a line is not a JSON object, or no entry of this kind.
            OSError: it cannot be read, or is exposed.
        """
        with self._lock:
            return self._read_on().state

    def _read_on(self) -> _Parsed[StateT]:
        file = self._current_file()
        if file is None:
            return self._nothing
        facts = file.facts()
        check_state(self.path, facts, secret=self._secret)
        stamp = _stamp(facts)
        if stamp == self._damaged_at:
            # A look at damage that nobody has mended yet must not parse it again.
            raise LedgerError(self._damage)
        if stamp != self._parsed.stamp:
            known = self._parsed if self._goes_on(file, facts) else self._nothing
            self._parsed = self._extended(known, file.read(known.end, facts.st_size), stamp)
        return self._parsed

    def _current_file(self) -> _KeptFile | None:
        """Return the file that lies at the path now, and keep it open; None if there is none."""
        try:
            named = self.path.lstat()
        except FileNotFoundError:
            self._let_go()
            return None
        if self._file is None or not os.path.samestat(self._file.facts(), named):
            # Replaced: restored from a backup, or edited. Its descriptor first, for there may be no other.
            self._let_go()
            self._file = _KeptFile(self.path, secret=self._secret)
        return self._file

    def _let_go(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._parsed = None, self._nothing

    def _goes_on(self, file: _KeptFile, facts: os.stat_result) -> bool:
        """Tell, by its size and the last line read, whether the file was only appended to."""
        known = self._parsed
        if known.stamp is None or facts.st_size == known.stamp[1]:
            return False  # of the same size, yet written to: not by an append
        return file.read(known.end - len(known.last), known.end) == known.last

    def _extended(self, known: _Parsed[StateT], data: bytes, stamp: tuple[int, int, int]) -> _Parsed[StateT]:
        # What stands behind the last line end was never said to be done.
        lines = data.split(b"\n")[:-1]
        if not lines:
            return _Parsed(known.state, known.end, known.number, known.last, stamp)
        state = known.state.copy()
        for number, line in enumerate(lines, known.number + 1):
            try:
                state.apply(parse_entry(line))
            except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
                self._damage, self._damaged_at = f"{self.path} is damaged: line {number} is no entry", stamp
                raise LedgerError(self._damage) from None
        end = known.end + sum(map(len, lines)) + len(lines)
        return _Parsed(state, end, known.number + len(lines), lines[-1] + b"\n", stamp)

    @contextmanager
    def locked(self) -> Iterator[StateT]:
        """Hold the ledger alone, and return what it comes to: what follows stays true until written.

        Waits for whoever holds it: not to be called where nothing may wait.

        Raises:
            LedgerError, OSError: as ``read``.
        """
        with self._exclusive_file() as file:
            with self._lock:
                parsed = self._read_on()
            if parsed.end != os.fstat(file.fileno()).st_size:
                # What a power cut left behind the last entry must not become the beginning of the next.
                file.truncate(parsed.end)
            yield parsed.state

    @contextmanager
    def _exclusive_file(self) -> Iterator[FileIO]:
        while True:
            with self._opened_to_write() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # Who held it until now may have put another file in its place.
                if os.path.samestat(os.fstat(file.fileno()), self.path.lstat()):
                    yield file
                    return

    def append(self, *entries: Entry) -> None:
        """Add ``entries``, all or none, so that a power cut cannot undo it. Only while it is ``locked``.

        Raises:
            OSError: the disk did not take all of it; the ledger is as it was.
        """
        lines = "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries).encode("ascii")
        with self._opened_to_write() as file:
            before = os.fstat(file.fileno()).st_size
            try:
                _write_through(file, lines)
                if not before:
                    sync_directory(self.path.parent)
            except OSError as error:
                file.truncate(before)
                raise OSError(error.errno, error.strerror, str(self.path)) from None

    def _opened_to_write(self) -> FileIO:
        # Unbuffered: a write is one write, and what came of it is known at once.
        return FileIO(open_state(self.path, _WRITE, secret=self._secret), "rb+")


def _stamp(facts: os.stat_result) -> tuple[int, int, int]:
    return (facts.st_ino, facts.st_size, facts.st_mtime_ns)


def parse_entry(line: bytes) -> Entry:
    """Return the entry that a line holds.

    Raises:
        ValueError, TypeError, RecursionError: it holds none.
    """
    entry = json.loads(line.decode("ascii"))
    if not isinstance(entry, dict):
        raise TypeError(entry)
    return entry


def _write_through(file: FileIO, data: bytes) -> None:
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())
