"""An event loop without sockets, threads or waiting: live sessions run in it as fast as they compute.

Connections are in memory. Time stands still while anything is left to do, and then passes at once as far as
the next timer: so a wait costs nothing, and what happens does not depend on the machine. What is handed to a
thread is done at once. It runs any program of asyncio that uses TCP without TLS; must not know one.
"""

import asyncio
import selectors
import socket
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from itertools import count
from typing import Any, Final, TypeVar, TypeVarTuple

from tests.fuzz.memory_transport import MemoryTransport

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_Address = tuple[str, int]

_FIRST_PORT: Final = 49152
HERE: Final = "127.0.0.1"


class _NextTimer(selectors.SelectSelector):
    """Lets the time pass in which nothing happens; no file is ever ready."""

    def __init__(self, let_pass: Callable[[float], None]) -> None:
        super().__init__()
        self._let_pass = let_pass

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("what is waited for can never happen")
        self._let_pass(timeout)
        return []


class _Accepted:
    """In the place of the socket of a connection that was accepted."""

    family = socket.AF_INET

    def __init__(self, end: MemoryTransport) -> None:
        self.end = end

    def setsockopt(self, *_options: int) -> None:
        """Ignore an option of the kernel's."""

    def close(self) -> None:
        self.end.abort()


class MemoryLoop(asyncio.SelectorEventLoop):
    """The loop. A connection waits to be accepted at any address, whether or not something listens there."""

    def __init__(self) -> None:
        super().__init__(_NextTimer(self._pass))
        self._now_s = 1000.0
        self._ports = count(_FIRST_PORT)
        self._backlogs: defaultdict[_Address, asyncio.Queue[MemoryTransport]] = defaultdict(asyncio.Queue)

    def time(self) -> float:
        return self._now_s

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*_Ts], _T], *args: *_Ts
    ) -> "asyncio.Future[_T]":
        assert executor is None
        done: asyncio.Future[_T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            done.set_exception(error)
        return done

    async def create_connection(  # type: ignore[override]  # of all its options, those that are used here
        self, protocol_factory: Callable[[], Any], host: str, port: int, *, ssl: object = None, **_: Any
    ) -> tuple[MemoryTransport, Any]:
        assert ssl is None
        near, far = MemoryTransport.pair(self, (HERE, next(self._ports)), (host, port))
        self._backlogs[host, port].put_nowait(far)
        protocol = protocol_factory()
        near.begin(protocol)
        return near, protocol

    async def accept(self, address: _Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return the next connection to ``address`` that waits to be accepted, as streams."""
        end = await self._backlogs[address].get()
        reader = asyncio.StreamReader(loop=self)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self)
        end.begin(protocol)
        return reader, asyncio.StreamWriter(end, protocol, reader, self)

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        address: _Address = sock.getsockname()
        end = await self._backlogs[address].get()
        return _Accepted(end), end.get_extra_info("peername")

    async def connect_accepted_socket(
        self, protocol_factory: Callable[[], Any], sock: Any, *, ssl: object = None, **_: Any
    ) -> tuple[MemoryTransport, Any]:
        assert ssl is None
        end: MemoryTransport = sock.end
        protocol = protocol_factory()
        end.begin(protocol)
        return end, protocol
