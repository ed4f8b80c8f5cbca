"""``linux.files``: text files below the directories that the board's owner names, and lists of what is there.

Files are read in threads, of which few may wait for a file system that does not answer. Must not read what no
directory of the owner's has, whatever its name is, nor begin a page within a line: a secret is known by what
stands before it.
"""

import errno
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from kubelet.ceiling import OutsideCeilingError
from kubelet.handlers.base import HandlerFactory, ToolFault
from kubelet.handlers.beneath import Beneath, OutsideError, open_beneath
from kubelet.handlers.machine import LinuxHandler, exact, fitting, page
from kubelet.handlers.redaction import redacted_lines
from schemas.text import free_text

T = TypeVar("T")

USUAL_LINES = 100
USUAL_ENTRIES = 100
LONGEST_TEXT = 4096
_MOST_ENTRIES = 20_000
_MOST_READ = 64 * 1024
_BEFORE = 16 * 1024
"""Read before a page, for what began there: the longest private key in PEM has some 12 KiB."""
_MOST_SKIPPED = 8 * 1024 * 1024
_FAULTS = {
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EIO, errno.ENODEV, errno.ENXIO, errno.ETIMEDOUT), "unreadable"
    ),
    errno.ENOSYS: "no_openat2",
}
_LINE = re.compile(rb"[^\n]*\n|[^\n]+")
_NO_TEXT = frozenset(range(32)) - frozenset(b"\t\n\v\f\r\b\a\x1b")


class _Page(NamedTuple):
    """Whole lines of a file: the first begins at ``start``, and what follows the last at ``end``."""

    lines: Sequence[bytes]
    start: int
    end: int


class FilesHandler(LinuxHandler):
    """Answers with what lies beneath ``directories``."""

    @property
    def missing(self) -> str | None:
        """That the kernel does not keep a path within its directory."""
        if not self.directories:
            return None  # nothing is opened, and what would open it takes memory
        root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.close(open_beneath(root, "."))
        except OSError as error:
            return f"there is no openat2: {error.strerror}"
        finally:
            os.close(root)
        return None

    @property
    def lacks(self) -> str | None:
        """That no directory is named."""
        if self.directories:
            return None
        return 'nothing is shown: name directories below ["linux.files"] in kubelet.toml'

    @property
    def directories(self) -> Sequence[str]:
        """What the board's owner names: no directory where nothing is said."""
        return self.ceiling.of("linux.files").allowed("directories")

    def denies(self, path: str) -> bool:
        """Return whether the board's owner keeps ``path`` back, or a directory that it is in."""
        table = self.ceiling.of("linux.files")
        return any(table.denies("directories", str(each)) for each in (path, *PurePath(path).parents))

    async def snapshot(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return a page of what is in a directory; of the owner's directories where none is named.

        Raises:
            ToolFault: a fault of the row.
        """
        start, limit = arguments.get("start", 0), arguments.get("limit", USUAL_ENTRIES)
        if "path" in arguments:
            entries, withheld, complete = await self._answered(self._listed, arguments["path"])
        else:
            facts = {"type": "directory", "size": None, "modified_ms": None}
            entries, withheld, complete = [{"name": each, **facts} for each in self.directories], 0, True
        shown, following = page(entries, start, limit)
        return {
            "total": len(entries),
            "withheld": withheld,
            "complete": complete,
            "entries": list(shown),
            "next": following,
        }

    async def get(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return whole lines of a file, from ``offset``, or the last ones.

        Raises:
            ToolFault: a fault of the row.
        """
        limit = arguments.get("lines", USUAL_LINES)
        if "tail" in arguments and "offset" in arguments:
            raise ToolFault("offset_and_tail")
        return await self._answered(
            self._read, arguments["path"], arguments.get("offset", 0), arguments.get("tail"), limit
        )

    async def _answered(self, call: Callable[..., T], *arguments: object) -> T:
        """Return what ``call`` does in a thread.

        Raises:
            ToolFault: ``no_answer``, or what the system says of the file.
            OutsideCeilingError: it is outside of the owner's directories, or kept back.
        """
        try:
            return await self.calls.run(lambda: call(*arguments))
        except OutsideError:
            raise OutsideCeilingError("linux.files", "directories") from None
        except OSError as error:
            raise ToolFault(_FAULTS.get(error.errno or 0, "no_such_file"), error.strerror or "") from error

    def _beneath(self) -> Beneath:
        return Beneath(self.directories, self.denies, self.own.paths)

    def _listed(self, path: str) -> tuple[list[dict[str, Any]], int, bool]:
        beneath, shown, withheld, complete = self._beneath(), [], 0, True
        with beneath.opened(path, stat.S_ISDIR) as directory:
            for count, entry in enumerate(os.scandir(directory)):
                if count == _MOST_ENTRIES:
                    complete = False
                    break
                try:
                    if beneath.shows(directory, entry.name):
                        shown.append(_entry(entry.name, entry.stat(follow_symlinks=False)))
                    else:
                        withheld += 1
                except OSError:
                    continue  # it is gone
        shown.sort(key=lambda each: str(each["name"]))
        return shown, withheld, complete

    def _read(self, path: str, offset: int, tail: int | None, limit: int) -> dict[str, Any]:
        with self._beneath().opened(path, stat.S_ISREG) as file:
            found = os.fstat(file)
            if tail is not None:
                before, part = _last(file, found.st_size, tail)
            else:
                before, part = _from(file, found.st_size, offset)
        if not _NO_TEXT.isdisjoint(b"".join(part.lines)):
            raise ToolFault("not_text")
        decoded = (line.decode("utf-8", "replace").rstrip("\r\n") for line in (*before, *part.lines))
        lines = list(redacted_lines(decoded))[len(before) :]
        shown = fitting({"text": free_text(line, LONGEST_TEXT)} for line in lines[: tail or limit])
        end = part.start + sum(map(len, part.lines[: len(shown)]))
        if len(shown) == len(part.lines):
            end = part.end
        return {
            "size": exact(found.st_size),
            "modified_ms": exact(max(0, found.st_mtime_ns // 1_000_000)),
            "offset": part.start,
            "lines": shown,
            "next": end if end < found.st_size else None,
        }


def _entry(name: str, found: os.stat_result) -> dict[str, Any]:
    mode = found.st_mode
    types = (("file", stat.S_ISREG), ("directory", stat.S_ISDIR), ("link", stat.S_ISLNK))
    return {
        "name": name,
        "type": next((name for name, is_one in types if is_one(mode)), "other"),
        "size": exact(found.st_size) if stat.S_ISREG(mode) else None,
        "modified_ms": exact(max(0, found.st_mtime_ns // 1_000_000)),
    }


def _from(file: int, size: int, offset: int) -> tuple[list[bytes], _Page]:
    """Return the lines that begin at ``offset`` or after it, with some that are before them."""
    first = max(0, offset - _BEFORE)
    context = os.pread(file, offset - first, first) if offset else b""
    start = offset
    if context and not context.endswith(b"\n"):
        start = _next_line(file, min(offset, size), size)
        context += os.pread(file, min(start - offset, _MOST_READ), offset)
        if not _begins_line(file, start):
            return [], _Page([], start, start)  # a caller that goes on from here skips more of it
    data = os.pread(file, _MOST_READ, start)
    lines = _LINE.findall(data)
    if len(lines) > 1 and start + len(data) < size and not data.endswith(b"\n"):
        lines.pop()  # the rest of it is on the next page
    end = start + sum(map(len, lines))
    if len(lines) == 1 and not lines[0].endswith(b"\n"):
        end = _next_line(file, end, size)
    return _LINE.findall(context), _Page(lines, start, end)


def _last(file: int, size: int, number: int) -> tuple[list[bytes], _Page]:
    """Return the last ``number`` lines, with some that are before them."""
    first = max(0, size - _MOST_READ)
    lines = _LINE.findall(os.pread(file, size - first, first))
    if lines and not _begins_line(file, first):
        first += len(lines.pop(0))
    before = lines[:-number]
    return before, _Page(lines[-number:], first + sum(map(len, before)), size)


def _begins_line(file: int, at: int) -> bool:
    return at == 0 or os.pread(file, 1, at - 1) == b"\n"


def _next_line(file: int, start: int, size: int) -> int:
    """Return where the line that begins after ``start`` begins; the end of the file if none does.

    Where ``_MOST_SKIPPED`` bytes have no end of a line, it is where these end.
    """
    at = start
    while at < min(size, start + _MOST_SKIPPED) and (data := os.pread(file, _MOST_READ, at)):
        if (found := data.find(b"\n")) >= 0:
            return at + found + 1
        at += len(data)
    return min(at, size)


HANDLER: HandlerFactory = FilesHandler
