"""The audit: one JSON line for each decision, before it is acted upon, and one for each outcome.

Appended unbuffered to a file of mode 0600, without a disk sync per line. A call whose decision cannot be
written is not made: every call's first line is the probe that opens the door again. Must never be given
arguments or results (RFC-0005 section 12).
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from schemas.files import PRIVATE

_ENCODER = json.JSONEncoder(separators=(",", ":"))


class AuditUnavailableError(Exception):
    """A line could not be written."""


class AuditLog:
    """The audit in one file.

    Attributes:
        available: whether the newest line was written.
    """

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, PRIVATE)
        os.fchmod(self._descriptor, PRIVATE)
        self._torn = not _ends_with_a_line(path)
        self.available = True

    def write(self, **facts: Any) -> None:
        """Append one line with the time and ``facts``.

        Raises:
            AuditUnavailableError: it could not be written whole.
        """
        line = _ENCODER.encode({"ts_ms": self._now_ms(), **facts}).encode("ascii") + b"\n"
        if self._torn:
            line = b"\n" + line  # what a full disk cut short must not swallow the next line too
        self.available = False
        try:
            written = os.write(self._descriptor, line)
        except OSError as error:
            raise AuditUnavailableError(os.strerror(error.errno or 0)) from None
        self._torn = written != len(line)
        if self._torn:
            raise AuditUnavailableError("the disk took only a part of the line")
        self.available = True

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


def _ends_with_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
