"""The audit as a hash chain: how a line names the one before it, and the files that hold the lines.

Each line begins with ``prev``, the SHA-256 of the line before. A line that a full disk cut short stays. It
may be too short to name a line, so it is hashed together with the hash that it should have named; thus each
hash covers all lines before it. Must hold only what writer and reader share.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from schemas.files import open_state

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


class LineBuffer:
    """Cuts chunks into lines, and keeps at most ``MAX_LINE_BYTES`` of one."""

    def __init__(self) -> None:
        self._held = b""
        self._length = 0

    @property
    def unfinished(self) -> bytes:
        """The beginning of the last line, which has no end yet."""
        return self._held

    def feed(self, chunk: bytes) -> Iterator[tuple[bytes, bool]]:
        """Add ``chunk``; yield each line that it completes, and whether it was longer than is kept."""
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            self._add(part)
            yield self.take()
        self._add(rest)

    def take(self) -> tuple[bytes, bool]:
        """Return the unfinished line as though it had ended."""
        line, length = self._held, self._length
        self._held, self._length = b"", 0
        return line, length > MAX_LINE_BYTES

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
        """What the next line has to name."""
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
