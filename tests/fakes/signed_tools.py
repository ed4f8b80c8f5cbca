"""A fake MCP server in the place of a relay: the tools of simulated nodes, and what the nodes signed."""

from typing import Any

from relay.fleet.tool_schemas import ToolSchemas
from relay.fleet.tools import Projector
from relay.mcp_api.views.kind_tools import kind_schemas
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from tests.fakes.mcp_server import FakeMcpServer
from tests.fakes.shipped_kinds import SYSTEM_ECHO
from tests.fakes.signer import NOW_MS, SimulatedNode

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


def view_with(*nodes: SimulatedNode, **members: Any) -> FakeMcpServer:
    """Return a server that lists the kinds view of ``nodes``, whose manifests have ``members``."""
    fake = relay_with(*nodes, **members)
    schemas = kind_schemas(REGISTRY, SYSTEM_ECHO.verbs["invoke"], takes_many=True)
    found = ToolSchemas.of(REGISTRY, "find_nodes.input@1.0.0", "find_nodes.output@1.1.0")
    fake.tools = [
        {"name": name, "inputSchema": each.input_schema, "outputSchema": each.output_schema}
        for name, each in ((ECHO_OF_ANY, schemas), ("find_nodes", found))
    ]
    fake.results["find_nodes"] = {"nodes": [], "total": 0, "page": 1, "pages": 0}
    return fake
