"""The HTTP client below the SDK's transport: it keeps faults, sizes, origins and repetitions under control.

The SDK gives a request to the client and ends the whole connection on an exception of it. So no exception
leaves ``send``: a fault is noted in the ``WireAttempt`` of the operation, and the SDK gets a plain answer
that makes it fail that one request. Must not know tools.
"""

import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
from mcp.client.auth import OAuthFlowError

from relay.client.proxies import proxy_of
from relay.client.remote_tools.errors import Reason
from relay.client.remote_tools.servers import BearerToken, CredentialError, read_secret
from schemas.error_roots import PeerError
from schemas.faults import connection_advice, connection_reason, no_http_reason
from schemas.strict_json import StrictJsonError, loads
from schemas.text import printable

REFUSALS = (401, 403)
"""The HTTP statuses of a server that does not serve this caller."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024
CONNECT_TIMEOUT_S = 10.0

_MAX_RETRY_AFTER_MS = 600_000
_MAX_REFUSAL_BYTES = 4096
_STAND_IN = 503
_OK = 200
_UNSENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


@dataclass(slots=True)
class WireAttempt:
    """One operation on the wire: what its requests carry, and what became of them.

    Attributes:
        headers: added to every request to the server's origin.
        may_repeat: whether a call may be sent more than once, as for a redirect or a new token.
        sends: how many times a call was sent.
        status: the last HTTP status.
        retry_after_ms: what the last answer stated.
        refusal: the document that it stated its refusal with, as far as it has one.
        fault: what went wrong below HTTP.
        detail: what the system reported of it, or which credential is meant; printable ASCII.
        advice: what to change about it, one sentence; None if that is not known.
        message: the last request that carried a message of MCP.
    """

    headers: dict[str, str] = field(default_factory=dict)
    may_repeat: bool = True
    sends: int = 0
    status: int | None = None
    retry_after_ms: int | None = None
    refusal: object = None
    fault: Reason | None = None
    detail: str | None = None
    advice: str | None = None
    message: httpx2.Request | None = None


Origin = tuple[str, bytes, int | None]

ATTEMPT: ContextVar[WireAttempt | None] = ContextVar("ATTEMPT", default=None)
"""The operation of the current task. The SDK runs each request in the context of the task that made it."""


class SecondSendError(PeerError):
    """The server made the SDK send a call again that may be sent once only."""


class EncodedError(PeerError):
    """The server compressed an answer, which was not requested: its size could not be limited."""


class BearerAuth(httpx2.Auth):
    """Presents a bearer token to one origin, and to no other."""

    def __init__(self, origin: Origin, credential: BearerToken) -> None:
        self._origin = origin
        self._credential = credential

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Add the token of this moment if the request goes to the origin."""
        if origin_of(request.url) == self._origin:
            request.headers["Authorization"] = f"Bearer {await read_secret(self._credential.token)}"
        else:
            request.headers.pop("Authorization", None)
        yield request


class GuardedHttpClient(httpx2.AsyncClient):
    """The client for one server. It reads no credentials from the environment, and no proxy for loopback.

    ``root``: the file of the root that ``tls`` trusts, if one was named.
    """

    def __init__(
        self, url: str, auth: httpx2.Auth | None, tls: ssl.SSLContext, root: Path | None = None
    ) -> None:
        transport = LimitedTransport(
            httpx2.AsyncHTTPTransport(verify=tls, trust_env=False, proxy=proxy_of(url))
        )
        super().__init__(
            auth=auth,
            transport=transport,
            trust_env=False,
            headers={"Accept-Encoding": "identity"},
            # The deadline of each operation bounds reading: a stream without messages is not broken.
            timeout=httpx2.Timeout(CONNECT_TIMEOUT_S, read=None),
            event_hooks={"request": [self._mark], "response": [_note]},
        )
        self._url = url
        self._root = root
        self._origin = origin_of(httpx2.URL(url))

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        """Send ``request``; answer a fault with a status of our own, and note it."""
        attempt = ATTEMPT.get() or WireAttempt()
        try:
            return await super().send(request, **options)
        except (CredentialError, OAuthFlowError) as error:
            # The text of a credential is ours; that of a flow can be the server's.
            detail = printable(str(error)) if isinstance(error, CredentialError) else None
            return _failed(request, attempt, Reason.CREDENTIAL, detail)
        except SecondSendError:
            return _failed(request, attempt, Reason.SECOND_SEND)
        except EncodedError:
            return _failed(request, attempt, Reason.PROTOCOL)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL) as error:
            if attempt.sends > 0 and not isinstance(error, _UNSENT):
                return _failed(request, attempt, Reason.CONNECTION_LOST)
            attempt.advice = connection_advice(error, self._root)
            is_http = not isinstance(error, httpx2.RemoteProtocolError)
            reason = connection_reason(error) if is_http else no_http_reason(self._url)
            return _failed(request, attempt, Reason.UNREACHABLE, reason)

    async def _mark(self, request: httpx2.Request) -> None:
        attempt = ATTEMPT.get()
        if attempt is None:
            return
        if origin_of(request.url) == self._origin:
            # One by one: `update` builds the headers anew.
            for name, value in attempt.headers.items():
                request.headers[name] = value
        # Of a request that follows a redirect, the content is not read yet.
        content = await request.aread()
        if request.method == "POST" and content.startswith(b"{"):
            attempt.message = request
        if is_call(request.method, content):
            if attempt.sends and not attempt.may_repeat:
                raise SecondSendError("a call that is not idempotent would be sent twice")
            attempt.sends += 1


class LimitedTransport(httpx2.AsyncBaseTransport):
    """A transport whose answers end at ``MAX_ANSWER_BYTES``, except the stream of a GET."""

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send ``request``, and limit what is read of its answer.

        Raises:
            EncodedError: the answer is compressed.
        """
        try:
            response = await self._inner.handle_async_request(request)
        except OSError as error:
            # httpx2 lets through what TLS says of a record that was changed on its way.
            raise httpx2.ReadError(str(error)) from error
        if _is_encoded(response):
            await response.aclose()
            raise EncodedError("the answer is compressed")
        if isinstance(response.stream, httpx2.AsyncByteStream):
            limit = None if request.method == "GET" and _is_stream(response) else MAX_ANSWER_BYTES
            response.stream = _LimitedStream(response.stream, limit, ATTEMPT.get() or WireAttempt())
        return response

    async def aclose(self) -> None:
        """Close the connections."""
        await self._inner.aclose()


class _LimitedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream, limit: int | None, attempt: WireAttempt) -> None:
        self._inner = inner
        self._limit = limit
        self._attempt = attempt

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for chunk in self._inner:
                size += len(chunk)
                if self._limit is not None and size > self._limit:
                    self._attempt.fault = Reason.TOO_LARGE
                    raise httpx2.StreamError(f"the answer has more than {self._limit} bytes")
                yield chunk
        except (httpx2.HTTPError, OSError):
            self._attempt.fault = Reason.CONNECTION_LOST
            # The one exception of a body that the SDK expects.
            raise httpx2.StreamError("the connection was lost") from None

    async def aclose(self) -> None:
        await self._inner.aclose()


def origin_of(url: httpx2.URL) -> Origin:
    """Return scheme, host and port of ``url``; httpx2 has them normalised, and no port for the usual one."""
    return url.scheme, url.raw_host, url.port


def is_call(method: str, content: bytes) -> bool:
    """Return whether a request of ``method`` with ``content`` carries ``tools/call``."""
    return method == "POST" and b'"method":"tools/call"' in content


def retry_after_ms(headers: httpx2.Headers) -> int | None:
    """Return the delay of ``Retry-After`` in seconds; a date, which needs equal clocks, is ignored."""
    text = headers.get("retry-after", "")
    if not (text.isascii() and text.isdigit() and len(text) <= 6):  # noqa: PLR2004 - eleven days
        return None
    return min(int(text) * 1000, _MAX_RETRY_AFTER_MS)


def _is_encoded(response: httpx2.Response) -> bool:
    # Not by name: a look-up decodes every header.
    return any(
        name.lower() == b"content-encoding" and value.lower() != b"identity"
        for name, value in response.headers.raw
    )


def _is_stream(response: httpx2.Response) -> bool:
    return bool(response.headers.get("content-type", "").lower().startswith("text/event-stream"))


async def _note(response: httpx2.Response) -> None:
    attempt = ATTEMPT.get()
    # Not of what a credential's own requests are answered with.
    if attempt is not None and response.request is attempt.message:
        attempt.status = response.status_code
        attempt.retry_after_ms = retry_after_ms(response.headers) if response.status_code != _OK else None
        attempt.refusal = await _refusal(response) if response.status_code in REFUSALS else None


async def _refusal(response: httpx2.Response) -> object:
    """Return the short JSON document of ``response``; None if it has another body."""
    length = response.headers.get("content-length", "")
    if not (length.isascii() and length.isdigit() and int(length[:9]) <= _MAX_REFUSAL_BYTES):
        return None
    try:
        return loads(await response.aread(), max_bytes=_MAX_REFUSAL_BYTES)
    except StrictJsonError:
        return None


def _failed(
    request: httpx2.Request, attempt: WireAttempt, fault: Reason, detail: str | None = None
) -> httpx2.Response:
    attempt.fault, attempt.detail = fault, detail
    return httpx2.Response(_STAND_IN, request=request)
