"""The two ends of a connection that exists in memory: asyncio's transports without sockets.

What one end writes, the other receives in a later turn of the event loop, in one piece if it was written in
one turn. An end that is closed ends what the other reads; one that is closed with data unread resets the
connection, as a kernel does. Must not know what is sent.
"""

import asyncio
from typing import Final, Protocol, cast

_Address = tuple[str, int]

_HIGH_WATER: Final = 64 * 1024


class _Reader(Protocol):
    """What is called of a protocol: that of a stream of bytes."""

    def data_received(self, data: bytes) -> None: ...

    def eof_received(self) -> bool | None: ...

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...

    def connection_lost(self, exc: Exception | None) -> None: ...


class MemoryTransport(asyncio.Transport):
    """One end of a connection; ``begin`` gives it a protocol.

    Attributes:
        other: the other end.
        received: what has arrived, and was not read.
    """

    other: "MemoryTransport"
    _protocol: asyncio.BaseProtocol

    def __init__(self, loop: asyncio.AbstractEventLoop, own: _Address, other: _Address) -> None:
        super().__init__({"sockname": own, "peername": other})
        self._loop = loop
        self.received = bytearray()
        self._has_begun = self._is_reading = False
        self._is_due = False
        self._is_at_end = self._has_told_end = False
        self._has_written_end = False
        self._is_closing = False
        self._high_water = _HIGH_WATER
        self._is_full = False

    @classmethod
    def pair(
        cls, loop: asyncio.AbstractEventLoop, near: _Address, far: _Address
    ) -> "tuple[MemoryTransport, MemoryTransport]":
        """Return both ends of a new connection."""
        ends = cls(loop, near, far), cls(loop, far, near)
        ends[0].other, ends[1].other = ends[1], ends[0]
        return ends

    def begin(self, protocol: asyncio.BaseProtocol) -> None:
        """Connect ``protocol`` to this end."""
        self._protocol = protocol
        self._has_begun = self._is_reading = True
        protocol.connection_made(self)
        self.schedule()

    # --- what asyncio asks of a transport

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._has_written_end:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._is_closing or not data:
            return
        other = self.other
        if other.is_closing():
            self.break_off(ConnectionResetError("Connection reset by peer"))
            return
        other.received += data
        other.schedule()
        if not self._is_full and len(other.received) > self._high_water:
            self._is_full = True
            self._reader.pause_writing()

    def write_eof(self) -> None:
        self._has_written_end = True
        self.other.end()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        self.break_off(None)

    def abort(self) -> None:
        self.break_off(None)

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self._is_reading = False

    def resume_reading(self) -> None:
        self._is_reading = True
        self.schedule()

    def is_reading(self) -> bool:
        return self._is_reading and not self._is_closing

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:  # noqa: ARG002 - resumed when all is read
        self._high_water = _HIGH_WATER if high is None else high

    def get_write_buffer_size(self) -> int:
        return len(self.other.received)

    # --- between the ends

    def schedule(self) -> None:
        """Have what has arrived read."""
        if self._has_begun and self._is_reading and not self._is_due:
            self._is_due = True
            self._loop.call_soon(self._take)

    def _take(self) -> None:
        """Give the protocol what has arrived, or the end of it."""
        self._is_due = False
        if self._is_closing or not self._is_reading:
            return
        if self.received:
            data = bytes(self.received)
            self.received.clear()
            self.other.was_read()
            self._reader.data_received(data)
            if self._is_at_end:
                self.schedule()
        elif self._is_at_end and not self._has_told_end:
            self._has_told_end = True
            if not self._reader.eof_received():
                self.close()

    def was_read(self) -> None:
        """Note that the other end has read all."""
        if self._is_full and not self._is_closing:
            self._is_full = False
            self._reader.resume_writing()

    def end(self) -> None:
        """Let the protocol read no more than what has arrived."""
        self._is_at_end = True
        self.schedule()

    def break_off(self, error: Exception | None) -> None:
        """Close this end, for ``error`` if there is one."""
        if self._is_closing:
            return
        self._is_closing = True
        if self.received:
            self.other.break_off(ConnectionResetError("Connection reset by peer"))
        else:
            self.other.end()
        if self._has_begun:
            self._loop.call_soon(self._reader.connection_lost, error)

    @property
    def _reader(self) -> _Reader:
        return cast("_Reader", self._protocol)
