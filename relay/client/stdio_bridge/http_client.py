"""The bridge's HTTP client: sends bytes to a relay, and yields the messages of its response as they arrive.

Whether a request may be repeated depends on how it failed: never sent, perhaps sent, or refused. Each is an
error type of its own. Must not know what the messages mean.
"""

import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from relay.client.proxies import proxy_of
from relay.client.stdio_bridge.bearer_token import RenewableToken
from schemas.error_roots import PeerError
from schemas.faults import connection_advice, connection_reason, no_http_reason
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_ANSWER_BYTES = 16 * 1024 * 1024

_CONNECT_S = 10.0
_SILENCE_S = 60.0  # the relay sends something every 15 s on a stream, if only a comment
_KEEPALIVE_S = 2.0  # the relay closes idle connections after 5 s, and must not do so during a request
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_NEWLINES = bytes.maketrans(b"\r\n", b"  ")
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class NotSentError(PeerError):
    """The relay was not reached; nothing was processed."""


class MisdirectedError(NotSentError):
    """The URL or the root must be changed first, as the text says: another attempt would end the same."""


class LostError(PeerError):
    """The connection to the relay was lost; what was sent may have been processed."""


class RelayResponse:
    """The response to one request. Nothing counts as a message until it was parsed as one."""

    def __init__(self, response: httpx2.Response, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._body: bytes | None = None
        self.status = response.status_code
        self.session_id = response.headers.get("mcp-session-id")
        self._type = response.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_stream(self) -> bool:
        """Whether it is a stream of messages."""
        return self._type == "text/event-stream"

    async def messages(self) -> AsyncGenerator[tuple[bytes, dict[str, Any]], None]:
        """Yield each message as it arrives: its bytes, on one line, and its value.

        Raises:
            LostError: the connection broke, or the response is too large.
        """
        async for document in self._events() if self.is_stream else self._whole():
            value = _read_object(document)
            if value.get("jsonrpc") == "2.0":
                # White space between the parts of JSON; within a string there are no newlines.
                yield document.translate(_NEWLINES).strip(), value

    async def read_refusal(self) -> tuple[bool, str]:
        """Read the body of a refusal: whether it is a message, and a printable reason.

        Raises:
            LostError: as of ``messages``.
        """
        async for document in self._whole():
            self._body = document
        value = _read_object(self._body or b"")
        message = value.get("message")
        return value.get("jsonrpc") == "2.0", printable(
            message if isinstance(message, str) else f"status {self.status}"
        )

    async def _whole(self) -> AsyncIterator[bytes]:
        if self._body is not None:
            yield self._body
            return
        body = bytearray()
        async for chunk in self._received():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise LostError("an answer that is too large")
        yield bytes(body)

    async def _events(self) -> AsyncIterator[bytes]:
        events = EventReader()
        async for chunk in self._received():
            for event in events.feed(chunk):
                yield event

    async def _received(self) -> AsyncIterator[bytes]:
        try:
            async for chunk in self._chunks:
                yield chunk
        except (httpx2.TransportError, OSError) as error:
            raise LostError(type(error).__name__) from None


def _read_object(document: bytes) -> dict[str, Any]:
    try:
        value = loads(document, max_bytes=MAX_ANSWER_BYTES)
    except StrictJsonError:
        return {}
    return value if isinstance(value, dict) else {}


class EventReader:
    """Parses server-sent events from chunks of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Add a chunk, and return the data of the events that it completes.

        Raises:
            LostError: an event is too large.
        """
        self._rest += chunk
        if len(self._rest) + self._size > MAX_ANSWER_BYTES:
            raise LostError("an event that is too large")
        if b"\n" not in chunk and b"\r" not in self._rest:
            return []  # no line ends here: do not search a long line again for each chunk
        *lines, rest = _LINE_END.split(bytes(self._rest))
        self._rest = bytearray(rest)
        return [event for line in lines if (event := self._line(line))]

    def _line(self, line: bytes) -> bytes:
        if line.startswith(b"data:"):
            data = line[5:].removeprefix(b" ")
            self._data.append(data)
            self._size += len(data)
        if line:
            return b""
        event = b"\n".join(self._data)
        self._data.clear()
        self._size = 0
        return event


class RelayHttp:
    """The connections to one relay, at ``url``. ``root``: the file of the root that ``tls`` trusts."""

    def __init__(
        self, url: str, token: RenewableToken, tls: ssl.SSLContext, root: Path | None = None
    ) -> None:
        self._url = url
        self._root = root
        self.token = token
        limits = httpx2.Limits(keepalive_expiry=_KEEPALIVE_S)
        # The bare transport: no cookie, no redirect, no decompression.
        self._transport = httpx2.AsyncHTTPTransport(
            verify=tls, trust_env=False, limits=limits, proxy=proxy_of(url)
        )
        times = httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S, pool=None)
        self._extensions = {"timeout": times.as_dict()}

    async def close(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    @asynccontextmanager
    async def exchange(
        self, method: str, headers: Mapping[str, str], content: bytes = b""
    ) -> AsyncIterator[RelayResponse]:
        """Send one request, and hold the response.

        Raises:
            NotSentError: it did not reach the relay.
            LostError: it may have.
        """
        own = {
            "accept": "application/json, text/event-stream" if content else "text/event-stream",
            "accept-encoding": "identity",
            "authorization": f"Bearer {self.token.text}",
            "edge-transport": "stdio",
        }
        if content:
            own["content-type"] = "application/json"
        request = httpx2.Request(
            method, self._url, headers={**headers, **own}, content=content, extensions=self._extensions
        )
        try:
            response = await self._transport.handle_async_request(request)
        except httpx2.RemoteProtocolError:
            raise LostError(no_http_reason(self._url)) from None
        except _NEVER_SENT as error:
            reason, advice = connection_reason(error), connection_advice(error, self._root)
            if advice is not None:
                raise MisdirectedError(f"{reason}. {advice}") from None
            raise NotSentError(reason) from None
        except (httpx2.TransportError, OSError) as error:
            raise LostError(type(error).__name__) from None
        async with aclosing(response.aiter_raw()) as chunks:
            yield RelayResponse(response, chunks)
