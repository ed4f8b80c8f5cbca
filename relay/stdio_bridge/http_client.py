"""HTTP as a bridge speaks it to a relay: bytes there, and the messages that come back, as they come.

A request that failed was never sent, or it may have arrived, or it was refused: these are told apart, for on
that depends whether it may be sent again. Must not know what the messages mean.
"""

import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from schemas.files import read_named_secret
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

TOKEN_VARIABLE = "EDGE_TOKEN"  # noqa: S105 - the name of a variable, not a secret
MAX_ANSWER_BYTES = 16 * 1024 * 1024

_CONNECT_S = 10.0
_SILENCE_S = 60.0  # the relay says something every 15 s on a stream, if only a comment
_KEEPALIVE_S = 2.0  # the relay closes what is idle for 5 s, and must not do so under a request
_TOKEN = re.compile(r"[!-~]{1,8192}")
_LINE_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_NEWLINES = bytes.maketrans(b"\r\n", b"  ")
_NEVER_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout)


class NotSentError(Exception):
    """The relay was not reached; nothing was processed."""


class LostError(Exception):
    """The relay, or the way to it, went away; what was sent may have been processed."""


class TokenMissingError(Exception):
    """There is no token where it should be; the text says where that is."""


class Token:
    """The bearer token, and where a newer one comes from: a file, or else nowhere."""

    def __init__(self, text: str, file: Path | None = None) -> None:
        self._file = file
        self.text = text

    @classmethod
    def find(cls, file: Path | None, environment: Mapping[str, str]) -> "Token":
        """Return the token in ``file``, or else that of the environment.

        Raises:
            TokenMissingError: there is none.
            OSError: the file cannot be read, or others can read it.
        """
        if file is not None:
            text = _read_token(file)
            where = f"{file} holds no token"
        else:
            text = environment.get(TOKEN_VARIABLE, "").strip()
            where = f"there is no token: give one with --token-file, or in {TOKEN_VARIABLE}"
        if not _TOKEN.fullmatch(text):
            raise TokenMissingError(where)
        return cls(text, file)

    @property
    def advice(self) -> str:
        """What to do about a token that is refused."""
        if self._file is not None:
            return "Put a new one into the file that --token-file names."
        return f"Put a new one into {TOKEN_VARIABLE}, and start this program again."

    def is_newer_than(self, refused: str) -> bool:
        """Look at the file again, and tell whether there is another token than ``refused``."""
        if self._file is not None:
            try:
                text = _read_token(self._file)
            except OSError:
                text = ""  # it is being replaced, perhaps
            if _TOKEN.fullmatch(text):
                self.text = text
        return self.text != refused


def _read_token(file: Path) -> str:
    try:
        return read_named_secret(file).strip()
    except UnicodeDecodeError:
        return ""


class Answer:
    """What comes back for one request. Nothing is believed to be a message until it was read as one."""

    def __init__(self, response: httpx2.Response, chunks: AsyncIterator[bytes]) -> None:
        self._chunks = chunks
        self._body: bytes | None = None
        self.status = response.status_code
        self.session_id = response.headers.get("mcp-session-id")
        self._type = response.headers.get("content-type", "").partition(";")[0].strip().lower()

    @property
    def is_stream(self) -> bool:
        """Whether messages come one by one."""
        return self._type == "text/event-stream"

    async def messages(self) -> AsyncGenerator[tuple[bytes, dict[str, Any]], None]:
        """Return each message as it comes: its bytes, on one line, and what they say.

        Raises:
            LostError: the connection broke, or more came than anybody could want.
        """
        async for document in self._events() if self.is_stream else self._whole():
            value = _read_object(document)
            if value.get("jsonrpc") == "2.0":
                # White space between the parts of JSON; within a string there are no newlines.
                yield document.translate(_NEWLINES).strip(), value

    async def read_refusal(self) -> tuple[bool, str]:
        """Read the body beside a status that is a refusal: whether it is a message, and why, fit to be shown.

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
                raise LostError("an answer without end")
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
    """The data of server-sent events, out of bytes in whatever pieces they come."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """Take what came, and return the data of the events that it ended.

        Raises:
            LostError: an event does not end.
        """
        self._rest += chunk
        if len(self._rest) + self._size > MAX_ANSWER_BYTES:
            raise LostError("an event without end")
        if b"\n" not in chunk and b"\r" not in self._rest:
            return []  # not worth a search through a long line for each piece of it
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
    """The connections to one relay, at ``url``."""

    def __init__(self, url: str, token: Token, tls: ssl.SSLContext) -> None:
        self._url = url
        self.token = token
        limits = httpx2.Limits(keepalive_expiry=_KEEPALIVE_S)
        # The bare transport: no proxy, no cookie, no redirect, no decompression.
        self._transport = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, limits=limits)
        times = httpx2.Timeout(_SILENCE_S, connect=_CONNECT_S, pool=None)
        self._extensions = {"timeout": times.as_dict()}

    async def close(self) -> None:
        """Close what is open."""
        await self._transport.aclose()

    @asynccontextmanager
    async def exchange(
        self, method: str, headers: Mapping[str, str], content: bytes = b""
    ) -> AsyncIterator[Answer]:
        """Send one request, and hold what comes back.

        Raises:
            NotSentError: it did not get to the relay.
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
        except _NEVER_SENT as error:
            raise NotSentError(printable(str(error))) from None
        except (httpx2.TransportError, OSError) as error:
            raise LostError(type(error).__name__) from None
        async with aclosing(response.aiter_raw()) as chunks:
            yield Answer(response, chunks)
