"""The audit as files: one JSON line for each decision, before it is acted upon, and one for each outcome.

Appended unbuffered to a file of mode 0600, and synced to the disk by ``sync``. A call whose decision cannot
be written is not made, and the next call tries again. Each line names the one before
(``relay.audit.files``), from one file to the next. Must never be given arguments or results (RFC-0005
section 12). All of it may block for as long as the disk does: a relay writes by ``relay.audit.writer``.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from attrs import define, field

from relay.audit.files import GENESIS, end_of_chain, line_hash, number_before, numbered
from schemas.error_roots import StateError
from schemas.files import PRIVATE, is_shown_to_group, open_state, sync_directory
from schemas.times import SystemClock, SystemMs

MAX_FILE_BYTES = 64 * 1024 * 1024
RESERVED_BYTES = 64 * 1024 * 1024
"""This much of the disk is reserved for the lines of calls: about 200 000 of them."""
CANARIES_EVENT = "canaries"
"""The ``event`` of a line that sums up the relay's own echoes of a minute."""
_CHECK_INTERVAL_MS = 1000


class AuditUnavailableError(StateError):
    """A line could not be written: the disk is full, or the file is gone."""


class AuditInUseError(StateError):
    """Another relay writes this audit."""


@define(eq=False, repr=False)
class NewLine:
    """What a line says that is to be chained; ``members`` as ``members_of`` returns them."""

    at_ms: SystemMs
    members: str


@define(frozen=True, eq=False, repr=False)
class Chained:
    """``count`` lines ready to be written after that with the hash ``prev``; ``head`` is the last one's."""

    prev: str
    count: int
    data: bytes
    head: str


def chained(prev: str, lines: Sequence[NewLine], after: str = "") -> Chained:
    """Return ``lines`` as they follow that with the hash ``prev``; the first has the member ``after`` too."""
    first, chain = prev, list[bytes]()
    for line in lines:
        text = f'{{"prev":"{prev}",{after}"ts_ms":{line.at_ms},{line.members}}}'
        chain.append(text.encode("ascii"))
        prev, after = hashlib.sha256(chain[-1]).hexdigest(), ""
    return Chained(first, len(chain), b"\n".join(chain) + b"\n", prev)


@define(eq=False, repr=False, slots=False)
class AuditLog:
    """The audit, whose newest lines are in ``path`` and whose full files are beside it.

    One thread at a time writes; any other may call ``sync`` meanwhile.

    Attributes:
        max_bytes: from which size a file is full. May be changed.
        available: whether the newest line was written.
        head: the hash of the newest line.
        synced_head: that of the newest one that is on the disk, by which it can be proven later that none was
            cut off: a power cut takes no line before it.

    Raises:
        AuditInUseError: another relay uses it.
        OSError: the file cannot be used.
    """

    _path: Path
    _now_ms: SystemClock
    max_bytes: int = MAX_FILE_BYTES
    _reserved_bytes: int = RESERVED_BYTES
    available: bool = field(init=False, default=True)
    _file_changes: threading.Lock = field(init=False, factory=threading.Lock)
    _is_new: bool = field(init=False, default=True)  # whether its name may not be on the disk

    def __attrs_post_init__(self) -> None:
        self._checked_ms = self._now_ms()
        with ExitStack() as held:
            self._lock = _locked(self._path)
            held.callback(os.close, self._lock)
            self._descriptor = _opened(self._path)
            held.callback(os.close, self._descriptor)
            self._find_end()
            self.sync()  # what an earlier process has not
            held.pop_all()

    @property
    def path(self) -> Path:
        return self._path

    @property
    def descriptors(self) -> tuple[int, int]:
        """The file that is written, until another is begun, and the lock."""
        return self._descriptor, self._lock

    def _find_end(self) -> None:
        full = numbered(self._path)
        end = end_of_chain([*(file for _, file in full), self._path])
        self.head, self._prev = end.head, end.prev
        self._torn = bool(end.unfinished)
        self._begun = end.linked  # whether this file has a line that names the one before
        self._number = max([number_before(self._path), *(number for number, _ in full)])
        self._after = full[-1][1].name if full else None
        self._left: str | None = None  # the new name of a full file while there is no new one yet
        self._size = os.fstat(self._descriptor).st_size

    def check_space(self) -> None:
        """Return if there is space for lines that can wait. Raises AuditUnavailableError."""
        try:
            disk = os.fstatvfs(self._descriptor)
        except OSError as error:
            raise AuditUnavailableError(str(error)) from error
        if disk.f_bavail * disk.f_frsize < self._reserved_bytes:
            text = f"the disk has less than {self._reserved_bytes >> 20} MiB left, which is kept for calls"
            raise AuditUnavailableError(text)

    @property
    def prev(self) -> str:
        """What the next line names, as far as is known before it is written."""
        return self._prev

    def append_all(self, lines: Sequence[NewLine], ready: Chained | None = None) -> int:
        """Append ``lines`` by one write, and return how many are whole in the file.

        ``ready`` is what ``chained`` has made of them. If some were left out since, or it does not follow the
        file's newest line, they are chained again.

        Raises:
            AuditUnavailableError: none is.
        """
        now = lines[-1].at_ms
        if abs(now - self._checked_ms) >= _CHECK_INTERVAL_MS:  # a clock can be set back
            self._rotate_if_due(now)
        after = ""
        if not self._begun and self._prev != GENESIS:
            # So that a file whose first lines were cut off is not mistaken for a new one.
            after = f'"after":{json.dumps(self._after)},'
        if ready is None or after or (ready.prev, ready.count) != (self._prev, len(lines)):
            ready = chained(self._prev, lines, after)
        # A line that was cut short has no end: end it before these.
        data = b"\n" * self._torn + ready.data
        # It is available while this writes: the health is asked for by another thread.
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            self.available = False
            raise AuditUnavailableError(os.strerror(error.errno or 0)) from None
        if written != len(data):
            self.available = False
            return self._cut_short(data, written)
        self._size += len(data) - len(ready.data)
        self._torn, self._begun = False, True
        self.has_appended(ready)
        return len(lines)

    def takes_more(self, now: SystemMs) -> bool:
        """Return whether ``Chained.data`` alone is what is to be appended next, to this file."""
        return self._begun and not self._torn and abs(now - self._checked_ms) < _CHECK_INTERVAL_MS

    def has_appended(self, ready: Chained) -> None:
        """Take for written what another process has appended whole."""
        self._size += len(ready.data)
        self.head = self._prev = ready.head
        self.available = True

    def has_appended_part(self, data: bytes) -> int:
        """Take for written what another process has appended of ``data``; return how many lines are whole."""
        try:
            written = os.fstat(self._descriptor).st_size - self._size
        except OSError:
            written = 0  # nor can it be written, as the next write finds
        self.available = written >= len(data)
        return self._cut_short(data, max(written, 0))

    def _cut_short(self, data: bytes, written: int) -> int:
        """Note that ``written`` bytes of ``data`` were written, and return how many lines of it are whole."""
        lacks_end_alone = data[written : written + 1] == b"\n"  # which the next write begins with
        data = data[:written]
        self._size += len(data)
        if self._torn and data:
            data, self._torn, self.head = data[1:], False, self._prev
        *ended, rest = data.split(b"\n")
        for line in ended:
            self.head = self._prev = hashlib.sha256(line).hexdigest()
            self._begun = True
        if rest:
            self._torn, self._prev = True, line_hash(self._prev, rest)
            if lacks_end_alone:
                self.head, self._begun = self._prev, True
                return len(ended) + 1
        return len(ended)

    def sync(self) -> None:
        """Have all that was written so far on the disk when this returns. Any thread may call.

        Raises:
            OSError: it cannot be told whether it is there.
        """
        with self._file_changes:
            head, descriptor = self.head, os.dup(self._descriptor)
            is_new, self._is_new = self._is_new, False
        try:
            os.fdatasync(descriptor)
            if is_new:
                sync_directory(self._path.parent)
        except OSError:
            self._is_new = is_new or self._is_new
            raise
        finally:
            os.close(descriptor)
        self.synced_head = head

    def _rotate_if_due(self, now: SystemMs) -> None:
        """Begin a new file if this one is full, or was moved away; without one, the next line tries again."""
        self._size = os.fstat(self._descriptor).st_size  # it may have been cut off by another program
        if self._in_place() and self._size >= self.max_bytes:
            # If the rename fails, this file is continued, and the next check tries again.
            with suppress(OSError):
                self._rename()
        if not self._in_place():
            self._begin_file()
        self._checked_ms = now

    def _in_place(self) -> bool:
        try:
            return os.path.samestat(self._path.lstat(), os.fstat(self._descriptor))
        except OSError:
            return False

    def _rename(self) -> None:
        number = max([self._number, *(number for number, _ in numbered(self._path))]) + 1
        name = f"{self._path.stem}-{number:06}{self._path.suffix}"
        self._path.rename(self._path.with_name(name))
        self._number, self._left = number, name

    def _begin_file(self) -> None:
        is_there = os.fstat(self._descriptor).st_nlink > 0
        try:
            if is_there:
                self.sync()  # a power cut must not take lines from the midst of the chain
            descriptor = _opened(self._path)
        except OSError as error:
            if is_there:
                return  # the old file still exists under another name, so lines in it count
            self.available = False
            raise AuditUnavailableError(f"its file was deleted: {error.strerror or error}") from None
        with self._file_changes:
            old, self._descriptor = self._descriptor, descriptor
            self._is_new = True
        os.close(old)
        self._after, self._left = self._left, None
        self._size = size = os.fstat(descriptor).st_size
        self._begun = size > 0
        self._torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        self.head = self._prev  # a torn line in the old file ended with that file

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._lock)


def _opened(path: Path) -> int:
    descriptor = open_state(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        if not is_shown_to_group(path.parent):
            os.fchmod(descriptor, PRIVATE)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def held_alone(path: Path) -> Iterator[None]:
    """Hold the audit ``path`` alone, and with it the state directory, without writing a line of it.

    Raises:
        AuditInUseError: another relay uses it.
        OSError: its lock file cannot be used.
    """
    lock = _locked(path)
    try:
        yield
    finally:
        os.close(lock)


def _locked(path: Path) -> int:
    """Lock the audit ``path``, by a file of its own: a lock on the audit would be renamed with it."""
    import fcntl  # noqa: PLC0415 - Unix alone has it, and the client's commands run elsewhere too

    descriptor = _opened(path.with_name(f"{path.stem}.lock"))
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise AuditInUseError(
            f"another relay uses the state directory {path.parent}: stop it first"
        ) from None
    return descriptor
