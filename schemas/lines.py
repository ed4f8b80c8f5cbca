"""Lines on their way to a stream that may be slow, full or read by no one.

A write to a pipe that is not read blocks its writer, so a separate thread writes, from a queue that is
bounded in bytes. What does not fit is lost and counted, and the count is written when the queue has space.
The level from which on a program logs can be changed while it runs. Must not interpret a line.
"""

import os
import threading
from collections import deque
from collections.abc import Callable
from enum import StrEnum
from functools import partial
from typing import TextIO

from schemas.threads import started

MAX_WAITING_BYTES = 1024 * 1024
FLUSH_S = 2.0
GATHER_S = 0.1
"""How long the first line of a batch waits for others: to wake a thread costs as much as to write 30 lines.

So much of the log is lost if the process is killed. The audit is written before a call is made."""
_BATCH_BYTES = 64 * 1024


class LineWriter:
    """Writes lines in order, from a thread; ``write`` may be called from any thread and never waits.

    ``lost_line`` gives the line that says how many were lost since the last such line. ``on_lost`` is called
    with how many have just been, from any thread.

    Raises:
        NoThreadError: the system has no thread left.
    """

    def __init__(
        self,
        stream: TextIO,
        lost_line: Callable[[int], str],
        on_lost: Callable[[int], None] = lambda _: None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        self._is_terminal = stream.isatty()
        self._write = _unbuffered(stream)
        self._lost_line = lost_line
        self._on_lost = on_lost
        self._max_waiting_bytes = max_waiting_bytes
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._lost = 0
        self._closed = False
        self._cut = False
        self._changed = threading.Condition()
        # A daemon: one that is blocked in a write must not keep the process from ending.
        self._thread = started(threading.Thread(target=self._run, name="log", daemon=True))

    def write(self, line: str) -> None:
        """Take ``line``, which ends with its line break, or count it as lost."""
        data = line.encode("utf-8", "backslashreplace")
        with self._changed:
            fits = not self._closed and self._waiting_bytes + len(data) <= self._max_waiting_bytes
            if fits:
                before = self._waiting_bytes
                self._waiting_bytes += len(data)
                # Not for each line: the thread is awake, and gathers until a batch is full.
                if not self._waiting or before < _BATCH_BYTES <= self._waiting_bytes:
                    self._changed.notify()
                self._waiting.append(data)
        if not fits:
            self._lose(1)

    def isatty(self) -> bool:
        return self._is_terminal

    def close(self, timeout_s: float = FLUSH_S) -> None:
        """Write what waits, and the count of what was lost, for ``timeout_s`` at most."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _lose(self, count: int) -> None:
        with self._changed:
            self._lost += count
        self._on_lost(count)

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            lost, data = batch
            missing = self._put(data)
            # Only after lines that came through: a stream that fails would lose the count as well.
            unreported = lost if missing or (lost and self._put(self._lost_line(lost).encode("utf-8"))) else 0
            with self._changed:
                self._waiting_bytes -= len(data)
                self._lost += unreported
            if missing:
                self._lose(missing)
            elif unreported and not data:
                return  # it is closed, and the count of lost lines cannot be written

    def _next_batch(self) -> tuple[int, bytes] | None:
        """Wait for lines; return how many were lost before, and some of them. None when all is written."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if not self._waiting and not self._lost:
                return None
            self._changed.wait_for(lambda: self._closed or self._waiting_bytes >= _BATCH_BYTES, GATHER_S)
            data = bytearray()
            while self._waiting and len(data) < _BATCH_BYTES:
                data += self._waiting.popleft()
            lost, self._lost = self._lost, 0
            return lost, bytes(data)

    def _put(self, data: bytes) -> int:
        """Write ``data``; return how many of its lines are lost."""
        # A line that was cut off when a write failed ends here, and not in the next one.
        whole = b"\n" * self._cut + data
        rest = memoryview(whole)
        try:
            while rest:
                rest = rest[self._write(rest) :]
        except (OSError, ValueError):
            pass  # a full disk, a dead reader, a closed stream: the caller counts what is missing
        done = whole[: len(whole) - len(rest)]
        if done:
            self._cut = not done.endswith(b"\n")
        return min(data.count(b"\n"), rest.tobytes().count(b"\n"))


def _unbuffered(stream: TextIO) -> Callable[[memoryview], int]:
    """Return what writes to ``stream``, past its buffer if it has a descriptor.

    The buffer has a lock, which the interpreter wants when it ends: it would abort if a thread that is
    blocked in a write held it.
    """
    try:
        return partial(os.write, stream.fileno())
    except (OSError, ValueError):  # a stream in memory

        def write(data: memoryview) -> int:
            stream.write(bytes(data).decode("utf-8"))
            return len(data)

        return write


_RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4}


class LogLevel(StrEnum):
    """The levels that the operator can choose."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogThreshold:
    """Decides which lines are logged. ``level`` may be changed."""

    def __init__(self, level: LogLevel = LogLevel.INFO) -> None:
        self.level = level

    def admits(self, level: str) -> bool:
        return _RANKS[level] >= _RANKS[self.level]
