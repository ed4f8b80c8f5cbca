"""The lines of an audit, read oldest first through all its files, while a relay may be writing and rotating.

Holds a few hundred kilobytes, however large the audit and however long a line. A line without an end is not
yielded until its end is written. Must not verify what it reads, and takes no lock.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from relay.audit.chain import LineBuffer, numbered

_CHUNK_BYTES = 128 * 1024


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
        """Close the file that is open."""
        self._file.close()

    @property
    def unfinished(self) -> bool:
        """Whether the last line has no end yet."""
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
        """Skip to the beginning of the last ``count`` lines."""
        for number, path in [(0, self._path), *reversed(numbered(self._path))]:
            try:
                file = FileIO(path)
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
        return later[0][0], FileIO(later[0][1])

    def _current(self) -> tuple[int, FileIO] | None:
        try:
            return 0, FileIO(self._path)
        except FileNotFoundError:
            return None


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
