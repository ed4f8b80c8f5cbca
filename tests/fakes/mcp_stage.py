"""A relay's side of MCP on a real server, and its clients of both eras."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.session import IncomingMessage
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, PROTOCOL_VERSION_META_KEY
from starlette.applications import Starlette

from relay.auth.permissions import Rights
from relay.fleet.change_notifier import ChangeNotifier, Listener
from relay.fleet.selection import WHOLE_FLEET, Selection
from relay.http.request_guard import AllowedHosts, RequestGuard
from relay.limits.rate_limits import PER_AGENT, Allowance
from relay.mcp_api.change_streams import OpenStreams
from relay.routing.port import LocalRouter
from schemas.tls import client_context
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.serving import Server, refuse
from tests.fakes.signer import NODE_ID

BOUND_S = 30
OLD, NEW = "2025-11-25", "2026-07-28"
OPENING = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "wire", "version": "0"}}
Era = Literal["legacy", "2026-07-28"]
ERAS = [pytest.param("legacy", id="2025"), pytest.param(NEW, id="2026")]
ECHO_NAME = f"sysecho.{NODE_ID}.echo.invoke"
METRICS_NAME = f"sys.{NODE_ID}.sysmetrics.snapshot"
PING = {"message": "ping"}
ACCEPT = "application/json, text/event-stream"


class CountingNotifier(ChangeNotifier):
    """Counts who has begun to listen."""

    listeners = 0

    def listen(
        self, rights: Rights, listener: Listener, selection: Selection = WHOLE_FLEET
    ) -> Callable[[], None]:
        self.listeners += 1
        return super().listen(rights, listener, selection)


class Stage:
    """A relay's side of MCP behind its guard, on a real server."""

    def __init__(
        self, hub: Hub, router: LocalRouter, server: Server, per_agent: Allowance = PER_AGENT
    ) -> None:
        self.hub = hub
        self.address = server.address
        self.notifier = CountingNotifier(hub.fleet, hub.log, interval_s=0.001)
        self.streams = OpenStreams()
        self._server = server
        self.mcp = hub.mcp(hub.gateway(router, per_agent=per_agent), self.notifier, self.streams)

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Stage"]:
        self._server.app = RequestGuard(
            allowed=AllowedHosts.of(PUBLIC_URL, self.address),
            authenticator=self.hub.authenticator,
            metadata_of=None,
            metrics=self.hub.metrics,
            refusals=self.hub.refusals,
            mcp=self.mcp,
            node_sessions=refuse,
            other=Starlette(),
        )
        ready = asyncio.Event()
        tasks = [asyncio.create_task(self._serve(ready)), asyncio.create_task(self.notifier.run())]
        await ready.wait()
        yield self
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, ready: asyncio.Event) -> None:
        async with self.mcp.running():
            ready.set()
            await asyncio.Event().wait()

    @asynccontextmanager
    async def http(self, token: str | None = None) -> AsyncIterator[httpx2.AsyncClient]:
        headers = {"Authorization": f"Bearer {token or self.hub.token()}"}
        base_url = f"http://{self.address}"
        # Its own context would read all the roots of the machine, those that its environment does not name.
        tls = client_context()
        async with httpx2.AsyncClient(
            base_url=base_url, headers=headers, trust_env=False, verify=tls
        ) as http:
            yield http

    @asynccontextmanager
    async def client(
        self,
        era: str,
        *,
        token: str | None = None,
        query: str = "",
        heard: "Notified | None" = None,
    ) -> AsyncIterator[Client]:
        """Hold an official client."""
        async with asyncio.timeout(BOUND_S), self.http(token) as http:
            transport = streamable_http_client(f"http://{self.address}/mcp{query}", http_client=http)
            async with Client(transport, mode=era, message_handler=heard) as client:
                yield client

    @asynccontextmanager
    async def wire(self, era: str, *, token: str | None = None, query: str = "") -> AsyncIterator["Wire"]:
        """Hold a client that shows what is really sent."""
        async with asyncio.timeout(BOUND_S), self.http(token) as http:
            wire = Wire(http, f"/mcp{query}", era)
            if era == "legacy":
                await wire.initialize()
            yield wire


class Notified:
    """Hears notifications of the old era."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[IncomingMessage] = asyncio.Queue()

    async def __call__(self, message: IncomingMessage) -> None:
        self._heard.put_nowait(message)

    async def next(self) -> IncomingMessage:
        return await asyncio.wait_for(self._heard.get(), BOUND_S)

    @property
    def is_empty(self) -> bool:
        return self._heard.empty()


class Wire:
    """MCP by hand, so that what the official client does not know is seen too."""

    def __init__(self, http: httpx2.AsyncClient, path: str, era: str) -> None:
        self.http = http
        self.headers = {"accept": ACCEPT, "content-type": "application/json"}
        self._path = path
        self._era = era

    async def initialize(self) -> None:
        response = await self.post("initialize", OPENING)
        response.raise_for_status()
        self.headers["mcp-session-id"] = response.headers["mcp-session-id"]
        self.headers["mcp-protocol-version"] = OLD
        await self.notify("notifications/initialized")

    async def notify(self, method: str) -> None:
        body = {"jsonrpc": "2.0", "method": method}
        (await self.http.post(self._path, json=body, headers=self.headers)).raise_for_status()

    async def post(self, method: str, params: dict[str, Any] | None = None) -> httpx2.Response:
        headers, params = dict(self.headers), dict(params or {})
        if self._era == NEW:
            headers |= {"mcp-protocol-version": NEW, "mcp-method": method}
            if isinstance(name := params.get("name", params.get("uri")), str):
                headers["mcp-name"] = name
            params["_meta"] = {
                PROTOCOL_VERSION_META_KEY: NEW,
                CLIENT_INFO_META_KEY: {"name": "wire", "version": "0"},
                CLIENT_CAPABILITIES_META_KEY: {},
            }
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return await self.http.post(self._path, json=body, headers=headers)

    async def ask(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the JSON-RPC answer, whether it came as JSON or as an event."""
        response = await self.post(method, params)
        text = response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            text = next(line[5:] for line in text.splitlines() if line.startswith("data: {"))
        answer: dict[str, Any] = json.loads(text)
        return answer

    async def result(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = (await self.ask(method, params))["result"]
        return result


OTHER: dict[str, Any] = {"sub": "agent-2"}
