"""Delivers a message to the relay and its answer to the client; retries while the relay is unreachable.

What was never sent is sent again, until a timeout. What may have arrived is sent again only if the method is
idempotent; otherwise the client gets an error that says that it may have run. A relay that was restarted has
lost the sessions of the old era: the client's opening messages are kept, and those that a session remembers,
so that the same can be opened again without the client. Must not leave a request without exactly one answer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.client.http import ANSWERED_WITHIN_S
from relay.client.stdio_bridge.http_client import (
    LostError,
    MisdirectedError,
    NotSentError,
    RelayHttp,
    RelayResponse,
)
from relay.client.stdio_bridge.messages import (
    ACKNOWLEDGED,
    INITIALIZE,
    INITIALIZED,
    SET_LEVEL,
    SUBSCRIBE,
    UNSUBSCRIBE,
    Message,
    canonical_error,
    encode,
    header_value,
    internal_error,
    list_changed,
)
from schemas.error_roots import PeerError
from schemas.pacing import Backoff, half_by_chance
from schemas.text import printable

RETRY_TIMEOUT_S = 50.0
"""How long delivery is retried: clients give up after 60 s."""
FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 5.0
REFUSED_DELAY_S = 60.0
"""When a stream that the relay has refused is requested again."""
MAX_RESOURCES = 256
"""The resources that are followed again in a new session; the relay has the same limit per session."""

_STREAM_END_TIMEOUT_S = 1.0

_UNREACHABLE = "The relay cannot be reached; nothing was sent. Try again later."
_LOST = "The connection to the relay was lost; this may have run. Check that before you try again."
_ERRORS = 400
_REDIRECTS = 300
_UNAUTHORIZED = 401
_NOT_FOUND = 404
_SERVER_ERRORS = 500
_UNAVAILABLE = 503
_TOO_MANY = 429
_MAX_RENEWALS = 3


class RefusedError(PeerError):
    """The relay refused by HTTP status; ``code`` is canonical, and the text printable."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class SessionGoneError(PeerError):
    """The relay knows no such session; nothing was processed."""


@dataclass(frozen=True, slots=True)
class McpSession:
    """A session that the relay opened."""

    id: str | None
    version: str | None

    def headers(self) -> dict[str, str]:
        headers = {"mcp-session-id": self.id, "mcp-protocol-version": self.version}
        # What no header can hold is left out: a relay that needs it refuses the request.
        return {
            name: value
            for name, value in headers.items()
            if value and value.isascii() and value.isprintable()
        }


@define(eq=False, repr=False)
class Conversation:
    """The messages of one client to one relay, over ``http``.

    Attributes:
        session: the one that is open, in the old era.
        follows: whether the client accepts notifications in it.
    """

    _http: RelayHttp
    _opening: Message | None = field(init=False, default=None)
    _ready: Message | None = field(init=False, default=None)
    _renewing: asyncio.Lock = field(init=False, factory=asyncio.Lock)
    _version: str | None = field(init=False, default=None)
    _level: Message | None = field(init=False, default=None)
    _followed: dict[str | None, Message] = field(init=False, factory=dict)
    _next: tuple[McpSession, list[Message]] | None = field(init=False, default=None)
    session: McpSession | None = field(init=False, default=None)
    follows: asyncio.Event = field(init=False, factory=asyncio.Event)

    @asynccontextmanager
    async def sent(self, message: Message) -> AsyncIterator[RelayResponse]:
        """Send ``message``, and hold the response.

        A session that the relay has lost is opened again first, and a rejected token is read again.

        Raises:
            NotSentError: it was not processed.
            LostError: it may have been.
            RefusedError: the relay refuses it.
        """
        for _ in range(_MAX_RENEWALS):
            used = self.session if message.version is None and message.method != INITIALIZE else None
            token = self._http.token.text
            async with self._http.exchange("POST", self._headers(message, used), message.raw) as response:
                if response.status == _UNAUTHORIZED and self._http.token.is_newer_than(token):
                    continue
                if response.status != _NOT_FOUND or used is None or used.id is None:
                    await self._check(response)
                    if message.method == INITIALIZED and self.session is not None:
                        self._ready = message
                        self.follows.set()
                    yield response
                    return
            await self.renew(used)
        raise NotSentError("the relay loses each session at once")

    @asynccontextmanager
    async def stream(self, session: McpSession) -> AsyncIterator[RelayResponse]:
        """Hold the stream of the relay's own messages in ``session``.

        Raises:
            SessionGoneError: there is no such session.
            NotSentError: the relay is unreachable.
            LostError: the connection was lost.
            RefusedError: the relay offers no such stream.
        """
        token = self._http.token.text
        async with self._http.exchange("GET", session.headers()) as response:
            if response.status == _NOT_FOUND:
                raise SessionGoneError
            if response.status == _UNAUTHORIZED and self._http.token.is_newer_than(token):
                raise NotSentError("the token has changed")
            await self._check(response)
            if not response.is_stream:
                raise RefusedError("INTERNAL_ERROR", "The relay offers no stream of changes.")
            yield response

    async def renew(self, gone: McpSession) -> None:
        """Open a session in the place of ``gone`` with the client's own messages, unless that is done.

        Raises:
            NotSentError: there is still none.
            RefusedError: the relay will not open one.
        """
        try:
            # All messages wait for this one: an answer that never ends must not hold them up for good.
            async with asyncio.timeout(ANSWERED_WITHIN_S), self._renewing:
                if self.session is not gone or self._opening is None:
                    return
                if self._next is None:
                    remembered = (self._ready, self._level, *self._followed.values())
                    self._next = await self._open(self._opening), list(filter(None, remembered))
                session, unsent = self._next
                # Where the relay limits the rate, the next attempt continues in the same session.
                while unsent:
                    await self._repeat(unsent[0], session)
                    del unsent[0]
                self.session, self._next = session, None
        except LostError as error:
            raise NotSentError(str(error)) from None
        except TimeoutError:
            raise NotSentError("the relay does not open a session in time") from None

    async def _repeat(self, message: Message, session: McpSession) -> None:
        """Send ``message`` in ``session``; its client has the answer of an earlier one."""
        async with self._http.exchange("POST", session.headers(), message.raw) as response:
            await self._check(response)
            async with aclosing(response.messages()) as messages:
                async for _ in messages:
                    pass

    def take(self, message: Message, response: RelayResponse, result: Mapping[str, Any]) -> None:
        """Note what session is open, and what it remembers, now that ``message`` has its ``result``."""
        if message.method == INITIALIZE:
            self._opening = message
            self.session = _opened(response, result)
            self._level, self._next = None, None
            self._followed.clear()
        elif message.method == SET_LEVEL:
            self._level = message
        elif message.method == UNSUBSCRIBE:
            self._followed.pop(message.resource, None)
        elif message.method == SUBSCRIBE and len(self._followed) < MAX_RESOURCES:
            self._followed[message.resource] = message

    async def close(self) -> None:
        """End the session that is open, if the relay is reachable."""
        if self.session is not None and self.session.id is not None:
            async with self._http.exchange("DELETE", self.session.headers()):
                self.session = None

    def _headers(self, message: Message, session: McpSession | None) -> dict[str, str]:
        if session is not None:
            return session.headers()
        if message.version is not None:
            self._version = message.version
        elif message.method == INITIALIZE or self._version is None:
            return {}
        # A message without a version, such as a notification or malformed JSON, belongs to its client's era.
        return message.headers() | {"mcp-protocol-version": header_value(self._version)}

    async def _open(self, opening: Message) -> McpSession:
        async with self._http.exchange("POST", {}, opening.raw) as response:
            await self._check(response)
            async with aclosing(response.messages()) as messages:
                async for _, value in messages:
                    if value.get("id") == opening.id and isinstance(result := value.get("result"), dict):
                        return _opened(response, result)
        raise NotSentError("the relay opens no session")

    async def _check(self, response: RelayResponse) -> None:
        """Return if the client may read ``response``: a refusal by HTTP status alone is an error."""
        if response.status < _REDIRECTS:
            return
        is_message, reason = await response.read_refusal()
        if response.status == _UNAVAILABLE:
            raise NotSentError(reason)
        if is_message:
            return
        if response.status == _TOO_MANY and response.may_come_again:
            raise NotSentError(reason)  # refused for its rate, before it was read
        if response.status >= _SERVER_ERRORS:
            raise LostError(reason)
        if response.status == _UNAUTHORIZED:
            text = f"The relay does not accept the token: {reason} {self._http.token.advice}"
            raise RefusedError("UNAUTHORIZED", text)
        raise RefusedError("INTERNAL_ERROR", f"The relay refuses: {reason}")


def _opened(response: RelayResponse, result: Mapping[str, Any]) -> McpSession:
    version = result.get("protocolVersion")
    return McpSession(response.session_id, version if isinstance(version, str) else None)


@define(eq=False, repr=False)
class PendingMessage:
    """A message in delivery, and its state.

    Attributes:
        sent: it may have reached the relay.
        arrived: the relay has begun to answer, or delivery has ended.
        over: delivery has ended.
        answered: its answer has been written.
        acknowledged: it is a subscription that the relay has accepted once.
        cancelled: its cancellation has been or is being sent to the relay.
    """

    message: Message
    sent: bool = False
    answered: bool = False
    acknowledged: bool = False
    cancelled: bool = False
    arrived: asyncio.Event = field(factory=asyncio.Event)
    over: asyncio.Event = field(factory=asyncio.Event)


class RetryDelays:
    """Delays between attempts: exponential, with jitter."""

    def __init__(self, monotonic: Callable[[], float], chance: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._backoff = Backoff(FIRST_DELAY_S, LONGEST_DELAY_S, half_by_chance(chance))
        self._began_s = monotonic()

    def next(self) -> float:
        """Return the seconds until the next attempt; the first delay again after a long success."""
        now_s = self._monotonic()
        if now_s - self._began_s > 2 * LONGEST_DELAY_S:
            self._backoff.reset()
        wait_s = self._backoff.next_s()
        self._began_s = now_s + wait_s
        return wait_s


@define(eq=False, repr=False)
class Delivery:
    """Delivers messages; ``put`` writes a line for the client."""

    conversation: Conversation
    put: Callable[[bytes], Awaitable[None]]
    log: FilteringBoundLogger
    monotonic: Callable[[], float]
    chance: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    _is_unreachable: bool = False

    async def deliver(self, pending: PendingMessage) -> None:
        message = pending.message
        try:
            await self._retry(pending)
        except RefusedError as error:
            answer = canonical_error(message.id, error.code, str(error))
            await self._fail(message, answer, str(error))
        except MisdirectedError as error:
            answer = internal_error(message.id, f"The relay is not used: {error}.", retryable=False)
            await self._fail(message, answer, str(error))
        except NotSentError as error:
            await self._fail(message, internal_error(message.id, _UNREACHABLE, retryable=True), str(error))
        except LostError as error:
            await self._fail(message, internal_error(message.id, _LOST, retryable=False), str(error))

    async def follow(self) -> None:
        """Write the relay's own notifications in a session of the old era, until cancelled."""
        await self.conversation.follows.wait()
        delays = RetryDelays(self.monotonic, self.chance)
        missed = False
        while True:
            wait_s = None
            try:
                await self._follow_once(missed=missed)
            except (NotSentError, LostError) as error:
                self._note_unreachable(error)
            except RefusedError as error:
                self.log.warning("no stream of changes", reason=str(error))
                wait_s = REFUSED_DELAY_S
            missed = True
            await self.sleep(delays.next() if wait_s is None else wait_s)

    async def _follow_once(self, *, missed: bool) -> None:
        session = self.conversation.session
        if session is None:
            return
        try:
            async with self.conversation.stream(session) as response:
                self._note_reachable()
                if missed:
                    # Changes while there was no stream are not known.
                    await self.put(list_changed())
                async with aclosing(response.messages()) as messages:
                    async for raw, _ in messages:
                        await self.put(raw)
        except SessionGoneError:
            await self.conversation.renew(session)

    async def _retry(self, pending: PendingMessage) -> None:
        until_s = self.monotonic() + RETRY_TIMEOUT_S
        delays = RetryDelays(self.monotonic, self.chance)
        while True:
            failure: NotSentError | LostError
            try:
                await self._attempt(pending)
            except NotSentError as error:
                pending.sent, failure = False, error
            except LostError as error:
                if not pending.message.may_repeat:
                    raise
                failure = error
            else:
                return
            self._note_unreachable(failure)
            # A subscription that stood once is kept up for as long as the client has it.
            is_over = self.monotonic() >= until_s or isinstance(failure, MisdirectedError)
            if is_over and not pending.acknowledged:
                raise failure
            await self.sleep(delays.next())

    async def _attempt(self, pending: PendingMessage) -> None:
        pending.sent = True
        async with self.conversation.sent(pending.message) as response:
            self._note_reachable()
            pending.arrived.set()
            async with aclosing(response.messages()) as messages:
                async for raw, value in messages:
                    await self._write_message(pending, response, raw, value)
                    if pending.answered:
                        await _exhaust(messages)
                        return
        if pending.message.id is not None:
            raise LostError("no answer")

    async def _write_message(
        self, pending: PendingMessage, response: RelayResponse, raw: bytes, value: dict[str, Any]
    ) -> None:
        message = pending.message
        if message.is_silent and response.status >= _ERRORS:
            await self._fail(message, raw, f"status {response.status}")
        elif message.id is not None and "method" not in value and value.get("id") in (message.id, None):
            pending.answered = True
            if isinstance(result := value.get("result"), dict):
                self.conversation.take(message, response, result)
            # Over HTTP the connection identifies the answer. On a pipe it needs the request's id.
            await self.put(raw if value.get("id") is not None else encode(value | {"id": message.id}))
        elif value.get("method") == ACKNOWLEDGED and pending.acknowledged:
            if message.follows_tools:
                await self.put(list_changed(message.id))  # as after any gap
        else:
            pending.acknowledged = pending.acknowledged or value.get("method") == ACKNOWLEDGED
            await self.put(raw)

    async def _fail(self, message: Message, answer: bytes, reason: str) -> None:
        if message.is_silent:
            self.log.warning("not delivered", method=printable(message.method or "answer"), reason=reason)
        else:
            await self.put(answer)

    def _note_unreachable(self, failure: NotSentError | LostError) -> None:
        if not self._is_unreachable:
            self._is_unreachable = True
            self.log.warning("the relay is not reached", reason=str(failure))

    def _note_reachable(self) -> None:
        if self._is_unreachable:
            self._is_unreachable = False
            self.log.info("the relay is reached again")


async def _exhaust(messages: AsyncIterator[object]) -> None:
    """Read to the end of a stream after its answer: only then can the connection be reused."""
    with suppress(LostError, TimeoutError):
        async with asyncio.timeout(_STREAM_END_TIMEOUT_S):
            async for _ in messages:
                pass
