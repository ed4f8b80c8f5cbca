"""MCP on standard input and output, for clients that speak nothing else: a bridge to a relay that runs.

Each line goes to the relay as it was read, and what the relay says comes out as lines. There is no second
server here, and no second reading of the protocol: of a message the bridge knows what HTTP wants to know.
Must not decide who may do what, and must not hold more than so many lines at once.
"""

import asyncio
import random
import signal
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from structlog.typing import FilteringBoundLogger

from relay.stdio_bridge.delivery import Delivery, Flight
from relay.stdio_bridge.http_client import LostError, NotSentError, RelayHttp, Token
from relay.stdio_bridge.messages import (
    CANCELLED,
    INITIALIZE,
    INITIALIZED,
    LISTEN,
    MAX_HEADER_CHARS,
    LineSplitter,
    Message,
    canonical_error,
    internal_error,
    invalid_request,
    read,
)
from relay.stdio_bridge.pipes import Input, Output, claim_output
from relay.stdio_bridge.session import Conversation

IN_FLIGHT = 64
"""While so many are under way no more lines are read."""
LISTENING = 64
"""Subscriptions besides; the relay gives an agent as many."""
DRAIN_S = 5.0
"""What is under way when the input ends is waited for so long, as long as a call may take."""
HURRY_S = 1.0
"""And so long when the program is told to end: clients kill it after 2 s."""

_TOO_LONG = "The request is larger than 256 KiB."
_NO_SUCH_NAME = "The name is longer than any that there is."
_BUG = "Something went wrong in the bridge to the relay; its log says what."
_TOO_MANY = "Too many subscriptions are open; close one."


class Bridge:
    """One client's lines to one relay and back; ``write`` puts a line out."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        conversation: Conversation,
        write: Callable[[bytes], Awaitable[None]],
        log: FilteringBoundLogger,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._conversation = conversation
        self._write = write
        self._log = log
        self._delivery = Delivery(
            conversation=conversation,
            put=self._put,
            log=log,
            monotonic=monotonic,
            chance=chance,
            sleep=sleep,
        )
        self._monotonic = monotonic
        self._room = asyncio.Semaphore(IN_FLIGHT)
        self._flights: dict[Flight, asyncio.Task[None]] = {}
        self._handshake: Flight | None = None
        self._stop = asyncio.Event()

    def stop(self) -> None:
        """End soon: what is under way has a moment left."""
        self._stop.set()

    async def run(self, chunks: AsyncIterator[bytes]) -> None:
        """Serve until ``chunks`` end, or it is told to stop, or nobody reads what is written."""
        reading = asyncio.create_task(self._read(chunks))
        stopping = asyncio.create_task(self._stop.wait())
        following = asyncio.create_task(self._delivery.follow())
        try:
            await asyncio.wait([reading, stopping, following], return_when=asyncio.FIRST_COMPLETED)
            reading.cancel()
            await self._drain(stopping)
        finally:
            tasks = [reading, stopping, following, *self._flights.values()]
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        with suppress(NotSentError, LostError, TimeoutError):
            async with asyncio.timeout(HURRY_S):
                await self._conversation.close()

    async def _drain(self, stopping: asyncio.Task[bool]) -> None:
        """Let what is under way come to its end, for a while; subscriptions have none."""
        left = {task for flight, task in self._flights.items() if flight.message.method != LISTEN}
        until_s = self._monotonic() + DRAIN_S
        while left and not stopping.done():
            bound_s = until_s - self._monotonic()
            done, _ = await asyncio.wait(
                [*left, stopping], timeout=bound_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                break
            left -= done
        if left and stopping.done():
            _, left = await asyncio.wait(left, timeout=HURRY_S)
        if left:
            self._log.warning("ended before all was answered", messages=len(left))

    async def _read(self, chunks: AsyncIterator[bytes]) -> None:
        lines = LineSplitter()
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
            await self._room.acquire()
            self._launch(message, self._handshake, self._room.release)
        elif sum(flight.message.method == LISTEN for flight in self._flights) < LISTENING:
            self._launch(message, None, _nothing)
        else:
            await self._put(internal_error(message.id, _TOO_MANY, retryable=False))

    def _cancel(self, message: Message) -> None:
        """Take a request back, in the way of its era."""
        for flight, task in self._flights.items():
            if message.target is None or flight.message.id != message.target:
                continue
            if flight.message.version is not None or not flight.sent:
                task.cancel()  # in the new era one hangs up, and what was never sent need not be taken back
            elif not flight.cancelled:
                flight.cancelled = True
                self._launch(message, None, _nothing, after=flight.arrived)
            return

    def _launch(
        self,
        message: Message,
        handshake: Flight | None,
        release: Callable[[], None],
        after: asyncio.Event | None = None,
    ) -> None:
        flight = Flight(message)
        # In the old era nothing may overtake what opens the session.
        waits_for = handshake.over if handshake is not None and message.version is None else after
        if message.method in {INITIALIZE, INITIALIZED}:
            self._handshake = flight
        task = asyncio.create_task(self._fly(flight, waits_for))
        self._flights[flight] = task

        def land(_task: asyncio.Task[None]) -> None:
            # Here and not in the task: one that is cancelled before it began runs nothing of its own.
            del self._flights[flight]
            flight.arrived.set()
            flight.over.set()
            release()

        task.add_done_callback(land)

    async def _fly(self, flight: Flight, waits_for: asyncio.Event | None) -> None:
        if waits_for is not None:
            await waits_for.wait()
        try:
            await self._delivery.carry(flight)
        except Exception:  # noqa: BLE001 - a request has an answer, whatever happens
            self._log.exception("a message was not carried")
            if flight.message.id is not None and not flight.answered:
                await self._put(internal_error(flight.message.id, _BUG, retryable=False))

    async def _put(self, line: bytes) -> None:
        try:
            await self._write(line)
        except OSError:
            self._log.warning("nobody reads the output any more")
            self.stop()


async def run_stdio(url: str, token: Token, tls: ssl.SSLContext, log: FilteringBoundLogger) -> None:
    """Be the bridge to the MCP of the relay at ``url`` until the input ends, or a signal comes."""
    http = RelayHttp(url, token, tls)
    bridge = Bridge(Conversation(http), Output(claim_output()).write, log)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, bridge.stop)
    try:
        await bridge.run(Input(0).chunks())
    finally:
        await http.close()


def _nothing() -> None:
    """Give no room back: none was taken."""
