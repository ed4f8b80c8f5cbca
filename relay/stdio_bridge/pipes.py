"""Standard input and output for a program whose output is a protocol.

Each has a thread that does nothing else: what asyncio has for pipes takes no files, and leaves them
non-blocking for whoever shares them. A thread that waits for ever for a client does not keep the process.
Must not know what the lines say.
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
    """Return a descriptor of standard output that is the caller's alone.

    What else this process prints goes to standard error from now on, whoever prints it.
    """
    own = os.dup(1)
    os.dup2(2, 1)
    return own


class Input:
    """What comes in on ``descriptor``, no faster than it is taken."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def chunks(self) -> AsyncIterator[bytes]:
        """Return the bytes as they come, until there are no more."""
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
                chunk = b""  # a terminal that hung up, for example
            putting = taken.put(chunk)
            try:
                asyncio.run_coroutine_threadsafe(putting, loop).result()
            except (RuntimeError, concurrent.futures.CancelledError):
                putting.close()  # the program has ended meanwhile
                return


class Output:
    """Lines out on ``descriptor``, each whole."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._waiting: queue.SimpleQueue[tuple[bytes, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._write, name="stdout", daemon=True).start()

    async def write(self, line: bytes) -> None:
        """Write ``line`` and a newline, and return when they are out.

        Raises:
            OSError: nobody reads any more.
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
        return  # who wrote waits no more
    if failure is None:
        written.set_result(None)
    else:
        written.set_exception(failure)
