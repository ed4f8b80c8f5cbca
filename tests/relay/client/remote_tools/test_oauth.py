"""OAuth client credentials: the secret goes to the configured issuer alone, the token to the server alone."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs

import pytest

from relay.remote_tools import ClientCredentials, HttpServer, Reason, ToolUnauthorized
from tests.fakes.guarded import guarded
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.raw_http_server import Asked, RawServer, http_answer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
RESOURCE = "/.well-known/oauth-protected-resource/mcp"
BASIC = base64.b64encode(b"client-1:the-secret").decode()


@dataclass(slots=True)
class Issuer:
    """An authorization server that issues ``access-1``, ``access-2`` and so on."""

    url: str = ""
    issued: int = 0
    asked: list[Asked] = field(default_factory=list)
    metadata: dict[str, object] = field(default_factory=dict)

    async def respond(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answer one request."""
        self.asked.append(asked)
        path = asked.head.split(" ")[1]
        document: dict[str, object]
        if path.startswith("/.well-known/oauth-authorization-server"):
            document = {
                "issuer": self.url,
                "authorization_endpoint": f"{self.url}/authorize",
                "token_endpoint": f"{self.url}/token",
                "response_types_supported": ["code"],
                **self.metadata,
            }
        elif path == "/token":
            self.issued += 1
            document = {"access_token": f"access-{self.issued}", "token_type": "Bearer", "expires_in": 3600}
        else:
            writer.write(http_answer(404, b""))
            return
        writer.write(http_answer(200, json.dumps(document).encode(), **{"Content-Type": "application/json"}))

    @property
    def secrets(self) -> int:
        """How often it was shown the secret."""
        return sum(BASIC in asked.head for asked in self.asked)

    @property
    def scopes(self) -> list[list[str]]:
        """The scope of each request for a token; an empty list where none was requested."""
        forms = [parse_qs(asked.body.decode()) for asked in self.asked if asked.method == "POST"]
        return [form.get("scope", []) for form in forms]


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    async with RawServer.running(issuer.respond) as server:
        issuer.url = server.url
        yield issuer


def advertise(fake: FakeMcpServer, url: str, issuer: Issuer) -> None:
    document = {"resource": url, "authorization_servers": [issuer.url]}
    fake.documents[RESOURCE] = document


def server(url: str, issuer: Issuer) -> HttpServer:
    return HttpServer(url, ClientCredentials("client-1", "the-secret", issuer.url))


async def test_the_secret_goes_to_the_issuer_and_the_token_to_the_server() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        async with guarded(server(url, issuer)) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
            await client.tools.execute("echo", PING)
    assert (issuer.issued, issuer.secrets) == (1, 1)
    assert {head["authorization"] for head in fake.heads} == {"Bearer access-1"}
    assert not any("access-1" in asked.head for asked in issuer.asked)
    # The ids of a call are for the server.
    assert not any("x-correlation-id" in asked.head.lower() for asked in issuer.asked)


async def test_a_server_that_names_another_issuer_gets_no_secret_sent_there() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as thief, issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, thief)
        async with guarded(server(url, issuer)) as client:
            with pytest.raises(ToolUnauthorized) as caught:
                await client.tools.execute("echo", PING)
    assert caught.value.reason is Reason.CREDENTIAL
    assert thief.asked == []


@pytest.mark.parametrize(
    ("scope", "requested"), [("mcp:read", ["mcp:read"]), (None, [])], ids=["configured", "none"]
)
@pytest.mark.parametrize("stated", ["challenge", "resource", "issuer"])
async def test_the_configured_scope_is_requested_whatever_the_server_states(
    scope: str | None, requested: list[str], stated: str
) -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        wide = ["admin", "payments:write"]
        if stated == "challenge":
            fake.challenge = f'Bearer scope="{" ".join(wide)}"'
        elif stated == "resource":
            fake.documents[RESOURCE]["scopes_supported"] = wide
        else:
            issuer.metadata["scopes_supported"] = wide
        credential = ClientCredentials("client-1", "the-secret", issuer.url, scope)
        async with guarded(HttpServer(url, credential)) as client:
            assert (await client.tools.execute("echo", PING)).structured == PING
    assert issuer.scopes == [requested]


async def test_metadata_is_read_from_the_servers_origin_and_the_issuer_alone() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as internal, issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        for address in (f"{internal.url}/latest/meta-data", f"{issuer.url}/admin/restart"):
            fake.challenge = f'Bearer resource_metadata="{address}"'
            fake.token = f"access-{issuer.issued + 1}"
            async with guarded(server(url, issuer)) as client:
                assert (await client.tools.execute("echo", PING)).structured == PING
    assert internal.asked == []
    paths = {asked.head.split(" ")[1] for asked in issuer.asked}
    assert paths == {"/.well-known/oauth-authorization-server", "/token"}


async def test_the_secret_is_not_sent_unencrypted_to_where_the_issuer_points() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as other, issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        issuer.metadata["token_endpoint"] = f"{other.url}/token"
        async with guarded(server(url, issuer)) as client:
            with pytest.raises(ToolUnauthorized):
                await client.tools.execute("echo", PING)
    assert other.asked == []


async def test_a_call_that_is_not_idempotent_is_not_sent_again_with_a_new_token() -> None:
    fake = FakeMcpServer(token="access-1")
    async with issuing() as issuer, fake.over_http() as url:
        advertise(fake, url, issuer)
        async with guarded(server(url, issuer)) as client:
            await client.tools.list_tools()
            fake.token = "access-2"
            with pytest.raises(ToolUnauthorized) as caught:
                await client.tools.execute("echo", PING)
            assert (caught.value.reason, len(fake.heads)) == (Reason.SECOND_SEND, 1)
            # The new token was requested, and is used for the next call.
            assert (await client.tools.execute("echo", PING)).structured == PING
    assert issuer.issued == 2
