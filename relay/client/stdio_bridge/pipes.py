"""Standard input and output for a program whose output is a protocol.

Each has a thread of its own: asyncio's pipes do not accept files, and set the descriptor non-blocking for all
processes that share it. The threads are daemons, so that a read that blocks does not keep the process alive.
Must not know what the lines contain.
"""

import asyncio
import concurrent.futures
import os
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import suppress

_CHUNK_BYTES = 65_536


def claim_output() -> int:
    """Return a descriptor of standard output for the caller alone.

    Everything else that this process prints goes to standard error from now on.
    """
    own = os.dup(1)
    os.dup2(2, 1)
    return own


class Input:
    """Reads ``descriptor``, no faster than its chunks are consumed."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they arrive, until the end of the input."""
        taken: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, args=(loop, taken), name="stdin", daemon=True).start()
        while chunk := await taken.get():
            yield chunk

    def _read(self, loop: asyncio.AbstractEventLoop, taken: asyncio.Queue[bytes]) -> None:
        chunk = b"not read yet"
        while chunk:
            try:
                chunk = os.read(self._descriptor, _CHUNK_BYTES)
            except OSError:
                chunk = b""  # for example a terminal that was closed
            putting = taken.put(chunk)
            try:
                asyncio.run_coroutine_threadsafe(putting, loop).result()
            except (RuntimeError, concurrent.futures.CancelledError):
                putting.close()  # the program has ended meanwhile
                return


class Output:
    """Writes whole lines to ``descriptor``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="stdout", daemon=True).start()

    async def write(self, line: bytes) -> None:
        """Write ``line`` and a newline, and return when they are written.

        Raises:
            OSError: the reader has closed its end.
        """
        written = asyncio.get_running_loop().create_future()
        self._waiting.put((line + b"\n", written))
        await written

    def _write(self) -> None:
        while True:
            rest, written = self._waiting.get()
            failure: OSError | None = None
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                failure = error
            with suppress(RuntimeError):  # the program has ended meanwhile
                written.get_loop().call_soon_threadsafe(_settle, written, failure)


def _settle(written: "asyncio.Future[None]", failure: OSError | None) -> None:
    if written.done():
        return  # the writer was cancelled
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
