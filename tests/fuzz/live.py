"""What the targets of live sessions share: an event loop, the lines of an input, and how an end may close.

An input is lines: in which state of the session it begins, and then a frame a line. ``@CALL@`` in a frame
stands for the id of the command that is in flight, ``@ASKED@`` for that of the challenge or the ``auth``,
and ``@TOKEN@`` for a good token. A line that begins with ``!`` is written as it is, in place of a frame.
"""

import asyncio
import atexit
import mmap
import os
import struct
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from schemas.frames import Frame, FrameReader
from schemas.registry import SchemaRegistry
from schemas.session import CloseCode
from tests.fakes.lines import LogLines

MAX_FRAMES: Final = 64
_LIBRARY_CODES: Final = frozenset({1002, 1007, 1008, 1009})
"""RFC 6455: what is no WebSocket, no text, over the rate, or too large."""
_COUNTS: Final = "EDGE_FUZZ_COUNTS"


@dataclass(frozen=True, slots=True)
class Lines:
    """An input: the state in which it begins, and what is sent."""

    state: bytes
    frames: tuple[bytes, ...]

    @classmethod
    def of(cls, data: bytes) -> "Lines":
        """Return the lines of ``data``, at most ``MAX_FRAMES``."""
        state, *frames = data.split(b"\n")[: MAX_FRAMES + 1]
        return cls(state, tuple(frames))


def check_closed(code: int | None, lines: Lines) -> None:
    """Assert that a session may be closed so: by a declared code, or without one by what is no WebSocket."""
    declared = code in {*map(int, CloseCode)} | _LIBRARY_CODES
    assert declared or (code is None and _is_cut_off(lines)), code


def _is_cut_off(lines: Lines) -> bool:
    # Before it is admitted, a peer may send eight frames; what exceeds them is not answered.
    return lines.state == b"stranger" or any(frame.startswith(b"!") for frame in lines.frames)


def check_log(lines: LogLines) -> None:
    """Assert that nothing unexpected was logged, and forget what was."""
    text = lines.getvalue()
    assert "Traceback" not in text, text
    assert '"level": "critical"' not in text, text
    lines.seek(0)
    lines.truncate()


class CountingReader(FrameReader):
    """A reader of frames that counts them."""

    def __init__(self, registry: SchemaRegistry) -> None:
        super().__init__(registry)
        self.count = 0

    def read(self, *arguments: Any) -> Frame:
        """Count a frame, and read it."""
        self.count += 1
        return super().read(*arguments)


class LoopKept:
    """An event loop that lasts as long as the process; what it reports by itself is a finding.

    Attributes:
        stack: what is closed before it.
    """

    def __init__(self) -> None:
        self.stack = AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._faults: list[dict[str, Any]] = []
        self._loop.set_exception_handler(lambda _, context: self._faults.append(context))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` to its end."""
        self._loop.run_until_complete(work)
        assert not self._faults, self._faults.pop()

    def close(self) -> None:
        """Close what is on the stack, and the loop."""
        self._loop.run_until_complete(self.stack.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()


@cache
def loop() -> LoopKept:
    """Return the loop of this process."""
    made = LoopKept()
    atexit.register(made.close)
    return made


class FrameCounts:
    """How many frames were sent in an input's place, and read by the other end, in all processes of a run.

    In a file that ``EDGE_FUZZ_COUNTS`` names: libFuzzer ends its process without a word to it.
    """

    def __init__(self, path: Path | None) -> None:
        self._map: mmap.mmap | None = None
        if path is not None:
            path.touch()
            with path.open("r+b") as file:
                file.truncate(self._SIZE)
                self._map = mmap.mmap(file.fileno(), self._SIZE)

    _FORM = struct.Struct("<QQ")
    _SIZE = _FORM.size

    def add(self, sent: int, read: int) -> None:
        """Count frames."""
        if self._map is not None:
            before = self._FORM.unpack_from(self._map)
            self._FORM.pack_into(self._map, 0, before[0] + sent, before[1] + read)


@cache
def counts() -> FrameCounts:
    """Return the counts of this process."""
    path = os.environ.get(_COUNTS)
    return FrameCounts(Path(path) if path else None)
