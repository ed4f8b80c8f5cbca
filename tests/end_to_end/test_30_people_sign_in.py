"""30. A person gives a client the relay's URL, signs in, and the client's next call answers.

Steps: a relay and a node · no person is invited, and nothing of sign-in is there · the operator invites a
person, who makes a passkey · the official client, from the URL alone: it registers itself, and the person
allows it in a browser · a tool answers · the person is revoked, and all ends within seconds.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

import httpx2
import pytest
from mcp.client.auth import AuthorizationCodeResult, OAuthClientProvider
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import OAuthClientInformationFull, OAuthClientMetadata, OAuthToken

from schemas.addresses import KINDS_PATH, mcp_url
from tests.fakes.chromium import CHROMIUM, chromium
from tests.fakes.person import Browser
from tests.fakes.small_fleet import SmallFleet, small_fleet

pytestmark = pytest.mark.long

BOUND_S = 60
CALLBACK = "http://127.0.0.1:47111/callback"


class Memory:
    """What the official client keeps."""

    def __init__(self) -> None:
        self.tokens: OAuthToken | None = None
        self.client: OAuthClientInformationFull | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class Visitor(Protocol):
    """A person at a browser."""

    async def accept_invitation(self, link: str) -> object: ...
    async def allowed(self, url: str) -> str:
        """Return where the browser was sent when the client was allowed."""
        ...


class WithoutScripts:
    """A browser that follows the pages, in this process."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser

    async def accept_invitation(self, link: str) -> object:
        return await self._browser.accept_invitation(link)

    async def allowed(self, url: str) -> str:
        return str(
            (
                await self._browser.allow(
                    url, choice="chosen", scope="tools:call:read_only", kind="system.echo"
                )
            ).headers["location"]
        )


@asynccontextmanager
async def without_scripts(url: str) -> AsyncIterator[Visitor]:
    async with httpx2.AsyncClient(base_url=url, trust_env=False) as http:
        yield WithoutScripts(Browser(http, url))


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path, host="localhost") as fleet:
        yield fleet


def provider(fleet: SmallFleet, visitor: Visitor, memory: Memory) -> OAuthClientProvider:
    """Return the sign-in of the official client, whose browser is ``visitor``."""
    sent_to: list[str] = []

    async def open_browser(url: str) -> None:
        sent_to.append(await visitor.allowed(url))

    async def callback() -> AuthorizationCodeResult:
        answer = {name: values[0] for name, values in parse_qs(urlsplit(sent_to.pop()).query).items()}
        return AuthorizationCodeResult(code=answer["code"], state=answer["state"], iss=answer["iss"])

    metadata = OAuthClientMetadata.model_validate(
        {"client_name": "An agent", "redirect_uris": [CALLBACK], "token_endpoint_auth_method": "none"}
    )
    return OAuthClientProvider(mcp_url(fleet.url, KINDS_PATH), metadata, memory, open_browser, callback)


@asynccontextmanager
async def signed_in(fleet: SmallFleet, visitor: Visitor, memory: Memory) -> AsyncIterator[Client]:
    auth = provider(fleet, visitor, memory)
    async with httpx2.AsyncClient(auth=auth, trust_env=False, timeout=BOUND_S) as http:
        transport = streamable_http_client(mcp_url(fleet.url, KINDS_PATH), http_client=http)
        async with Client(transport) as client:
            yield client


@asynccontextmanager
async def with_chromium(_url: str) -> AsyncIterator[Visitor]:
    async with chromium() as visitor:
        yield visitor
        assert visitor.problems == []


@pytest.mark.parametrize(
    "visiting",
    [
        without_scripts,
        pytest.param(with_chromium, marks=pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")),
    ],
)
async def test_from_the_url_alone_to_the_answer_of_a_tool(
    fleet: SmallFleet, visiting: Callable[[str], AbstractAsyncContextManager[Visitor]]
) -> None:
    await fleet.start_relay("--no-broker")
    node = await fleet.enrol("kitchen")
    await fleet.start_node("kitchen")
    async with httpx2.AsyncClient(base_url=fleet.url, trust_env=False) as http:
        assert (await http.get("/.well-known/oauth-authorization-server")).status_code == 404
        link = (await fleet.relay("people", "invite", "ada", "--role", "operator")).strip()
        async with asyncio.timeout(BOUND_S):
            while (await http.get("/.well-known/oauth-authorization-server")).status_code != 200:
                fleet.processes.check()

    memory = Memory()
    async with visiting(fleet.url) as visitor:
        await visitor.accept_invitation(link)
        async with asyncio.timeout(BOUND_S), signed_in(fleet, visitor, memory) as client:
            tools = await client.list_tools()
            assert "sysecho-echo" in str([tool.name for tool in tools.tools]) or tools.tools
            answer = None
            while answer is None or answer.is_error:
                answer = await client.call_tool(
                    "sysecho-invoke", {"node": node["node_id"], "message": "hello"}
                )
            assert "hello" in json.dumps(answer.structured_content)

            shown = json.loads(await fleet.relay("people", "show", "ada", "--json"))
            assert [grant["agent"] for grant in shown["grants"]] == ["ada/An-agent"]
            await fleet.relay("people", "revoke", "ada")
            assert memory.tokens is not None
            headers = {"Authorization": f"Bearer {memory.tokens.access_token}"}
            async with httpx2.AsyncClient(base_url=fleet.url, trust_env=False, headers=headers) as http:
                while (await http.post("/mcp/kinds", json={})).status_code != 401:
                    fleet.processes.check()
