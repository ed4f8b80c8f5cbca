"""What the HTTP clients of the agent's side have in common: how they connect, and why they have not.

A server on this machine is never reached by a proxy: the proxy would get the token, and its loopback is
another. Must not put a proxy's address into an error: it can hold a password.
"""

import asyncio
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx2

from schemas.addresses import is_loopback
from schemas.error_roots import OperatorError
from schemas.faults import connection_advice, connection_reason, no_http_reason
from schemas.tls import client_context, read_root

CONNECT_TIMEOUT_S = 10.0
UNCOMPRESSED: Mapping[str, str] = {"accept-encoding": "identity"}
"""Requests answers whose size can be limited as they are read."""
MOST_ANSWER_BYTES = 64 << 10
ANSWERED_WITHIN_S = 30.0
UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)
"""The errors after which nothing of a request was sent."""


class ProxyError(OperatorError):
    """The environment names a proxy that cannot be used."""


def proxy_of(url: str) -> str | None:
    """Return the URL of the proxy that the environment names for ``url``; None: connections are direct.

    Raises:
        ProxyError: it is not an HTTP proxy.
    """
    target = urlsplit(url)
    host = target.hostname or ""
    if is_loopback(host) or proxy_bypass(host):
        return None
    proxies = getproxies()
    proxy = proxies.get(target.scheme) or proxies.get("all")
    if proxy is None:
        return None
    try:
        # By both: one accepts half an address in brackets, the other a port that is no number.
        is_usable = httpx2.URL(proxy).scheme in {"http", "https"} and bool(urlsplit(proxy).hostname)
    except (httpx2.InvalidURL, ValueError):
        is_usable = False
    if not is_usable:
        raise ProxyError(f"{target.scheme}_proxy or all_proxy does not name an HTTP proxy: http://HOST:PORT")
    return proxy


def tls_by(root: Path | None, certificate: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    """Return the TLS that verifies a server by the root in a file, else by this machine's roots.

    Raises:
        TlsFilesError, OSError: a file cannot be used.
    """
    return client_context(read_root(root) if root is not None else None, certificate)


def transport_to(url: str, tls: ssl.SSLContext, **options: Any) -> httpx2.AsyncHTTPTransport:
    """Return the connections to ``url``: no cookie, no redirect, and no credential of the environment.

    Raises:
        ProxyError: as ``proxy_of``.
    """
    return httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, proxy=proxy_of(url), **options)


async def short_answer(client: httpx2.AsyncClient, method: str, url: str, **options: Any) -> httpx2.Response:
    """Return the answer to one request, uncompressed, of which it reads just over ``MOST_ANSWER_BYTES``.

    Raises:
        httpx2.HTTPError: there is none.
        TimeoutError: it is not there in ``ANSWERED_WITHIN_S``.
    """
    body = bytearray()
    async with (
        asyncio.timeout(ANSWERED_WITHIN_S),
        client,
        client.stream(method, url, headers=UNCOMPRESSED, **options) as answer,
    ):
        async for part in answer.aiter_raw():
            body += part
            if len(body) > MOST_ANSWER_BYTES:
                break
    headers = httpx2.Headers(answer.headers)
    headers.pop("content-encoding", None)  # else it would be decoded, to any size
    return httpx2.Response(answer.status_code, headers=headers, content=bytes(body))


def why_unreachable(
    error: Exception, url: str, root: Path | None, *, takes_root: bool = True
) -> tuple[str, str | None]:
    """Return why ``url`` was not reached, printable, and what to change about it, if that is known.

    ``root``: the file of the root that the server's certificate was verified by, if one was named;
    ``takes_root``: whether one can be.
    """
    is_http = not isinstance(error, httpx2.RemoteProtocolError)
    reason = connection_reason(error) if is_http else no_http_reason(url)
    return reason, connection_advice(error, root, takes_root=takes_root)
