"""How an agent asks the relay, over HTTP and TLS, and what it is answered. Must not judge or retry."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Self
from urllib.parse import urlsplit

import httpx2

from schemas.addresses import MCP_PATH
from schemas.tls import client_context
from tests.chaos.site import Site
from tests.fakes.mcp_wire import ERA_META, NEW

PATIENCE_S = 10.0
NOT_REACHED = (httpx2.HTTPError, OSError)
"""What is raised when a connection is not made, or breaks."""


@dataclass(frozen=True, slots=True)
class Agent:
    """An agent that presents ``token`` at ``url``, whose host the relay knows by the name ``host``."""

    url: str
    host: str
    token: str
    roots: ssl.SSLContext

    def at(self, url: str) -> Self:
        """Return the same agent at another relay of the fleet, which is reached at ``url``."""
        return replace(self, url=url)

    @asynccontextmanager
    async def connected(self, patience_s: float = PATIENCE_S) -> AsyncIterator[httpx2.AsyncClient]:
        """Hold the connections of one caller."""
        headers = {
            "host": self.host,
            "authorization": f"Bearer {self.token}",
            "accept": "application/json, text/event-stream",
            "content-type": "application/json",
            "mcp-protocol-version": NEW,
            "mcp-method": "tools/call",
        }
        timeout = httpx2.Timeout(patience_s)
        async with httpx2.AsyncClient(
            base_url=self.url, headers=headers, verify=self.roots, timeout=timeout, trust_env=False
        ) as http:
            yield http


async def agent_of(site: Site, sub: str, *scopes: str) -> Agent:
    """Return an agent of the first relay, whose token allows ``scopes``."""
    token = await site.token(sub, *scopes)
    url = site.agent_url(site.topology.relays[0])
    return Agent(url, urlsplit(site.public_url).netloc, token, client_context(site.roots))


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A ``tools/call``; ``meta`` is added to what every request of the era says."""

    request_id: str
    name: str
    arguments: Mapping[str, Any]
    headers: Mapping[str, str] | None = None
    meta: Mapping[str, Any] | None = None

    def content(self) -> str:
        """Return the JSON-RPC request."""
        meta = {**ERA_META, **(self.meta or {})}
        params = {"name": self.name, "arguments": self.arguments, "_meta": meta}
        return json.dumps({"jsonrpc": "2.0", "id": self.request_id, "method": "tools/call", "params": params})

    def all_headers(self) -> dict[str, str]:
        return {"mcp-name": self.name, **(self.headers or {})}


async def messages(http: httpx2.AsyncClient, call: ToolCall) -> AsyncIterator[dict[str, Any]]:
    """Yield each message of the answer, as it arrives.

    Raises:
        httpx2.HTTPError, OSError: the connection was not made, or broke, or the relay refused to read it.
    """
    async with http.stream("POST", MCP_PATH, content=call.content(), headers=call.all_headers()) as response:
        if response.status_code == httpx2.codes.TOO_MANY_REQUESTS:
            response.raise_for_status()  # refused for its rate, before anything read it
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            yield json.loads(await response.aread())
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data:"))


def code_of(message: Mapping[str, Any]) -> str:
    """Return ``ok``, or the code of the error that an answer is."""
    if "error" in message:
        data = message["error"].get("data") or {}
        return str(data.get("code", message["error"].get("code")))
    result = message["result"]
    return str(result["_meta"]["edge-kubelet/error"]["code"]) if result.get("isError") else "ok"
