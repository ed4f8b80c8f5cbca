"""Which server is called, and what the caller presents to it: a bearer token, or an OAuth client's.

A token is sent to the server's origin, a client secret to the configured issuer alone. A server decides
neither which scope is requested nor which addresses are read. Must not connect, show a secret in ``repr``, or
store a token: each process requests its own.
"""

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from schemas.addresses import PLAIN_OPTION, AddressError, is_loopback
from schemas.bearer_tokens import is_bearer_token
from schemas.error_roots import OperatorError
from schemas.files import read_named_secret

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
        except (OSError, UnicodeDecodeError) as error:
            raise CredentialError(f"{source} cannot be read as a token: {_why(error)}") from error
    elif isinstance(source, str):
        text, where = source, "the token"
    else:
        text, where = await _called(source), "the token of the function"
    if not is_bearer_token(text):
        raise CredentialError(f"{where} is empty, or no token")
    return text


def _why(error: OSError | UnicodeDecodeError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text"
    return error.strerror or str(error)


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
        if parts.scheme not in {"http", "https"} or not parts.hostname or parts.fragment or parts.username:
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


async def provider(url: str, credentials: ClientCredentials) -> ConfiguredProvider:
    """Return the provider for the server at ``url``.

    Raises:
        CredentialError: there is no client secret.
    """
    return ConfiguredProvider(url, credentials, await read_secret(credentials.client_secret))
