"""Cuts what a local client sends into lines, and holds no more of a line than a line may have.

Must not parse: a line is bytes here.
"""

from collections.abc import Iterator

MAX_LINE_BYTES = 256 * 1024


class LineSplitter:
    """The lines of one connection. A line over the limit is dropped byte by byte as it comes in."""

    def __init__(self, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()
        self._is_dropping = False

    def feed(self, data: bytes) -> Iterator[bytes | None]:
        """Yield each line that ``data`` ends, without its end; None as soon as a line is over the limit."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            yield from self._line(data[start:end])
            start = end + 1
        yield from self._take(data[start:])

    def _line(self, rest: bytes) -> Iterator[bytes | None]:
        yield from self._take(rest)
        if not self._is_dropping:
            yield bytes(self._held).removesuffix(b"\r")
        self._held.clear()
        self._is_dropping = False

    def _take(self, piece: bytes) -> Iterator[None]:
        if self._is_dropping:
            return
        if len(self._held) + len(piece) > self._max_bytes:
            self._held.clear()
            self._is_dropping = True
            yield None
            return
        self._held += piece
