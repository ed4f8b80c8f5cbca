"""The audit: one JSON line for each decision, before it is acted upon, and one for each outcome.

Appended unbuffered to a file of mode 0600, without a disk sync per line. A call whose decision cannot be
written is not made, and the next call tries again. Each line names the one before
(``relay.audit.files``), from one file to the next. Must never be given arguments or results (RFC-0005
section 12).
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from relay.ascii_json import members_of
from relay.audit.files import GENESIS, end_of_chain, line_hash, number_before, numbered
from relay.settings.environment import SystemClock
from schemas.error_roots import StateError
from schemas.files import PRIVATE, is_shown_to_group, open_state

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


class AuditLog:
    """The audit, whose newest lines are in ``path`` and whose full files are beside it.

    Attributes:
        available: whether the newest line was written.
        head: the hash of the newest line, by which it can be proven later that none was cut off.

    Raises:
        AuditInUseError: another relay uses it.
        OSError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path,
        now_ms: SystemClock,
        max_bytes: int = MAX_FILE_BYTES,
        reserved_bytes: int = RESERVED_BYTES,
    ) -> None:
        self._path = path
        self._now_ms = now_ms
        self._max_bytes = max_bytes
        self._reserved_bytes = reserved_bytes
        self._checked_ms = now_ms()
        self.available = True
        with ExitStack() as held:
            self._lock = _locked(path)
            held.callback(os.close, self._lock)
            self._descriptor = _opened(path)
            held.callback(os.close, self._descriptor)
            self._find_end()
            held.pop_all()

    def _find_end(self) -> None:
        full = numbered(self._path)
        end = end_of_chain([*(file for _, file in full), self._path])
        self.head, self._prev = end.head, end.prev
        self._torn = bool(end.unfinished)
        self._begun = end.linked  # whether this file has a line that names the one before
        self._number = max([number_before(self._path), *(number for number, _ in full)])
        self._after = full[-1][1].name if full else None
        self._left: str | None = None  # the new name of a full file while there is no new one yet

    def write(self, **facts: Any) -> None:
        """Append one line with the time and ``facts``.

        Raises:
            AuditUnavailableError: it could not be written whole.
        """
        self.append(members_of(facts))

    def write_if_space(self, **facts: Any) -> None:
        """As ``write``, for lines that can wait: not into the space that is reserved for calls.

        Raises:
            AuditUnavailableError: it could not be written, or there is too little space.
        """
        disk = os.fstatvfs(self._descriptor)
        if disk.f_bavail * disk.f_frsize < self._reserved_bytes:
            text = f"the disk has less than {self._reserved_bytes >> 20} MiB left, which is kept for calls"
            raise AuditUnavailableError(text)
        self.write(**facts)

    def append(self, members: str) -> None:
        """Append one line with the time and ``members``, as ``members_of`` returns them.

        Raises:
            AuditUnavailableError: it could not be written whole.
        """
        now = self._now_ms()
        if abs(now - self._checked_ms) >= _CHECK_INTERVAL_MS:  # a clock can be set back
            self._rotate_if_due(now)
        after = ""
        if not self._begun and self._prev != GENESIS:
            # So that a file whose first lines were cut off is not mistaken for a new one.
            after = f'"after":{json.dumps(self._after)},'
        line = f'{{"prev":"{self._prev}",{after}"ts_ms":{now},{members}}}'.encode("ascii")
        # A line that was cut short has no end: end it before this one.
        data = b"\n%b\n" % line if self._torn else line + b"\n"
        self.available = False
        try:
            written = os.write(self._descriptor, data)
        except OSError as error:
            raise AuditUnavailableError(os.strerror(error.errno or 0)) from None
        if written != len(data):
            self._cut_short(data[:written])
            raise AuditUnavailableError("the disk took only a part of the line")
        self.head = self._prev = hashlib.sha256(line).hexdigest()
        self._torn, self._begun = False, True
        self.available = True

    def _cut_short(self, data: bytes) -> None:
        if self._torn and data:
            data, self._torn, self.head = data[1:], False, self._prev
        if data:
            self._torn, self._prev = True, line_hash(self._prev, data)

    def _rotate_if_due(self, now: int) -> None:
        """Begin a new file if this one is full, or was moved away."""
        self._checked_ms = now
        if self._in_place():
            if os.fstat(self._descriptor).st_size < self._max_bytes:
                return
            # If the rename fails, this file is continued, and the next check tries again.
            with suppress(OSError):
                self._rename()
        if not self._in_place():
            self._begin_file()

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
        try:
            descriptor = _opened(self._path)
        except OSError as error:
            if os.fstat(self._descriptor).st_nlink:
                return  # the old file still exists under another name, so lines in it count
            self.available = False
            raise AuditUnavailableError(f"its file was deleted: {error.strerror or error}") from None
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._after, self._left = self._left, None
        size = os.fstat(descriptor).st_size
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
