"""One message to the relay and its response, in either era, and the session that the old era needs.

A relay that was restarted has lost its sessions. The client's opening messages are kept, so that a new
session can be opened without the client. Must not send a message twice unless the relay has answered that it
did not process it.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from relay.client.stdio_bridge.http_client import LostError, NotSentError, RelayHttp, RelayResponse
from relay.client.stdio_bridge.messages import INITIALIZE, INITIALIZED, Message, header_value
from schemas.error_roots import PeerError

_REDIRECTS = 300
_UNAUTHORIZED = 401
_NOT_FOUND = 404
_SERVER_ERRORS = 500
_UNAVAILABLE = 503
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
        """Return the headers of its requests."""
        headers = {"mcp-session-id": self.id, "mcp-protocol-version": self.version}
        return {name: value for name, value in headers.items() if value}


class Conversation:
    """The messages of one client to one relay, over ``http``.

    Attributes:
        session: the one that is open, in the old era.
        follows: whether the client accepts notifications in it.
    """

    def __init__(self, http: RelayHttp) -> None:
        self._http = http
        self._opening: Message | None = None
        self._ready: Message | None = None
        self._renewing = asyncio.Lock()
        self._version: str | None = None
        self.session: McpSession | None = None
        self.follows = asyncio.Event()

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
                    self._note(message)
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
        async with self._renewing:
            if self.session is not gone or self._opening is None:
                return
            try:
                session = await self._open(self._opening)
                if self._ready is not None:
                    async with self._http.exchange("POST", session.headers(), self._ready.raw) as response:
                        await self._check(response)
            except LostError as error:
                raise NotSentError(str(error)) from None
            self.session = session

    def take(self, opening: Message, response: RelayResponse, result: Mapping[str, Any]) -> None:
        """Note that ``opening`` was answered with ``result``, and a session is open."""
        self._opening = opening
        self.session = _opened(response, result)

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

    def _note(self, message: Message) -> None:
        if message.method == INITIALIZED and self.session is not None:
            self._ready = message
            self.follows.set()

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
        if response.status >= _SERVER_ERRORS:
            raise LostError(reason)
        if response.status == _UNAUTHORIZED:
            text = f"The relay does not accept the token: {reason} {self._http.token.advice}"
            raise RefusedError("UNAUTHORIZED", text)
        raise RefusedError("INTERNAL_ERROR", f"The relay refuses: {reason}")


def _opened(response: RelayResponse, result: Mapping[str, Any]) -> McpSession:
    version = result.get("protocolVersion")
    return McpSession(response.session_id, version if isinstance(version, str) else None)
