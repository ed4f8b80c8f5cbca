"""Which full files of the audit are removed, and how long its disk lasts.

A file is removed whole, the oldest first, and only after a line that names it and its head: ``verify`` then
expects the oldest file left to continue from that head. The file that is written to is never removed, nor is
one whose successor does not continue it: that is evidence. Must not remove anything itself.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from relay.audit.files import end_of_chain, named, numbered
from relay.audit.log import MAX_FILE_BYTES
from relay.settings.config import AuditKeep
from schemas.error_roots import StateError
from schemas.files import open_state

REMOVED_EVENT = "audit_removed"
_TIME = re.compile(rb'"ts_ms":([0-9]{1,15})')
_TAIL_BYTES = 64 * 1024
_WEEK_MS = 7 * 86_400_000
_LEAST_MS = 3_600_000


class BrokenSuccessionError(StateError):
    """A file does not continue the one before it, which is therefore kept; the text names both."""


@dataclass(frozen=True, slots=True)
class Removal:
    """A full file that is to be removed: its head, which its successor names, and its last line's time."""

    file: Path
    head: str
    until_ms: int


def file_bytes(keep: AuditKeep) -> int:
    """Return from which size a file is full, so that some files are left of what is kept."""
    return MAX_FILE_BYTES if keep.max_bytes is None else min(MAX_FILE_BYTES, keep.max_bytes // 4)


def next_removal(path: Path, keep: AuditKeep, now_ms: int) -> Removal | None:
    """Return the file beside ``path``, the newest, that is to be removed now, if any.

    Raises:
        BrokenSuccessionError: it would be that one, but its successor does not continue it.
        OSError: a file cannot be read.
    """
    full = [file for _, file in numbered(path)]
    if not full:
        return None
    oldest, successor = full[0], [*full[1:], path][0]
    total = sum(file.stat().st_size for file in (*full, path) if file.exists())
    _, until_ms = _times(oldest)
    too_old = keep.max_age_ms is not None and now_ms - until_ms > keep.max_age_ms
    # The last full file is all that is known of the past: only its age takes it.
    too_large = keep.max_bytes is not None and total > keep.max_bytes and len(full) > 1
    if not too_old and not too_large:
        return None
    head = end_of_chain([oldest]).prev
    with os.fdopen(open_state(successor), "rb") as file:
        first = file.readline(_TAIL_BYTES)
    if not first:
        return None  # nothing is in it yet
    if named(first) != head:
        raise BrokenSuccessionError(f"{successor.name} does not continue {oldest.name}, which is kept")
    return Removal(oldest, head, until_ms)


def disk_full_ms(path: Path, now_ms: int) -> int | None:
    """Return when the disk of the audit ``path`` is full at the last week's rate; None if it is too new.

    Raises:
        OSError: a file cannot be read.
    """
    week_ms, written, oldest_ms = now_ms - _WEEK_MS, 0.0, now_ms
    for file in (*(file for _, file in numbered(path)), path):
        if not file.is_file():
            continue  # nothing was recorded yet, or it was moved away
        first_ms, last_ms = _times(file)
        if last_ms < week_ms:
            continue
        share = min(1.0, (last_ms - week_ms) / max(1, last_ms - first_ms))
        written += file.stat().st_size * share
        oldest_ms = min(oldest_ms, max(first_ms, week_ms))
    if now_ms - oldest_ms < _LEAST_MS or not written:
        return None
    disk = os.statvfs(path.parent)
    return now_ms + int(disk.f_bavail * disk.f_frsize / written * (now_ms - oldest_ms))


def _times(file: Path) -> tuple[int, int]:
    """Return the times of the first and of the last line; the file's own if none says."""
    with os.fdopen(open_state(file), "rb") as opened:
        first = _TIME.search(opened.read(_TAIL_BYTES))
        opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
        last = _TIME.findall(opened.read(_TAIL_BYTES))
    changed_ms = int(file.stat().st_mtime * 1000)
    return int(first[1]) if first else changed_ms, int(last[-1]) if last else changed_ms
