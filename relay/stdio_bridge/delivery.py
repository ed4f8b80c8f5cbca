"""How one message gets to the relay and its answer back, whatever happens to the relay meanwhile.

A relay that is away is waited for, within bounds. What was never sent is sent again; what may have arrived
only where twice is no more than once, and who waits for the rest is told that it may have run. Must not leave
a request without exactly one answer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.stdio_bridge.http_client import Answer, LostError, NotSentError
from relay.stdio_bridge.messages import (
    ACKNOWLEDGED,
    INITIALIZE,
    Message,
    canonical_error,
    encode,
    internal_error,
    list_changed,
)
from relay.stdio_bridge.session import Conversation, RefusedError, SessionGoneError
from schemas.text import printable

PATIENCE_S = 50.0
"""A relay that is away is waited for so long: clients give up after 60 s."""
FIRST_WAIT_S = 0.1
LONGEST_WAIT_S = 5.0
REFUSED_WAIT_S = 60.0
"""A stream that the relay will not give is asked for again after this time."""

_GOODBYE_S = 1.0

_AWAY = "The relay cannot be reached; nothing was sent. Try again later."
_GONE = "The relay went away while this was under way; it may have run. Check that before you try again."
_ERRORS = 400


@dataclass(eq=False, slots=True)
class Flight:
    """A message on its way, and what is known of it.

    Attributes:
        sent: it may have got to the relay.
        arrived: the relay has begun to answer, or all is over.
        over: nothing more will come of it.
        answered: its answer has been passed on.
        acknowledged: it is a subscription that the relay has taken once.
        cancelled: the relay has been told, or is about to be, that nobody waits for it.
    """

    message: Message
    sent: bool = False
    answered: bool = False
    acknowledged: bool = False
    cancelled: bool = False
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Waits:
    """How long to wait from one attempt to the next: longer each time, and never as long as others do."""

    def __init__(self, monotonic: Callable[[], float], chance: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._chance = chance
        self._bound_s = FIRST_WAIT_S
        self._began_s = monotonic()

    def next(self) -> float:
        """Return the seconds until the next attempt; after one that went well for a while they are few."""
        now_s = self._monotonic()
        if now_s - self._began_s > 2 * LONGEST_WAIT_S:
            self._bound_s = FIRST_WAIT_S
        wait_s = self._bound_s * (1 + self._chance()) / 2
        self._bound_s = min(2 * self._bound_s, LONGEST_WAIT_S)
        self._began_s = now_s + wait_s
        return wait_s


class Delivery:
    """The way to the relay and back; ``put`` writes a line for the client."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        conversation: Conversation,
        put: Callable[[bytes], Awaitable[None]],
        log: FilteringBoundLogger,
        monotonic: Callable[[], float],
        chance: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._conversation = conversation
        self._put = put
        self._log = log
        self._monotonic = monotonic
        self._chance = chance
        self._sleep = sleep
        self._is_away = False

    async def carry(self, flight: Flight) -> None:
        """Send a message, and pass on what comes back, or why nothing does."""
        message = flight.message
        try:
            await self._persist(flight)
        except RefusedError as error:
            answer = canonical_error(message.id, error.code, str(error))
            await self._fail(message, answer, str(error))
        except NotSentError as error:
            await self._fail(message, internal_error(message.id, _AWAY, retryable=True), str(error))
        except LostError as error:
            await self._fail(message, internal_error(message.id, _GONE, retryable=False), str(error))

    async def follow(self) -> None:
        """Pass on what the relay says without being asked in a session of the old era, until cancelled."""
        await self._conversation.follows.wait()
        waits = Waits(self._monotonic, self._chance)
        missed = False
        while True:
            wait_s = None
            try:
                await self._follow_once(missed=missed)
            except (NotSentError, LostError) as error:
                self._note_away(error)
            except RefusedError as error:
                self._log.warning("changes are not followed", reason=str(error))
                wait_s = REFUSED_WAIT_S
            missed = True
            await self._sleep(waits.next() if wait_s is None else wait_s)

    async def _follow_once(self, *, missed: bool) -> None:
        session = self._conversation.session
        if session is None:
            return
        try:
            async with self._conversation.stream(session) as answer:
                self._note_back()
                if missed:
                    # Nobody knows what happened while there was no stream.
                    await self._put(list_changed())
                async with aclosing(answer.messages()) as messages:
                    async for raw, _ in messages:
                        await self._put(raw)
        except SessionGoneError:
            await self._conversation.renew(session)

    async def _persist(self, flight: Flight) -> None:
        until_s = self._monotonic() + PATIENCE_S
        waits = Waits(self._monotonic, self._chance)
        while True:
            failure: NotSentError | LostError
            try:
                await self._attempt(flight)
            except NotSentError as error:
                flight.sent, failure = False, error
            except LostError as error:
                if not flight.message.may_repeat:
                    raise
                failure = error
            else:
                return
            # A subscription that stood once is kept up for as long as the client has it.
            if self._monotonic() >= until_s and not flight.acknowledged:
                raise failure
            self._note_away(failure)
            await self._sleep(waits.next())

    async def _attempt(self, flight: Flight) -> None:
        flight.sent = True
        async with self._conversation.sent(flight.message) as answer:
            self._note_back()
            flight.arrived.set()
            async with aclosing(answer.messages()) as messages:
                async for raw, value in messages:
                    await self._pass_on(flight, answer, raw, value)
                    if flight.answered:
                        await _exhaust(messages)
                        return
        if flight.message.id is not None:
            raise LostError("no answer")

    async def _pass_on(self, flight: Flight, answer: Answer, raw: bytes, value: dict[str, Any]) -> None:
        message = flight.message
        if message.is_silent and answer.status >= _ERRORS:
            await self._fail(message, raw, f"status {answer.status}")
        elif message.id is not None and "method" not in value and value.get("id") in (message.id, None):
            flight.answered = True
            if message.method == INITIALIZE and isinstance(result := value.get("result"), dict):
                self._conversation.take(message, answer, result)
            # Over HTTP an answer is known by where it comes from. On a pipe it needs its id.
            await self._put(raw if value.get("id") is not None else encode(value | {"id": message.id}))
        elif value.get("method") == ACKNOWLEDGED and flight.acknowledged:
            if message.follows_tools:
                await self._put(list_changed(message.id))  # as after any gap
        else:
            flight.acknowledged = flight.acknowledged or value.get("method") == ACKNOWLEDGED
            await self._put(raw)

    async def _fail(self, message: Message, answer: bytes, reason: str) -> None:
        if message.is_silent:
            self._log.warning("not delivered", method=printable(message.method or "answer"), reason=reason)
        else:
            await self._put(answer)

    def _note_away(self, failure: NotSentError | LostError) -> None:
        if not self._is_away:
            self._is_away = True
            self._log.warning("the relay is away; waiting for it", reason=str(failure))

    def _note_back(self) -> None:
        if self._is_away:
            self._is_away = False
            self._log.info("the relay is there")


async def _exhaust(messages: AsyncIterator[object]) -> None:
    """Read to the end of a stream that has said all: the connection can be used again only then."""
    with suppress(LostError, TimeoutError):
        async with asyncio.timeout(_GOODBYE_S):
            async for _ in messages:
                pass
