"""OAuth client credentials through the SDK's provider.

The access token is sent to the server's origin, the client secret to the configured issuer alone. A server
decides neither which scope is requested nor which addresses are read. Must not store a token: each process
requests its own.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing

import httpx2
from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from relay.client.remote_tools.http_client import origin_of
from relay.client.remote_tools.servers import ClientCredentials, read_secret


class MemoryTokens:
    """Keeps the access token of one connection."""

    def __init__(self) -> None:
        self._tokens: OAuthToken | None = None

    async def get_tokens(self) -> OAuthToken | None:
        """Return the token, if there is one."""
        return self._tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        """Keep ``tokens``."""
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
