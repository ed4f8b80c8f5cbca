"""One message to the relay and back, in either era, and the session that the old era needs.

A relay that starts anew has forgotten its sessions. What the client said to open one is kept, so that another
is opened in its place and the client need not know. Must not send a message twice but where the relay has
said that it did not process it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from relay.stdio_bridge.http_client import Answer, LostError, NotSentError, RelayHttp
from relay.stdio_bridge.messages import INITIALIZE, INITIALIZED, Message, header_value

_REDIRECTS = 300
_UNAUTHORIZED = 401
_NOT_FOUND = 404
_SERVER_ERRORS = 500
_UNAVAILABLE = 503
_MAX_RENEWALS = 3


class RefusedError(Exception):
    """The relay said no, in HTTP's words; ``code`` is canonical, and the text fit to be shown."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class SessionGoneError(Exception):
    """The relay knows no such session; nothing was processed."""


@dataclass(frozen=True, slots=True)
class Session:
    """A session that the relay opened."""

    id: str | None
    version: str | None

    def headers(self) -> dict[str, str]:
        """Return the headers of whatever belongs to it."""
        headers = {"mcp-session-id": self.id, "mcp-protocol-version": self.version}
        return {name: value for name, value in headers.items() if value}


class Conversation:
    """What one client says to one relay, over ``http``.

    Attributes:
        session: the one that is open, in the old era.
        follows: whether the client is ready to hear of changes in it.
    """

    def __init__(self, http: RelayHttp) -> None:
        self._http = http
        self._opening: Message | None = None
        self._ready: Message | None = None
        self._renewing = asyncio.Lock()
        self._version: str | None = None
        self.session: Session | None = None
        self.follows = asyncio.Event()

    @asynccontextmanager
    async def sent(self, message: Message) -> AsyncIterator[Answer]:
        """Send ``message``, and hold the answer to it.

        A session that the relay has forgotten is opened again first, and a refused token looked for again.

        Raises:
            NotSentError: it was not processed.
            LostError: it may have been.
            RefusedError: the relay will not have it.
        """
        for _ in range(_MAX_RENEWALS):
            used = self.session if message.version is None and message.method != INITIALIZE else None
            token = self._http.token.text
            async with self._http.exchange("POST", self._headers(message, used), message.raw) as answer:
                if answer.status == _UNAUTHORIZED and self._http.token.is_newer_than(token):
                    continue
                if answer.status != _NOT_FOUND or used is None or used.id is None:
                    await self._check(answer)
                    self._note(message)
                    yield answer
                    return
            await self.renew(used)
        raise NotSentError("the relay forgets each session at once")

    @asynccontextmanager
    async def stream(self, session: Session) -> AsyncIterator[Answer]:
        """Hold the stream of what the relay says in ``session`` without being asked.

        Raises:
            SessionGoneError: there is no such session.
            NotSentError: the relay is not there.
            LostError: the relay went away.
            RefusedError: the relay has no such stream to give.
        """
        token = self._http.token.text
        async with self._http.exchange("GET", session.headers()) as answer:
            if answer.status == _NOT_FOUND:
                raise SessionGoneError
            if answer.status == _UNAUTHORIZED and self._http.token.is_newer_than(token):
                raise NotSentError("the token has changed")
            await self._check(answer)
            if not answer.is_stream:
                raise RefusedError("INTERNAL_ERROR", "The relay gives no stream of changes.")
            yield answer

    async def renew(self, gone: Session) -> None:
        """Open a session in the place of ``gone``, with the client's own words, unless that is done.

        Raises:
            NotSentError: there is still none.
            RefusedError: the relay will not open one.
        """
        async with self._renewing:
            if self.session is not gone or self._opening is None:
                return
            try:
                session = await self._open(self._opening)
                if self._ready is not None:
                    async with self._http.exchange("POST", session.headers(), self._ready.raw) as answer:
                        await self._check(answer)
            except LostError as error:
                raise NotSentError(str(error)) from None
            self.session = session

    def take(self, opening: Message, answer: Answer, result: Mapping[str, Any]) -> None:
        """Note that ``opening`` was answered with ``result``, and a session is open."""
        self._opening = opening
        self.session = _opened(answer, result)

    async def close(self) -> None:
        """End the session that is open, if the relay is there to hear it."""
        if self.session is not None and self.session.id is not None:
            async with self._http.exchange("DELETE", self.session.headers()):
                self.session = None

    def _headers(self, message: Message, session: Session | None) -> dict[str, str]:
        if session is not None:
            return session.headers()
        if message.version is not None:
            self._version = message.version
        elif message.method == INITIALIZE or self._version is None:
            return {}
        # What says nothing of its era, a notification or what is none of JSON, is of its client's.
        return message.headers() | {"mcp-protocol-version": header_value(self._version)}

    def _note(self, message: Message) -> None:
        if message.method == INITIALIZED and self.session is not None:
            self._ready = message
            self.follows.set()

    async def _open(self, opening: Message) -> Session:
        async with self._http.exchange("POST", {}, opening.raw) as answer:
            await self._check(answer)
            async with aclosing(answer.messages()) as messages:
                async for _, value in messages:
                    if value.get("id") == opening.id and isinstance(result := value.get("result"), dict):
                        return _opened(answer, result)
        raise NotSentError("the relay opens no session")

    async def _check(self, answer: Answer) -> None:
        """Return if ``answer`` is for the client to read: a refusal in HTTP's own words is not."""
        if answer.status < _REDIRECTS:
            return
        is_message, reason = await answer.read_refusal()
        if answer.status == _UNAVAILABLE:
            raise NotSentError(reason)
        if is_message:
            return
        if answer.status >= _SERVER_ERRORS:
            raise LostError(reason)
        if answer.status == _UNAUTHORIZED:
            text = f"The relay does not accept the token: {reason} {self._http.token.advice}"
            raise RefusedError("UNAUTHORIZED", text)
        raise RefusedError("INTERNAL_ERROR", f"The relay refuses: {reason}")


def _opened(answer: Answer, result: Mapping[str, Any]) -> Session:
    version = result.get("protocolVersion")
    return Session(answer.session_id, version if isinstance(version, str) else None)
