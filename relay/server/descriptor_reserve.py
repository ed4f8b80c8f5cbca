"""File descriptors in reserve for files that must be read even when connections use up all others.

A revocation that cannot be read does not take effect. Must not know what is read.
"""

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Lock
from typing import TypeVar

RESERVED = 8

_T = TypeVar("_T")


class DescriptorReserve:
    """Holds ``count`` descriptors. Thread-safe."""

    def __init__(self, count: int = RESERVED) -> None:
        self._count = count
        self._held: list[int] = []
        self._lock = Lock()
        self._fill()

    def run(self, read: Callable[[], _T]) -> _T:
        """Return what ``read`` returns; when no descriptor is left, it is run again with the reserved ones.

        ``read`` must close what it opens; descriptors that it keeps are taken again when some are free.
        """
        try:
            found = read()
        except OSError as error:
            if error.errno not in {errno.EMFILE, errno.ENFILE}:
                raise
        else:
            with self._lock:
                self._fill()
            return found
        with self._lock:
            self._release()
            try:
                return read()
            finally:
                self._fill()

    def close(self) -> None:
        """Release the descriptors."""
        with self._lock:
            self._count = 0
            self._release()

    def _fill(self) -> None:
        with suppress(OSError):
            while len(self._held) < self._count:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _release(self) -> None:
        while self._held:
            os.close(self._held.pop())
