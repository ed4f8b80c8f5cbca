"""MCP over HTTP by hand, in both eras: every byte of a body is the test's own."""

import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import httpx2
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY

from schemas.addresses import HostPort
from schemas.tls import client_context

OLD: Final = "2025-11-25"
NEW: Final = "2026-07-28"
ERA_META: Final[Mapping[str, Any]] = {PROTOCOL_VERSION_META_KEY: NEW, CLIENT_CAPABILITIES_META_KEY: {}}
"""What every request of the new era says in its ``_meta``."""


class McpWire:
    """A client of one era, whose session, if that has one, is open."""

    def __init__(self, http: httpx2.AsyncClient, era: str) -> None:
        self.era = era
        self._http = http
        self._headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        address: HostPort,
        era: str,
        token: str,
        tls: ssl.SSLContext | None = None,
        name: str | None = None,
    ) -> AsyncIterator["McpWire"]:
        """Hold a client that presents ``token``, over ``tls`` if it is given, to a server called ``name``."""
        headers = {"Authorization": f"Bearer {token}"} | ({"Host": name} if name else {})
        base_url, verify = (
            (f"http://{address}", client_context()) if tls is None else (f"https://{address}", tls)
        )
        async with httpx2.AsyncClient(
            base_url=base_url, headers=headers, trust_env=False, verify=verify
        ) as http:
            wire = cls(http, era)
            if era == OLD:
                await wire._initialize()
            yield wire

    async def _initialize(self) -> None:
        me = {"name": "wire", "version": "0"}
        params = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": me}
        message = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": params}
        response = (await self.post(json.dumps(message).encode())).raise_for_status()
        self._headers |= {"mcp-session-id": response.headers["mcp-session-id"], "mcp-protocol-version": OLD}
        ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        (await self.post(json.dumps(ready).encode())).raise_for_status()

    async def post(self, body: bytes, **headers: str) -> httpx2.Response:
        """Send ``body`` with the headers of a ``tools/call``, with ``headers`` added."""
        own = {"mcp-protocol-version": NEW, "mcp-method": "tools/call"} if self.era == NEW else {}
        return await self._http.post("/mcp", content=body, headers={**self._headers, **own, **headers})

    async def delete(self) -> httpx2.Response:
        """End the session of the old era."""
        return await self._http.delete("/mcp", headers=self._headers)

    @asynccontextmanager
    async def event_stream(self) -> AsyncIterator[AsyncIterator[str]]:
        """Hold the event stream of a session of the old era; yield its lines."""
        headers = {name: value for name, value in self._headers.items() if name != "content-type"}
        timeout = httpx2.Timeout(20, read=None)
        async with self._http.stream("GET", "/mcp", headers=headers, timeout=timeout) as response:
            assert response.status_code == 200
            yield response.aiter_lines()

    def request(self, name: object, arguments: object, **meta: object) -> dict[str, Any]:
        """Return the message of a call, as this era has it."""
        params = {"name": name, "arguments": arguments, "_meta": {**self.era_meta, **meta}}
        return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}

    @property
    def era_meta(self) -> Mapping[str, Any]:
        """What this era wants in every ``_meta``."""
        return ERA_META if self.era == NEW else {}

    async def ask(self, message: Mapping[str, Any], **headers: str) -> dict[str, Any]:
        """Send ``message`` and return the JSON-RPC answer, whether it came as JSON or as an event."""
        name = message.get("params", {}).get("name")
        if self.era == NEW and isinstance(name, str) and name.isprintable():
            headers["mcp-name"] = name
        response = await self.post(json.dumps(message).encode(), **headers)
        text = response.text
        if response.headers["content-type"].startswith("text/event-stream"):
            text = next(line[5:] for line in text.splitlines() if line.startswith("data: {"))
        answer: dict[str, Any] = json.loads(text)
        return answer
