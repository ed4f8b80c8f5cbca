"""OAuth client credentials through the SDK's provider.

The access token is sent to the server's origin, the client secret to the configured issuer alone. Must not
store a token: each process requests its own.
"""

from mcp.client.auth.extensions.client_credentials import ClientCredentialsOAuthProvider
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken

from relay.remote_tools.servers import ClientCredentials, read_secret


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


async def provider(url: str, credentials: ClientCredentials) -> ClientCredentialsOAuthProvider:
    """Return the SDK's provider for the server at ``url``.

    Raises:
        CredentialError: there is no client secret.
    """
    return ClientCredentialsOAuthProvider(
        server_url=url,
        storage=MemoryTokens(),
        client_id=credentials.client_id,
        client_secret=await read_secret(credentials.client_secret),
        scope=credentials.scope,
        issuer=credentials.issuer,
    )
