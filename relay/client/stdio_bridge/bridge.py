"""MCP on standard input and output, for clients that speak nothing else: a bridge to a relay that runs.

Each line is sent to the relay as it was read, and each message of the relay is written as a line. This is no
second server and no second parser of the protocol: the bridge reads of a message only what HTTP needs.

Input and output have a thread each: asyncio's pipes do not accept files, and set the descriptor non-blocking
for all processes that share it. The threads are daemons, so that a read that blocks does not keep the process
alive. Must not authorize anything, and must not hold more than a fixed number of lines.
"""

import asyncio
import concurrent.futures
import os
import queue
import random
import signal
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.client.credentials import RenewableToken
from relay.client.stdio_bridge.delivery import Conversation, Delivery, PendingMessage
from relay.client.stdio_bridge.http_client import LostError, NotSentError, RelayHttp
from relay.client.stdio_bridge.messages import (
    CANCELLED,
    INITIALIZE,
    INITIALIZED,
    LISTEN,
    MAX_HEADER_CHARS,
    Message,
    MessageSplitter,
    canonical_error,
    internal_error,
    invalid_request,
    read,
)
from schemas.process.logs import open_log

MAX_IN_FLIGHT = 64
"""Requests in flight; at this number no more lines are read."""
MAX_SUBSCRIPTIONS = 64
"""Open subscriptions; the relay has the same limit per agent."""
DRAIN_TIMEOUT_S = 5.0
"""How long requests in flight are awaited after the end of the input: as long as a call may take."""
STOP_TIMEOUT_S = 1.0
"""How long they are awaited after a signal: clients kill the program after 2 s."""

_CHUNK_BYTES = 65_536
_TOO_LONG = "The request is larger than 256 KiB."
_NO_SUCH_NAME = "The name is longer than any tool's."
_BUG = "The bridge to the relay failed; the reason is in its log."
_TOO_MANY = "Too many subscriptions are open; close one."


@define(eq=False, repr=False)
class Bridge:
    """Forwards one client's lines to one relay, and its messages back; ``write`` writes a line."""

    _conversation: Conversation
    _write: Callable[[bytes], Awaitable[None]]
    _log: FilteringBoundLogger
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _monotonic: Callable[[], float] = field(kw_only=True, default=time.monotonic)
    _chance: Callable[[], float] = field(kw_only=True, default=random.random)
    _delivery: Delivery = field(init=False)
    _slots: asyncio.Semaphore = field(init=False, factory=lambda: asyncio.Semaphore(MAX_IN_FLIGHT))
    _pending: dict[PendingMessage, asyncio.Task[None]] = field(init=False, factory=dict)
    _opening: PendingMessage | None = field(init=False, default=None)
    _stop: asyncio.Event = field(init=False, factory=asyncio.Event)

    def __attrs_post_init__(self) -> None:
        self._delivery = Delivery(
            self._conversation, self._put, self._log, self._monotonic, self._chance, self._sleep
        )

    def stop(self) -> None:
        """End soon: requests in flight have a short timeout left."""
        self._stop.set()

    async def run(self, chunks: AsyncIterator[bytes]) -> None:
        """Serve until ``chunks`` end, ``stop`` is called, or the output is closed."""
        reading = asyncio.create_task(self._read(chunks))
        stopping = asyncio.create_task(self._stop.wait())
        following = asyncio.create_task(self._delivery.follow())
        try:
            await asyncio.wait([reading, stopping, following], return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await self._drain(stopping)
        finally:
            tasks = [reading, stopping, following, *self._pending.values()]
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        with suppress(NotSentError, LostError, TimeoutError):
            async with asyncio.timeout(STOP_TIMEOUT_S):
                await self._conversation.close()

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        """Await the requests in flight, with a timeout; subscriptions have no end to await."""
        left = {task for pending, task in self._pending.items() if pending.message.method != LISTEN}
        until_s = self._monotonic() + DRAIN_TIMEOUT_S
        while left and not stopping.done():
            bound_s = until_s - self._monotonic()
            done, _ = await asyncio.wait(
                [*left, stopping], timeout=bound_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            left -= done
        if left and stopping.done():
            _, left = await asyncio.wait(left, timeout=STOP_TIMEOUT_S)
        if left:
            self._log.warning("ended before all requests were answered", messages=len(left))

    async def _read(self, chunks: AsyncIterator[bytes]) -> None:
        lines = MessageSplitter()
        async for chunk in chunks:
            for line in lines.feed(chunk):
                await self._take(line)
        await self._take(lines.end())

    async def _take(self, line: bytes | None) -> None:
        if line is None:
            await self._put(invalid_request(_TOO_LONG))
        elif line.strip():
            await self._accept(read(line))

    async def _accept(self, message: Message) -> None:
        if message.method == CANCELLED:
            self._cancel(message)
        elif len(message.name or "") + len(message.version or "") > MAX_HEADER_CHARS:
            await self._put(canonical_error(message.id, "INVALID_INPUT", _NO_SUCH_NAME))
        elif message.method != LISTEN:
            await self._slots.acquire()
            self._launch(message, self._opening, self._slots.release)
        elif sum(pending.message.method == LISTEN for pending in self._pending) < MAX_SUBSCRIPTIONS:
            self._launch(message, None, _nothing)
        else:
            await self._put(internal_error(message.id, _TOO_MANY, retryable=False))

    def _cancel(self, message: Message) -> None:
        """Cancel a request as its era defines it."""
        for pending, task in self._pending.items():
            if message.target is None or pending.message.id != message.target:
                continue
            if pending.message.version is not None or not pending.sent:
                task.cancel()  # the new era cancels by closing the request
            elif not pending.cancelled:
                pending.cancelled = True
                self._launch(message, None, _nothing, after=pending.arrived)
            return

    def _launch(
        self,
        message: Message,
        opening: PendingMessage | None,
        release: Callable[[], None],
        after: asyncio.Event | None = None,
    ) -> None:
        pending = PendingMessage(message)
        # In the old era nothing may be sent before the session is open.
        waits_for = opening.over if opening is not None and message.version is None else after
        if message.method in {INITIALIZE, INITIALIZED}:
            self._opening = pending
        task = asyncio.create_task(self._deliver(pending, waits_for))
        self._pending[pending] = task

        def done(_task: asyncio.Task[None]) -> None:
            # Not in the task: one that is cancelled before it starts runs no code of its own.
            del self._pending[pending]
            pending.arrived.set()
            pending.over.set()
            release()

        task.add_done_callback(done)

    async def _deliver(self, pending: PendingMessage, waits_for: asyncio.Event | None) -> None:
        if waits_for is not None:
            await waits_for.wait()
        try:
            await self._delivery.deliver(pending)
        except Exception:  # noqa: BLE001 - every request gets an answer
            self._log.exception("delivery failed")
            if pending.message.id is not None and not pending.answered:
                await self._put(internal_error(pending.message.id, _BUG, retryable=False))

    async def _put(self, line: bytes) -> None:
        try:
            await self._write(line)
        except OSError:
            self._log.warning("the output is closed")
            self.stop()


def run_stdio(
    url: str, token: RenewableToken, tls: ssl.SSLContext, root: Path | None, errors: TextIO
) -> None:
    """Bridge standard input and output to the MCP endpoint ``url`` until the input ends or a signal arrives.

    ``root``: the file of the root that ``tls`` trusts, if one was named. The log goes to ``errors``.
    """

    async def run() -> None:
        with open_log("relay", errors) as (log, _):
            http = RelayHttp(url, token, tls, root)
            bridge = Bridge(Conversation(http), Output(claim_output()).write, log)
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.add_signal_handler(number, bridge.stop)
            try:
                await bridge.run(input_chunks(0))
            finally:
                await http.close()

    asyncio.run(run())


def _nothing() -> None:
    """Release nothing: no slot was taken."""


def claim_output() -> int:
    """Return a descriptor of standard output for the caller alone.

    Everything else that this process prints goes to standard error from now on.
    """
    own = os.dup(1)
    os.dup2(2, 1)
    return own


async def input_chunks(descriptor: int) -> AsyncIterator[bytes]:
    """Yield the bytes of ``descriptor`` as they arrive, to their end; read no faster than they are used."""
    taken: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
    arguments = (descriptor, asyncio.get_running_loop(), taken)
    threading.Thread(target=_read_chunks, args=arguments, name="stdin", daemon=True).start()
    while chunk := await taken.get():
        yield chunk


def _read_chunks(descriptor: int, loop: asyncio.AbstractEventLoop, taken: asyncio.Queue[bytes]) -> None:
    chunk = b"not read yet"
    while chunk:
        try:
            chunk = os.read(descriptor, _CHUNK_BYTES)
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
