"""OAuth client credentials: the secret goes to the configured issuer alone, the token to the server alone."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from relay.remote_tools import ClientCredentials, HttpServer, Reason, ToolUnauthorized
from tests.fakes.guarded import guarded
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.raw_http_server import Asked, RawServer, http_answer

pytestmark = pytest.mark.integration

PING = {"message": "ping"}
BASIC = base64.b64encode(b"client-1:the-secret").decode()


@dataclass(slots=True)
class Issuer:
    """An authorization server that issues ``access-1``, ``access-2`` and so on."""

    url: str = ""
    issued: int = 0
    asked: list[Asked] = field(default_factory=list)

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


@asynccontextmanager
async def issuing() -> AsyncIterator[Issuer]:
    issuer = Issuer()
    async with RawServer.running(issuer.respond) as server:
        issuer.url = server.url
        yield issuer


def advertise(fake: FakeMcpServer, url: str, issuer: Issuer) -> None:
    document = {"resource": url, "authorization_servers": [issuer.url]}
    fake.documents["/.well-known/oauth-protected-resource/mcp"] = document


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
    assert (thief.secrets, thief.issued) == (0, 0)


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
