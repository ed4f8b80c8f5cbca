"""What the targets of live sessions share: an event loop, the lines of an input, and how an end may close.

An input is lines: in which state of the session it begins, and then a frame a line. ``@CALL@`` in a frame
stands for the id of the command that is in flight, ``@ASKED@`` for that of the challenge or the ``auth``,
and ``@TOKEN@`` for a good token. A line that begins with ``!`` is written as it is, in place of a frame.

The connections and the time of these sessions are those of ``memory_loop``; all else is the product's own.
"""

import asyncio
import atexit
import logging
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any, Final, TypeVar

from schemas.session import CloseCode
from tests.fakes.lines import LogLines
from tests.fuzz.memory_loop import MemoryLoop

ResultT = TypeVar("ResultT")

MAX_FRAMES: Final = 64
MOST_TASKS: Final = 100
_LIBRARY_CODES: Final = frozenset({1002, 1007, 1008, 1009})
"""RFC 6455: what is no WebSocket, no text, over the rate, or too large."""
CLOSE: Final = 8
_PING, _PONG = 9, 10
_MARK: Final = b"all that was sent was read"
_SETTLED_S: Final = 1.0
"""Longer than anything lets data wait that it could read."""
BETWEEN_INPUTS_S: Final = 0.005
"""In which all ends that there is to do, and a relay admits a few nodes more."""


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

    @property
    def has_raw_bytes(self) -> bool:
        """Whether anything in it is sent that need not be a frame."""
        return any(frame.startswith(b"!") for frame in self.frames)

    def wire(self, names: Mapping[bytes, str], *, masked: bool) -> bytes:
        """Return the bytes of all frames, with what ``names`` stand for, and behind them a ping."""
        wire = b""
        for frame in self.frames:
            line = frame
            for name, value in names.items():
                line = line.replace(name, value.encode())
            wire += line[1:] if line.startswith(b"!") else ws_frame(line, masked=masked)
        return wire + ws_frame(_MARK, opcode=_PING, masked=masked)


def ws_frame(payload: bytes, *, opcode: int = 1, masked: bool) -> bytes:
    """Return one frame of a WebSocket: as a client sends it, under a mask of zeros, or as a server does."""
    size = len(payload)
    short = size if size < 126 else 126 if size < 65_536 else 127
    length = b"" if short < 126 else size.to_bytes(2 if short == 126 else 8, "big")
    return bytes([0x80 | opcode, masked << 7 | short]) + length + bytes(4 * masked) + payload


async def read_frame(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Return opcode and payload of the next frame, which is masked or not.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: there is none.
    """
    first, second = await reader.readexactly(2)
    size = second & 0x7F
    if size > 125:
        size = int.from_bytes(await reader.readexactly(2 if size == 126 else 8), "big")
    mask = await reader.readexactly(4) if second & 0x80 else b""
    payload = await reader.readexactly(size)
    if mask:
        repeated = (mask * (size // 4 + 1))[:size]
        payload = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
    return first & 0x0F, payload


class Left(Enum):
    """What became of a connection that was not closed with a code."""

    OPEN = "it goes on"
    WAITING = "it waits for the rest of a frame"
    CUT_OFF = "it was ended without a code"


async def outcome(reader: asyncio.StreamReader) -> Left | int:
    """Return what became of the connection when all that was sent was read: the code if it was closed."""
    try:
        async with asyncio.timeout(_SETTLED_S):
            while True:
                opcode, payload = await read_frame(reader)
                if opcode == _PONG and payload == _MARK:
                    return Left.OPEN
                if opcode == CLOSE:
                    return int.from_bytes(payload[:2], "big")
    except (asyncio.IncompleteReadError, ConnectionError):
        return Left.CUT_OFF
    except TimeoutError:
        return Left.WAITING


def check_outcome(found: Left | int, lines: Lines) -> None:
    """Assert that it may become that of a connection: it goes on, or is closed with a declared code.

    Without a code only where bytes were sent that need not be a WebSocket, or too much before the handshake,
    which is not answered.
    """
    if isinstance(found, int):
        assert found in {*map(int, CloseCode)} | _LIBRARY_CODES, found
    elif found is Left.CUT_OFF:
        assert lines.state == b"stranger" or lines.has_raw_bytes
    else:
        assert found is Left.OPEN or lines.has_raw_bytes


def check_log(lines: LogLines) -> None:
    """Assert that nothing unexpected was logged, and forget what was."""
    text = lines.getvalue()
    assert "Traceback" not in text, text
    assert '"level": "critical"' not in text, text
    lines.seek(0)
    lines.truncate()


class _Faults(logging.Handler):
    """Takes what is logged as an error for a fault."""

    def __init__(self, faults: list[dict[str, Any]]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append({"message": self.format(record)})


class LoopKept:
    """An event loop that lasts as long as the process; what it reports by itself is a finding.

    Attributes:
        loop: the loop.
        stack: what is closed before it.
    """

    def __init__(self) -> None:
        self.loop = MemoryLoop()
        self.stack = AsyncExitStack()
        self._faults: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self._faults.append(context))
        self._logged = _Faults(self._faults)

    def run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run ``work`` to its end, and return its result."""
        with self._server_log():
            result = self.loop.run_until_complete(work)
        assert not self._faults, self._faults.pop()
        return result

    def close(self) -> None:
        """Close what is on the stack, and the loop."""
        with self._server_log():
            self.loop.run_until_complete(self.stack.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    @contextmanager
    def _server_log(self) -> Iterator[None]:
        """Take in what the server logs of an application, as the servers of other tests do at other times."""
        log = logging.getLogger("uvicorn.error")
        log.addHandler(self._logged)
        try:
            yield
        finally:
            log.removeHandler(self._logged)


@cache
def kept() -> LoopKept:
    """Return the loop of this process."""
    made = LoopKept()
    atexit.register(made.close)
    return made
