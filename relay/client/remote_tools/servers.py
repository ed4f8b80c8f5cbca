"""Which server is called, what the caller presents to it, and the HTTP client below the SDK's transport.

A token is sent to the server's origin, a client secret to the configured issuer alone. A server decides
neither which scope is requested nor which addresses are read. No secret is shown in ``repr``, and no token is
stored: each process requests its own.

The SDK gives a request to the client and ends the whole connection on an exception of it. So no exception
leaves ``send``: a fault is noted in the ``WireAttempt`` of the operation, and the SDK gets a plain answer
that makes it fail that one request. Must not know tools.
"""

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
from attrs import define
from mcp.client.auth import OAuthFlowError
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from relay.client.http import CONNECT_TIMEOUT_S, UNCOMPRESSED, UNSENT, transport_to, why_unreachable
from relay.client.remote_tools.errors import Reason
from schemas.addresses import PLAIN_OPTION, AddressError, is_loopback
from schemas.error_roots import OperatorError, PeerError
from schemas.files import read_named_secret
from schemas.strict_json import StrictJsonError, loads
from schemas.text import is_bearer_token, printable

ANONYMOUS_OPTION = "--anonymous"
"""The option that allows calls of another machine without a credential."""

Secret = str | Path | Callable[[], str | Awaitable[str]]
"""A secret, the file that holds it (mode 0600, read for every request), or a function that returns it."""


class CredentialError(OperatorError):
    """There is no usable token or secret; the text names its source, never its content."""


async def read_secret(source: Secret) -> str:
    """Return the secret of ``source`` as it is now.

    Raises:
        CredentialError: there is none.
    """
    if isinstance(source, Path):
        try:
            text, where = read_named_secret(source).strip(), str(source)
        except UnicodeDecodeError as error:
            raise CredentialError(f"{source} cannot be read as a token: it is not text") from error
        except OSError as error:
            raise CredentialError(f"{source} cannot be read as a token: {error.strerror or error}") from error
    elif isinstance(source, str):
        text, where = source, "the token"
    else:
        text, where = await _called(source), "the token of the function"
    if not is_bearer_token(text):
        raise CredentialError(f"{where} is empty, or no token")
    return text


async def _called(source: Callable[[], str | Awaitable[str]]) -> str:
    try:
        given = source()
        return given if isinstance(given, str) else await given
    except Exception as error:  # the caller's own function, which may fail in any way
        raise CredentialError(
            f"the function that returns the token failed: {type(error).__name__}"
        ) from error


@dataclass(frozen=True, slots=True)
class BearerToken:
    """A bearer token."""

    token: Secret = field(repr=False)


@dataclass(frozen=True, slots=True)
class ClientCredentials:
    """OAuth client credentials.

    ``issuer`` names the only authorization server that gets the secret. ``scope`` is what is requested, words
    with spaces between them; None: what the issuer gives this client by default.
    """

    client_id: str
    client_secret: Secret = field(repr=False)
    issuer: str
    scope: str | None = None

    def __post_init__(self) -> None:
        """Check the issuer.

        Raises:
            AddressError: the secret would be sent to it unencrypted.
        """
        parts = urlsplit(self.issuer)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise AddressError("the issuer is not of the form https://issuer.example")


@dataclass(frozen=True, slots=True)
class HttpServer:
    """An MCP server over Streamable HTTP, or the HTTP+SSE that was before it.

    Attributes:
        url: its endpoint.
        credential: what is presented, to this URL's origin only.
        client_certificate: the PEM files of a certificate and its key (mode 0600), for mTLS.
        root: the PEM file of the root that issued the server's certificate. Default: this machine's roots.
        plain_allowed: permit http to another machine: others on the network can read and change everything.
        anonymous: permit calls of another machine without any credential.
    """

    url: str
    credential: BearerToken | ClientCredentials | None = None
    client_certificate: tuple[Path, Path] | None = None
    root: Path | None = None
    plain_allowed: bool = False
    anonymous: bool = False

    def __post_init__(self) -> None:
        """Check the URL.

        Raises:
            AddressError: it is none, contains credentials, is not encrypted, or is another machine's without
                anything to present to it.
        """
        wrong = AddressError("the URL of the server is not of the form https://mcp.example/mcp")
        try:
            parts = urlsplit(self.url)
            _ = parts.port
        except ValueError:
            raise wrong from None
        has_credentials = "@" in parts.netloc
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.fragment or has_credentials:
            raise wrong
        if is_loopback(parts.hostname):
            return
        if parts.scheme == "http" and not self.plain_allowed:
            raise AddressError(f"{self.name} is not encrypted: use https, or say {PLAIN_OPTION}")
        if self.credential is None and self.client_certificate is None and not self.anonymous:
            raise AddressError(
                f"there is no credential for {self.name}: give a token or a client certificate, "
                f"or say {ANONYMOUS_OPTION}"
            )

    @property
    def name(self) -> str:
        """The name under which pins are kept: the URL without its query, which may hold a secret."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"


@dataclass(frozen=True, slots=True)
class StdioServer:
    """An MCP server that is started as a process, and spoken to on its standard input and output.

    It inherits no environment but PATH, HOME and the like; ``environment`` is added to that.
    """

    command: str
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    directory: Path | None = None

    @property
    def name(self) -> str:
        """The name under which pins are kept."""
        return " ".join(("stdio:", self.command, *self.arguments))


Server = HttpServer | StdioServer


Origin = tuple[str, bytes, int | None]


def origin_of(url: httpx2.URL) -> Origin:
    """Return scheme, host and port of ``url``; httpx2 has them normalised, and no port for the usual one."""
    return url.scheme, url.raw_host, url.port


@define(eq=False, repr=False, slots=False)
class BearerAuth(httpx2.Auth):
    """Presents a bearer token to one origin, and to no other."""

    _origin: Origin
    _credential: BearerToken

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Add the token of this moment if the request goes to the origin."""
        if origin_of(request.url) == self._origin:
            request.headers["Authorization"] = f"Bearer {await read_secret(self._credential.token)}"
        else:
            request.headers.pop("Authorization", None)
        yield request


class MemoryTokens:
    """Keeps the access token of one connection."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self._tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        """Return None: the client is configured, not registered."""
        return None

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        """Ignore ``client_info``, as above."""


class ConfiguredProvider(ClientCredentialsOAuthProvider):
    """The SDK's provider for the server at ``url``, held to what is configured in ``credentials``."""

    def __init__(self, url: str, credentials: ClientCredentials, secret: str) -> None:
        super().__init__(
            server_url=url,
            storage=MemoryTokens(),
            client_id=credentials.client_id,
            client_secret=secret,
            scope=credentials.scope,
            issuer=credentials.issuer,
        )
        self._scope = credentials.scope
        self._server = origin_of(httpx2.URL(url))
        self._issuer_origin = origin_of(httpx2.URL(credentials.issuer))

    async def async_auth_flow(
        self, request: httpx2.Request
    ) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        """Run the SDK's flow; what it would request elsewhere is answered here with 404."""
        async with aclosing(super().async_auth_flow(request)) as flow:
            outgoing = await anext(flow)
            while True:
                permitted = outgoing is request or self._permits(outgoing)
                response = (yield outgoing) if permitted else httpx2.Response(404, request=outgoing)
                try:
                    outgoing = await flow.asend(response)
                except StopAsyncIteration:
                    return

    def _permits(self, request: httpx2.Request) -> bool:
        origin = origin_of(request.url)
        if request.method == "POST":
            # With the secret, to the token endpoint that the issuer's metadata names.
            return request.url.scheme == "https" or origin == self._issuer_origin
        return origin == self._server or (
            origin == self._issuer_origin and "/.well-known/" in request.url.path
        )

    async def _perform_authorization(self) -> httpx2.Request:
        # The SDK has replaced it by what the server demands or the metadata list.
        self.context.client_metadata.scope = self._scope
        return await super()._perform_authorization()


REFUSALS = (401, 403)
"""The HTTP statuses of a server that does not serve this caller."""
MAX_ANSWER_BYTES = 8 * 1024 * 1024

LEFT_OPEN_S = 5.0
"""How much longer than an operation its requests last: the SDK may tell the server that it is given up."""

_MAX_RETRY_AFTER_MS = 600_000
_MAX_REFUSAL_BYTES = 4096
_STAND_IN = 503
_OK = 200


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
        ends_at: when what is still open of its requests is closed, a time of the event loop; None: never. In
            the old era the SDK leaves a request open that is given up, until the server ends it.
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
    ends_at: float | None = None


ATTEMPT: ContextVar[WireAttempt | None] = ContextVar("ATTEMPT", default=None)
"""The operation of the current task. The SDK runs each request in the context of the task that made it."""


class SecondSendError(PeerError):
    """The server made the SDK send a call again that may be sent once only."""


class EncodedError(PeerError):
    """The server compressed an answer, which was not requested: its size could not be limited."""


class GuardedHttpClient(httpx2.AsyncClient):
    """The client for one server. It reads no credentials from the environment, and no proxy for loopback.

    ``root``: the file of the root that ``tls`` trusts, if one was named.
    """

    def __init__(
        self, url: str, auth: httpx2.Auth | None, tls: ssl.SSLContext, root: Path | None = None
    ) -> None:
        super().__init__(
            auth=auth,
            transport=LimitedTransport(transport_to(url, tls)),
            trust_env=False,
            headers=dict(UNCOMPRESSED),
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
            if attempt.sends > 0 and not isinstance(error, UNSENT):
                return _failed(request, attempt, Reason.CONNECTION_LOST)
            reason, attempt.advice = why_unreachable(error, self._url, self._root)
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


@define(eq=False, repr=False, slots=False)
class LimitedTransport(httpx2.AsyncBaseTransport):
    """A transport whose answers end at ``MAX_ANSWER_BYTES``, except the stream of a GET."""

    _inner: httpx2.AsyncBaseTransport

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send ``request``, and limit what is read of its answer.

        Raises:
            EncodedError: the answer is compressed.
        """
        attempt = ATTEMPT.get() or WireAttempt()
        try:
            async with asyncio.timeout_at(attempt.ends_at):
                response = await self._inner.handle_async_request(request)
        except OSError as error:
            # It is too late; or httpx2 lets through what TLS says of a record that was changed on its way.
            raise httpx2.ReadError(str(error)) from error
        if _is_encoded(response):
            await response.aclose()
            raise EncodedError("the answer is compressed")
        if isinstance(response.stream, httpx2.AsyncByteStream):
            content_type = response.headers.get("content-type", "").lower()
            is_stream = request.method == "GET" and content_type.startswith("text/event-stream")
            limit = None if is_stream else MAX_ANSWER_BYTES
            response.stream = _LimitedStream(response.stream, limit, attempt)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


@define(eq=False, repr=False, slots=False)
class _LimitedStream(httpx2.AsyncByteStream):
    _inner: httpx2.AsyncByteStream
    _limit: int | None
    _attempt: WireAttempt

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size, chunks = 0, aiter(self._inner)
        try:
            while True:
                async with asyncio.timeout_at(self._attempt.ends_at):
                    chunk = await anext(chunks, None)
                if chunk is None:
                    return
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
