"""One HTTP request and its response, bounded in time and size, for the commands of the node.

On asyncio's streams, because one timeout then bounds all of it, also for a server that sends a byte a second.
By the proxy that the environment names, unless the server is on this machine.
Must not follow redirects, or keep connections.
Must not be imported by the running daemon, which has no use for it.
"""

import asyncio
import io
import re
from base64 import b64encode
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from http.client import HTTPResponse as ResponseParser
from ssl import SSLCertVerificationError, SSLContext
from types import SimpleNamespace
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from schemas.addresses import host_of, is_loopback, is_secure, port_of
from schemas.error_roots import PeerError
from schemas.faults import connection_advice, connection_reason, no_http_reason

_TIMEOUT_S = 10.0
_MAX_BYTES = 64 * 1024
_SECONDS = re.compile(r"[0-9]{1,9}")
_LONGEST_RETRY_S = 86_400
_PROXY_PORT = 80


class NoAnswerError(PeerError):
    """There was no response that can be parsed; the text is why."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request: a GET without a body, a POST of JSON with one.

    Attributes:
        url: the server's, in its normal form.
    """

    url: str
    path: str
    body: bytes | None = None

    def wire(self) -> bytes:
        headers = {"Host": urlsplit(self.url).netloc, "Connection": "close", "Accept-Encoding": "identity"}
        if self.body is not None:
            headers |= {"Content-Type": "application/json", "Content-Length": str(len(self.body))}
        return _head("GET" if self.body is None else "POST", self.path, headers) + (self.body or b"")


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response. It is as trustworthy as the connection was verified, and no more.

    Attributes:
        retry_after_s: what ``Retry-After`` asks for, of at most a day; None if it has no number of seconds.
    """

    status: int
    body: bytes = field(repr=False)
    retry_after_s: int | None = None


async def exchange(request: HttpRequest, tls: SSLContext, timeout_s: float = _TIMEOUT_S) -> HttpResponse:
    """Send ``request`` and return the response. ``tls`` is the context where the URL is https.

    Raises:
        SSLCertVerificationError: ``tls`` does not trust the server. Nothing was sent to it.
        NoAnswerError: it cannot be reached, does not answer in time, or with too much, or not in HTTP.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return _parsed(await _exchanged(request, tls), request.url)
    except SSLCertVerificationError:
        raise
    except TimeoutError:
        raise NoAnswerError(f"{request.url} does not answer within {timeout_s:g} s") from None
    except OSError as error:
        advice = connection_advice(error)
        end = f". {advice}" if advice is not None else ""
        raise NoAnswerError(f"{request.url} cannot be reached: {connection_reason(error)}{end}") from None


async def _exchanged(request: HttpRequest, tls: SSLContext) -> bytes:
    reader, writer = await _connected(request.url, tls)
    try:
        writer.write(request.wire())
        received = bytearray()
        while piece := await reader.read(_MAX_BYTES):
            received += piece
            if len(received) > _MAX_BYTES:
                raise NoAnswerError(f"{request.url} answers with more than a relay would")
        return bytes(received)
    finally:
        writer.transport.abort()
        with suppress(OSError):
            await writer.wait_closed()


async def _connected(url: str, tls: SSLContext) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = host_of(url), port_of(url)
    encrypted = tls if is_secure(url) else None
    proxy = None if is_loopback(host) or proxy_bypass(host) else _proxy("https" if is_secure(url) else "http")
    if proxy is None:
        return await asyncio.open_connection(host, port, ssl=encrypted)
    reader, writer = await asyncio.open_connection(proxy.hostname, proxy.port or _PROXY_PORT)
    try:
        await _open_tunnel(reader, writer, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", proxy)
        if encrypted is not None:
            await writer.start_tls(encrypted, server_hostname=host)
    except BaseException:
        writer.transport.abort()
        raise
    return reader, writer


def _proxy(scheme: str) -> SplitResult | None:
    """Return the HTTP proxy that the environment names for ``scheme``.

    Raises:
        NoAnswerError: it cannot be used. The text has nothing of it: a password may be in any part.
    """
    proxies = getproxies()
    try:
        named = urlsplit(proxies.get(scheme) or proxies.get("all") or "")
        _ = named.port, (named.hostname or "").encode("idna")
    except ValueError:
        text = f"{scheme}_proxy or all_proxy names no HTTP proxy that can be used: http://HOST:PORT"
        raise NoAnswerError(text) from None
    return named if named.scheme == "http" and named.hostname else None


async def _open_tunnel(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, proxy: SplitResult
) -> None:
    headers = {"Host": target}
    if proxy.username is not None:
        credentials = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}".encode()
        headers["Proxy-Authorization"] = "Basic " + b64encode(credentials).decode("ascii")
    writer.write(_head("CONNECT", target, headers))
    try:
        answer = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
        raise NoAnswerError(f"the proxy {proxy.hostname} does not speak HTTP as it should") from None
    status = answer.split(b" ", 2)[1:2]
    if status != [b"200"]:
        raise NoAnswerError(f"the proxy {proxy.hostname} does not connect to {target}")


def _parsed(received: bytes, url: str) -> HttpResponse:
    # All that the parser uses of a socket.
    response = ResponseParser(SimpleNamespace(makefile=lambda _mode: io.BytesIO(received)))  # type: ignore[arg-type]
    try:
        response.begin()
        return HttpResponse(response.status, response.read(), _seconds(response.getheader("retry-after")))
    except (HTTPException, ValueError, OverflowError):
        raise NoAnswerError(f"{url} is not used: {no_http_reason(url)}") from None


def _seconds(text: str | None) -> int | None:
    return min(int(text), _LONGEST_RETRY_S) if text is not None and _SECONDS.fullmatch(text) else None


def _head(method: str, path: str, headers: Mapping[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii")
