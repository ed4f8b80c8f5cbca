"""``RemoteTools`` over the fake MCP server, with time and chance in the hands of the test."""

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from relay.client.remote_tools.servers import HttpServer, Server, StdioServer
from relay.fleet.tools import Projector, ToolSchemas
from relay.mcp_api.views.find_nodes import FIND_NODES_REFS
from relay.mcp_api.views.kind_tools import kind_schemas
from relay.remote_tools import AuditRecord, ClientEnvironment, Permissions, RemoteToolError, RemoteTools, Risk
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.shipped_kinds import SYSTEM_ECHO
from tests.fakes.signer import NOW_MS, SimulatedNode

ErrorT = TypeVar("ErrorT", bound=RemoteToolError)

EVERYTHING = Permissions(allow=("*",), max_risk=Risk.ADMIN)


@dataclass(slots=True)
class Pauses:
    """Sleeps that take no time, and are remembered."""

    slept: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


@dataclass(slots=True)
class Guarded:
    """A client, and what it left behind."""

    tools: RemoteTools
    records: list[AuditRecord]
    pauses: Pauses

    async def fails(self, expected: type[ErrorT], name: str, arguments: Any = None, **options: Any) -> ErrorT:
        """Return the error that a call ends with, of the type that is expected."""
        with pytest.raises(expected) as caught:
            await self.tools.execute(name, arguments, **options)
        return caught.value


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


def over_stdio(log: Path, *era: str) -> StdioServer:
    """Return the fake MCP server as a program, which writes each call that it receives to ``log``."""
    root = Path(__file__).parents[2]
    return StdioServer(
        sys.executable,
        ("-P", "-m", "tests.fakes.mcp_server", str(log), *era),
        {"PYTHONPATH": str(root)},
    )


# --- A fake MCP server in the place of a relay: the tools of simulated nodes, and what the nodes signed.


REGISTRY = SchemaRegistry()
PROJECTOR = Projector(REGISTRY, KindRegistry())
ECHO_OF_ANY = "sysecho-invoke"


def echoed(node_id: str) -> dict[str, Any]:
    """Return the result of a call of echo with the message ``ping``."""
    return {"message": "ping", "node_id": node_id, "received_at_ms": NOW_MS}


def relay_with(*nodes: SimulatedNode, **members: Any) -> FakeMcpServer:
    """Return a server that lists the tools of ``nodes``, whose manifests have ``members``."""
    fake = FakeMcpServer(tools=[])
    for node in nodes:
        fake.resources[f"node://{node.node_id}/manifest"] = node.manifest(**members).decode()
        fake.resources[f"node://{node.node_id}/identity"] = node.leaf_pem
        fake.results[f"sysecho.{node.node_id}.echo.invoke"] = echoed(node.node_id)
        capabilities = node.document(**members)["capabilities"]
        fake.tools += [tool.listed() for tool in PROJECTOR.project(node.node_id, capabilities).values()]
    return fake


def view_with(
    *nodes: SimulatedNode, finds_by: tuple[str, str] = FIND_NODES_REFS, **members: Any
) -> FakeMcpServer:
    """Return a server that lists the kinds view of ``nodes``, whose manifests have ``members``."""
    fake = relay_with(*nodes, **members)
    schemas = kind_schemas(REGISTRY, SYSTEM_ECHO.verbs["invoke"], takes_many=True)
    found = ToolSchemas.of(REGISTRY, *finds_by)
    fake.tools = [
        {"name": name, "inputSchema": each.input_schema, "outputSchema": each.output_schema}
        for name, each in ((ECHO_OF_ANY, schemas), ("find_nodes", found))
    ]
    fake.results["find_nodes"] = {"nodes": [], "total": 0, "page": 1, "pages": 0}
    return fake
