"""The files of an audit: a hash chain of lines, and how they are read while a relay may be writing.

Each line begins with ``prev``, the SHA-256 of the line before. A line that a full disk cut short stays. It
may be too short to name a line, so it is hashed together with the hash that it should have named; thus each
hash covers all lines before it.

Reading holds a few hundred kilobytes, however large the audit and however long a line. A line without an end
is not yielded until its end is written. Must not verify what it reads, and takes no lock.
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from attrs import define, field

from schemas.files import UntrustedFileError, open_state

GENESIS = "0" * 64
"""What the very first line names."""
MAX_LINE_BYTES = 64 * 1024
"""No relay writes a longer line. Of a longer one only this much is examined."""
_CHUNK_BYTES = 2 * MAX_LINE_BYTES
_NAMED = re.compile(rb'\{"prev":"([0-9a-f]{64})"')
_AFTER = re.compile(rb'\{"prev":"[0-9a-f]{64}","after":"[^"]*-([0-9]{6,})\.[^"]*"')


def opening(prev: str) -> bytes:
    """Return the beginning of a line after the line whose hash is ``prev``."""
    return b'{"prev":"%b"' % prev.encode("ascii")


def named(line: bytes) -> str | None:
    """Return the hash that ``line`` names as that of the line before it, if any."""
    match = _NAMED.match(line)
    return match[1].decode("ascii") if match else None


def line_hash(prev: str, line: bytes) -> str:
    """Return the hash of ``line``, without its line end, where ``prev`` is the hash of the line before."""
    own = line if _NAMED.match(line) else prev.encode("ascii") + line
    return hashlib.sha256(own).hexdigest()


@define(eq=False, repr=False)
class LineBuffer:
    """Cuts chunks into lines, and keeps at most ``MAX_LINE_BYTES`` of one."""

    _held: bytes = field(init=False, default=b"")
    _length: int = field(init=False, default=0)

    @property
    def unfinished(self) -> bytes:
        return self._held

    @property
    def is_overlong(self) -> bool:
        return self._length > MAX_LINE_BYTES

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """Add ``chunk``; yield each line that it completes, and whether it was longer than is kept."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            yield self.take()
        self._add(rest)

    def take(self) -> tuple[bytes, bool]:
        """Return the unfinished line as though it had ended."""
        taken = self._held, self.is_overlong
        self._held, self._length = b"", 0
        return taken

    def _add(self, part: bytes) -> None:
        self._held += part[: MAX_LINE_BYTES - len(self._held)]
        self._length += len(part)


@dataclass(frozen=True, slots=True)
class ChainEnd:
    """Where a chain is continued.

    Attributes:
        head: the hash of the newest line that has its end.
        unfinished: what follows that line.
        linked: whether the newest file contains a line that names the one before.
    """

    head: str
    unfinished: bytes = b""
    linked: bool = False

    @property
    def prev(self) -> str:
        return line_hash(self.head, self.unfinished) if self.unfinished else self.head


def end_of_chain(files: Sequence[Path]) -> ChainEnd:
    """Return the end of the chain in ``files``, oldest first.

    Only the end of the newest is read, unless it contains no line that is distinguishable from damage.

    Raises:
        OSError: a file cannot be read.
    """
    if not files:
        return ChainEnd(GENESIS)
    *older, newest = files
    with os.fdopen(open_state(newest), "rb") as file:
        near = _near_the_end(file)
        return near or _walked(file, end_of_chain(older).prev)


def _near_the_end(file: BinaryIO) -> ChainEnd | None:
    start = max(0, file.seek(0, os.SEEK_END) - _CHUNK_BYTES)
    file.seek(start)
    *lines, unfinished = file.read(_CHUNK_BYTES).split(b"\n")
    head = None
    for line in lines[1:] if start else lines:  # the first is cut off unless the file begins with it
        kept = line[:MAX_LINE_BYTES]
        if head is not None or named(kept):
            head = line_hash(head or GENESIS, kept)
    return ChainEnd(head, unfinished[:MAX_LINE_BYTES], linked=True) if head else None


def _walked(file: BinaryIO, head: str) -> ChainEnd:
    buffer, linked = LineBuffer(), False
    file.seek(0)
    while chunk := file.read(_CHUNK_BYTES):
        for line, _ in buffer.feed(chunk):
            head = line_hash(head, line)
            linked = linked or named(line) is not None
    return ChainEnd(head, buffer.unfinished, linked)


def sync_file(path: Path) -> None:
    """Have what is written in ``path`` on the disk. Raises OSError."""
    descriptor = open_state(path)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def numbered(path: Path) -> list[tuple[int, Path]]:
    """Return the full files beside ``path``, the file that is written to: number and path, oldest first."""
    form = re.compile(re.escape(path.stem) + r"-([0-9]{6,})" + re.escape(path.suffix))
    try:
        beside = list(path.parent.iterdir())
    except FileNotFoundError:
        return []
    return sorted((int(match[1]), file) for file in beside if (match := form.fullmatch(file.name)))


def number_before(path: Path) -> int:
    """Return the number of the file that ``path`` names as the one before it; 0 if it names none."""
    with os.fdopen(open_state(path), "rb") as file:
        match = _AFTER.match(file.read(1024))
    return int(match[1]) if match else 0


@dataclass(frozen=True, slots=True)
class Line:
    """One line.

    Attributes:
        file: the name that its file had when it was opened.
        number: counted from 1, from where reading began in that file.
        data: without the line end; cut to ``MAX_LINE_BYTES``, and ``overlong`` if that was needed.
    """

    file: str
    number: int
    data: bytes
    overlong: bool


class AuditLines:
    """The lines of the audit whose newest file is ``path``: all, or those after ``skip_to_last``.

    Attributes:
        files: the names of the files that were opened, oldest first.
        bytes_read: how many bytes were read so far.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files: list[str] = []
        self.bytes_read = 0
        self._buffer = LineBuffer()
        found = self._after(0)
        if found is None:
            raise FileNotFoundError(f"there is no audit in {path.parent}")
        self._begin(*found)

    def close(self) -> None:
        self._file.close()

    @property
    def unfinished(self) -> bool:
        return bool(self._buffer.unfinished)

    def read(self) -> Iterator[Line]:
        """Yield the lines up to the present end. The next call yields those written since.

        Raises:
            OSError: a file cannot be read.
        """
        while True:
            yield from self._rest_of_file()
            found = self._successor()
            if found is None:
                return
            yield from self._rest_of_file()  # written between the last read and the rotation
            if self._buffer.unfinished:
                yield self._line(*self._buffer.take())
            self._file.close()
            self._begin(*found)

    def skip_to_last(self, count: int) -> None:
        for number, path in [(0, self._path), *reversed(numbered(self._path))]:
            try:
                file = _opened(path)
            except FileNotFoundError:
                continue
            start, found = _last_lines(file, count)
            file.seek(start)
            self._file.close()
            self.files.clear()
            self._begin(number, file)
            count -= found
            if count <= 0:
                return

    def _begin(self, number: int, file: FileIO) -> None:
        self._number = number  # 0 for the current file, which has none
        self._file = file
        self._name = Path(str(file.name)).name
        self._lines = 0
        self.files.append(self._name)

    def _rest_of_file(self) -> Iterator[Line]:
        while chunk := self._file.read(_CHUNK_BYTES):
            self.bytes_read += len(chunk)
            for data, overlong in self._buffer.feed(chunk):
                yield self._line(data, overlong)
        if self._buffer.is_overlong:
            # No write that was cut off: as a hole, or a disk that gives zeros.
            yield self._line(*self._buffer.take())

    def _line(self, data: bytes, overlong: bool) -> Line:  # noqa: FBT001 - the two that LineBuffer yields
        self._lines += 1
        return Line(self._name, self._lines, data, overlong)

    def _successor(self) -> tuple[int, FileIO] | None:
        """Return the file after the open one, if that is complete."""
        if self._number:
            return self._after(self._number)
        own = os.fstat(self._file.fileno())
        if _is(self._path, own):
            return None
        number = next((number for number, path in numbered(self._path) if _is(path, own)), 0)
        return self._after(number) if number else self._begun_instead()

    def _begun_instead(self) -> tuple[int, FileIO] | None:
        """Return the file that replaced the open one after it was moved away, once it has content."""
        found = self._current()
        if found and not os.fstat(found[1].fileno()).st_size:
            found[1].close()
            return None
        return found

    def _after(self, number: int) -> tuple[int, FileIO] | None:
        # In this order: if the current file is renamed in between, it is found by its number.
        current = self._current()
        later = [(other, path) for other, path in numbered(self._path) if other > number]
        if not later:
            return current
        if current:
            current[1].close()
        return later[0][0], _opened(later[0][1])

    def _current(self) -> tuple[int, FileIO] | None:
        try:
            return 0, _opened(self._path)
        except FileNotFoundError:
            return None


def _opened(path: Path) -> FileIO:
    """Open ``path``, without waiting for who writes to a pipe in its place."""
    file = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise UntrustedFileError(f"{path} is no regular file: put one there, or remove it")
    return file


def _is(path: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.stat(), status)
    except FileNotFoundError:
        return False


def _last_lines(file: FileIO, count: int) -> tuple[int, int]:
    """Return where the last ``count`` whole lines of ``file`` begin, and how many there are up to that."""
    position, found = file.seek(0, os.SEEK_END), 0
    while position:
        start = max(0, position - _CHUNK_BYTES)
        block = os.pread(file.fileno(), position - start, start)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            found += 1
            if found > count:
                return start + at + 1, count
        position = start
    return 0, found
