"""A file of JSON lines that is only appended to, by several processes of one user.

The CA's records, the join tokens and the revoked tokens are such files: commands write them, and a running
relay reads them. A reader keeps the file open and parses what was appended since its last read, so a read
needs no new descriptor and costs only what is new. Must not know what an entry means.
"""

import errno
import json
import os
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import Any, Generic, Self, TypeVar

from schemas.error_roots import StateError
from schemas.files import (
    PRIVATE,
    check_state,
    mode_without_secrets,
    open_state,
    sync_directory,
    write_atomic,
)

Entry = dict[str, Any]

WORTH_COMPACTING = 256
"""How many lines a file has at least before some leave it."""
MAX_LEDGER_BYTES = 512 << 20
"""Of millions of entries: what is larger, as a file with a hole, would take all memory."""
_WRITE = os.O_RDWR | os.O_CREAT | os.O_APPEND


class LedgerError(StateError):
    """The file is damaged; the text names it."""


class LedgerState:
    """What the entries of one kind of ledger add up to, in dicts, lists and sets of what does not change."""

    def copy(self) -> Self:
        """Return an independent copy."""
        other = copy(self)
        for name, value in vars(self).items():
            setattr(other, name, copy(value))
        return other

    @abstractmethod
    def apply(self, entry: Entry) -> None:
        """Apply the next entry.

        Raises:
            KeyError, ValueError, TypeError, AttributeError, OverflowError: it is no entry of this kind. An
                entry that is not understood must not be skipped: it may be a revocation.
        """


StateT = TypeVar("StateT", bound=LedgerState)
ValueT = TypeVar("ValueT")


class Keyed(LedgerState, Generic[ValueT]):
    """Entries of which each says one thing, by key: of two with one key the first counts.

    ``read`` returns key and value of an entry; it raises as ``LedgerState.apply``.
    """

    def __init__(self, read: Callable[[Entry], tuple[str, ValueT]]) -> None:
        self._read = read
        self.by_key: dict[str, ValueT] = {}

    def apply(self, entry: Entry) -> None:
        key, value = self._read(entry)
        self.by_key.setdefault(key, value)


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
    """What was read of a file: its end, the number of lines, the last of them, and their state."""

    state: StateT
    end: int = 0
    number: int = 0
    last: bytes = b""
    stamp: tuple[int, int, int] | None = None


class Ledger(Generic[StateT]):
    """The ledger in ``path``, which is made with the first entry; ``empty`` is the state of no entries.

    Can be read on several threads at once. A state that ``read`` or ``locked`` has returned never changes:
    the next entries are applied to a copy.

    ``secret``: its entries hold secrets, and a file that others can read is not used. ``lasting`` returns the
    entries of a state that must stay: once they are at most half of the lines, the others leave the file.
    """

    def __init__(
        self,
        path: Path,
        empty: StateT,
        *,
        secret: bool = False,
        lasting: Callable[[StateT], Sequence[Entry]] | None = None,
    ) -> None:
        self.path = path
        self._lasting = lasting
        self._secret = secret
        self._nothing = _Parsed(empty)
        self._parsed = self._nothing
        self._damage = ""
        self._damaged_at: tuple[int, int, int] | None = None
        self._file: _KeptFile | None = None
        self._lock = Lock()

    @property
    def stamp(self) -> tuple[int, int, int]:
        """What differs after every append: a cheap check for changes."""
        try:
            return _stamp(self.path.lstat())
        except FileNotFoundError:
            return (0, 0, 0)

    def read(self) -> StateT:
        """Return the state that the entries add up to.

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
            # Damage that was found once is not parsed again until the file changes.
            raise LedgerError(self._damage)
        if facts.st_size > MAX_LEDGER_BYTES:
            size = MAX_LEDGER_BYTES >> 20
            raise LedgerError(f"{self.path} is larger than {size} MiB: move it away, and restore it")
        if stamp != self._parsed.stamp:
            known = self._parsed if self._was_appended(file, facts) else self._nothing
            self._parsed = self._extend(known, file.read(known.end, facts.st_size), stamp)
        return self._parsed

    def _current_file(self) -> _KeptFile | None:
        """Return the file that is at the path now, and keep it open; None if there is none."""
        try:
            named = self.path.lstat()
        except FileNotFoundError:
            self._close_file()
            return None
        if self._file is None or not os.path.samestat(self._file.facts(), named):
            # Replaced: restored from a backup, or edited. Close first: there may be no other descriptor.
            self._close_file()
            self._file = _KeptFile(self.path, secret=self._secret)
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
        self._file, self._parsed = None, self._nothing

    def _was_appended(self, file: _KeptFile, facts: os.stat_result) -> bool:
        """Return, by its size and the last line read, whether the file was only appended to."""
        known = self._parsed
        if known.stamp is None or facts.st_size == known.stamp[1]:
            return False  # of the same size, yet modified: not by an append
        return file.read(known.end - len(known.last), known.end) == known.last

    def _extend(self, known: _Parsed[StateT], data: bytes, stamp: tuple[int, int, int]) -> _Parsed[StateT]:
        # What follows the last line end was never acknowledged.
        lines = data.split(b"\n")[:-1]
        if not lines:
            return _Parsed(known.state, known.end, known.number, known.last, stamp)
        state = known.state.copy()
        for number, line in enumerate(lines, known.number + 1):
            try:
                state.apply(parse_entry(line))
            except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
                self._damage, self._damaged_at = f"{self.path} is damaged: line {number} is no entry", stamp
                raise LedgerError(self._damage) from None
        end = known.end + sum(map(len, lines)) + len(lines)
        return _Parsed(state, end, known.number + len(lines), lines[-1] + b"\n", stamp)

    @contextmanager
    def locked(self) -> Iterator[StateT]:
        """Lock the ledger and return its state, which stays valid until ``append``.

        Waits for the lock: call it on a thread, not on the event loop.

        Raises:
            LedgerError, OSError: as ``read``.
        """
        with self._exclusive_file() as file:
            with self._lock:
                parsed = self._read_on()
            if parsed.end != os.fstat(file.fileno()).st_size:
                # What a power cut left after the last entry must not become the beginning of the next.
                file.truncate(parsed.end)
            yield parsed.state
            if self._lasting is not None:
                # What was appended is kept, and holds, where a full disk has no room for the shorter file.
                with suppress(OSError):
                    self._compact(self._lasting)

    def _compact(self, lasting: Callable[[StateT], Sequence[Entry]]) -> None:
        """Write the file anew, while it is locked; a process that waits for the lock opens the new one."""
        with self._lock:
            parsed = self._read_on()
        entries = lasting(parsed.state)
        if parsed.number >= WORTH_COMPACTING and 2 * len(entries) <= parsed.number:
            mode = PRIVATE if self._secret else mode_without_secrets(self.path.parent)
            write_atomic(self.path, _lines(entries), mode)

    @contextmanager
    def _exclusive_file(self) -> Iterator[FileIO]:
        import fcntl  # noqa: PLC0415 - Unix alone has it, and the client's commands run elsewhere too

        while True:
            with self._opened_to_write() as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                # The last holder of the lock may have replaced the file.
                if os.path.samestat(os.fstat(file.fileno()), self.path.lstat()):
                    yield file
                    return

    def append(self, *entries: Entry) -> None:
        """Add ``entries``, all or none, so that a power cut cannot undo it. Only while it is ``locked``.

        Raises:
            OSError: it could not be written whole; the ledger is unchanged.
        """
        lines = _lines(entries)
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
        # Unbuffered: one write call, whose result is known at once.
        return FileIO(open_state(self.path, _WRITE, secret=self._secret), "rb+")


def _stamp(facts: os.stat_result) -> tuple[int, int, int]:
    # The change time cannot be set: `cp -p` keeps the modification time.
    return (facts.st_ino, facts.st_size, facts.st_ctime_ns)


def parse_entry(line: bytes) -> Entry:
    """Return the entry in a line.

    Raises:
        ValueError, TypeError, RecursionError: there is none.
    """
    entry = json.loads(line.decode("ascii"))
    if not isinstance(entry, dict):
        raise TypeError(entry)
    return entry


def _lines(entries: Sequence[Entry]) -> bytes:
    return "".join(json.dumps(entry, separators=(",", ":")) + "\n" for entry in entries).encode("ascii")


def _write_through(file: FileIO, data: bytes) -> None:
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(file.fileno())
