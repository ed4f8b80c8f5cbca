"""The bridge's HTTP client: sends bytes to a relay, and yields the messages of its response as they arrive.

Whether a request may be repeated depends on how it failed: never sent, perhaps sent, or refused. Each is an
error type of its own. Must not know what the messages mean.
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from relay.client.credentials import RenewableToken
from relay.client.http import CONNECT_TIMEOUT_S, UNCOMPRESSED, UNSENT, transport_to, why_unreachable
from schemas.error_roots import PeerError
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

MAX_ANSWER_BYTES = 16 * 1024 * 1024

_SILENCE_S = 60.0  # the relay sends something every 15 s on a stream, if only a comment
_KEEPALIVE_S = 2.0  # the relay closes idle connections after 5 s, and must not do so during a request
_NEWLINES = bytes.maketrans(b"\r\n", b"  ")


class NotSentError(PeerError):
    """The relay was not reached; nothing was processed."""


class MisdirectedError(NotSentError):
    """The URL or the root must be changed first, as the text says: another attempt would end the same."""


class LostError(PeerError):
    """The connection to the relay was lost; what was sent may have been processed."""


class RelayResponse:
    """The response to one request. Nothing counts as a message until it was parsed as one."""

    def __init__(self, response: httpx2.Response) -> None:
        # A character for each byte: what the parser of events returns is what arrived.
        response.encoding = "latin-1"
        # Not requested: what is compressed all the same is no message, and is not expanded.
        response.headers.pop("content-encoding", None)
        self._response = response
        self._body: bytes | None = None
        self.status = response.status_code
        self.session_id = response.headers.get("mcp-session-id")
        self.may_come_again = "retry-after" in response.headers
        content_type: str = response.headers.get("content-type", "")
        self.is_stream = content_type.partition(";")[0].strip().lower() == "text/event-stream"

    async def messages(self) -> AsyncGenerator[tuple[bytes, dict[str, Any]], None]:
        """Yield each message as it arrives: its bytes, on one line, and its value.

        Raises:
            LostError: the connection broke, or the response is too large.
        """
        async with aclosing(self.documents() if self.is_stream else self._whole()) as documents:
            async for document in documents:
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

    async def documents(self) -> AsyncGenerator[bytes, None]:
        """Yield the data of each event of a stream.

        Raises:
            LostError: as of ``messages``.
        """
        # The parser counts a byte that is not ASCII twice.
        events = httpx2.EventSource(self._response, 2 * MAX_ANSWER_BYTES)
        try:
            async for event in events:
                yield event.data.encode("latin-1")
        except httpx2.SSEError:
            raise LostError("an event that is too large") from None
        except (httpx2.TransportError, OSError) as error:
            raise LostError(type(error).__name__) from None

    async def _whole(self) -> AsyncGenerator[bytes, None]:
        if self._body is not None:
            yield self._body
            return
        body = bytearray()
        try:
            async for chunk in self._response.aiter_raw():
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise LostError("an answer that is too large")
        except (httpx2.TransportError, OSError) as error:
            raise LostError(type(error).__name__) from None
        yield bytes(body)


def _read_object(document: bytes) -> dict[str, Any]:
    try:
        value = loads(document, max_bytes=MAX_ANSWER_BYTES)
    except StrictJsonError:
        return {}
    return value if isinstance(value, dict) else {}


class RelayHttp:
    """The connections to one relay, at ``url``. ``root``: the file of the root that ``tls`` trusts."""

    def __init__(
        self, url: str, token: RenewableToken, tls: ssl.SSLContext, root: Path | None = None
    ) -> None:
        self._url = url
        self._root = root
        self.token = token
        self._transport = transport_to(url, tls, limits=httpx2.Limits(keepalive_expiry=_KEEPALIVE_S))
        times = httpx2.Timeout(_SILENCE_S, connect=CONNECT_TIMEOUT_S, pool=None)
        self._extensions = {"timeout": times.as_dict()}

    async def close(self) -> None:
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
            **UNCOMPRESSED,
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
        except (httpx2.RemoteProtocolError, *UNSENT) as error:
            reason, advice = why_unreachable(error, self._url, self._root)
            if isinstance(error, httpx2.RemoteProtocolError):
                raise LostError(reason) from None
            if advice is not None:
                raise MisdirectedError(f"{reason}. {advice}") from None
            raise NotSentError(reason) from None
        except (httpx2.TransportError, OSError) as error:
            raise LostError(type(error).__name__) from None
        response.request = request
        try:
            yield RelayResponse(response)
        finally:
            await response.aclose()
