"""File descriptors that are kept back for what must be read even when connections hold all the others.

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
    """``count`` descriptors that nothing else can take; can be used on several threads."""

    def __init__(self, count: int = RESERVED) -> None:
        self._count = count
        self._kept: list[int] = []
        self._lock = Lock()
        self._fill()

    def run(self, read: Callable[[], _T]) -> _T:
        """Return what ``read`` returns; when no descriptor is left, it is run again with the reserved ones.

        It is to give back what it opens, but for a few: those the reserve takes again when there are any.
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
            self._give_up()
            try:
                return read()
            finally:
                self._fill()

    def close(self) -> None:
        """Give up the descriptors for good."""
        with self._lock:
            self._count = 0
            self._give_up()

    def _fill(self) -> None:
        with suppress(OSError):
            while len(self._kept) < self._count:
                self._kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))

    def _give_up(self) -> None:
        while self._kept:
            os.close(self._kept.pop())
