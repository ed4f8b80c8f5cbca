"""``RemoteTools`` over the fake MCP server, with time and chance in the hands of the test."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from relay.client.remote_tools.servers import HttpServer, Server
from relay.remote_tools import AuditRecord, ClientEnvironment, Permissions, RemoteTools, Risk
from tests.fakes.mcp_server import FakeMcpServer

EVERYTHING = Permissions(allow=("*",), max_risk=Risk.ADMIN)


@dataclass(slots=True)
class Pauses:
    """Sleeps that take no time, and are remembered."""

    slept: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        """Return at once."""
        self.slept.append(seconds)


@dataclass(slots=True)
class Guarded:
    """A client, and what it left behind."""

    tools: RemoteTools
    records: list[AuditRecord]
    pauses: Pauses


@asynccontextmanager
async def guarded(server: str | Server, **options: Any) -> AsyncIterator[Guarded]:
    """Hold a client of ``server`` that may call everything, unless ``options`` say otherwise."""
    records: list[AuditRecord] = []
    pauses = Pauses()
    environment = options.pop("environment", None) or ClientEnvironment(chance=lambda: 0.5)
    given = {"audit": records.append, "permissions": EVERYTHING, **options}
    async with RemoteTools(server, environment=replace(environment, sleep=pauses), **given) as tools:
        yield Guarded(tools, records, pauses)


@asynccontextmanager
async def over_http(fake: FakeMcpServer, **options: Any) -> AsyncIterator[Guarded]:
    """Hold such a client of ``fake`` over HTTP."""
    async with fake.over_http() as url, guarded(HttpServer(url), **options) as client:
        yield client
