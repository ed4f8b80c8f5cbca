"""Fetches what a client publishes of itself, from a server that a stranger has named.

Guarded: https on its usual port, to public addresses alone; the name is resolved once, and what is connected
to is an address that was checked. No redirect is followed; time and bytes are bounded. Must not parse what it
has fetched.
"""

import asyncio
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import h11
from attrs import define, field

from schemas.addresses import is_public
from schemas.error_roots import PeerError
from schemas.tls import client_context

MAX_BYTES = 64 * 1024
TIMEOUT_S = 3.0
_PIECE = 16 * 1024
_PORT = 443
_URL = re.compile(
    r"https://((?:[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z][a-z0-9-]{0,61}[a-z0-9])(/[A-Za-z0-9._~!$&'()*+,;=:@%/-]*)"
)
_MAX_URL = 512
_OK = 200
_MAX_AGE = re.compile(r"(?:^|[,\s])max-age=([0-9]{1,9})(?:$|[,\s])")

ResolveHost = Callable[[str], Awaitable[Sequence[str]]]


class FetchError(PeerError):
    """It could not be fetched; the text is a few words of our own."""


class Fetched(NamedTuple):
    """What came back, and how many seconds its server lets it be kept; None if it says nothing."""

    body: bytes
    max_age_s: int | None


def parts_of(url: str) -> tuple[str, str] | None:
    """Return host and path of a URL that may be fetched; None if it may not.

    >>> parts_of("https://claude.ai/oauth/mcp-oauth-client-metadata")
    ('claude.ai', '/oauth/mcp-oauth-client-metadata')
    >>> parts_of("https://169.254.169.254/latest")
    """
    found = _URL.fullmatch(url) if len(url) <= _MAX_URL else None
    if found is None:
        return None
    host, path = found.groups()
    segments = path.lower().replace("%2e", ".").split("/")
    return None if path == "/" or {".", ".."} & {*segments} else (host, path)


async def resolved(host: str) -> Sequence[str]:
    """Return the addresses of ``host``.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, _PORT, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


@define(eq=False, repr=False)
class Fetcher:
    """``resolve`` returns a host's addresses; ``is_allowed`` says which may be connected to, on ``port``."""

    _resolve: ResolveHost = resolved
    _is_allowed: Callable[[str], bool] = is_public
    _port: int = _PORT
    _tls: ssl.SSLContext = field(factory=client_context)

    async def fetch(self, url: str) -> Fetched:
        """Return the document at ``url``.

        Raises:
            FetchError: it may not be fetched, or was not there in time.
        """
        if (parts := parts_of(url)) is None:
            raise FetchError("not an https URL with a host name and a path")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                return await self._fetched(*parts)
        except TimeoutError:
            raise FetchError("no answer in time") from None
        except (OSError, UnicodeError):  # of a name that cannot be encoded, and of TLS
            raise FetchError("not reached") from None
        except h11.RemoteProtocolError:
            raise FetchError("the answer is not HTTP") from None

    async def _fetched(self, host: str, path: str) -> Fetched:
        addresses = await self._resolve(host)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise FetchError("not at a public address")
        # One of those that were checked: another resolution could answer otherwise.
        reader, writer = await asyncio.open_connection(
            addresses[0], self._port, ssl=self._tls, server_hostname=host, limit=_PIECE
        )
        try:
            return await self._answer(reader, writer, host, path)
        finally:
            writer.close()
            with suppress(OSError):
                writer.transport.abort()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, path: str
    ) -> Fetched:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_PIECE)
        headers = [("host", host), ("accept", "application/json"), ("connection", "close")]
        headers.append(("accept-encoding", "identity"))
        writer.write(http.send(h11.Request(method="GET", target=path, headers=headers)) or b"")
        writer.write(http.send(h11.EndOfMessage()) or b"")
        body, max_age, got = bytearray(), None, 0
        while True:
            match http.next_event():
                case h11.NEED_DATA:
                    data = await reader.read(_PIECE)
                    got += len(data)
                    if got > 2 * MAX_BYTES:
                        raise FetchError("too large")
                    http.receive_data(data)
                case h11.Response(status_code=status, headers=answered):
                    if status != _OK:
                        raise FetchError(f"answered {status}")
                    max_age = _max_age(answered)
                case h11.Data(data=data):
                    body += data
                    if len(body) > MAX_BYTES:
                        raise FetchError("too large")
                case h11.EndOfMessage():
                    return Fetched(bytes(body), max_age)
                case h11.InformationalResponse():
                    continue
                case _:
                    raise FetchError("the answer did not end")


def _max_age(headers: Iterable[tuple[bytes, bytes]]) -> int | None:
    control = b",".join(value for name, value in headers if name == b"cache-control").decode(
        "ascii", "replace"
    )
    if "no-store" in control or "no-cache" in control:
        return 0
    found = _MAX_AGE.search(control)
    return None if found is None else int(found[1])
