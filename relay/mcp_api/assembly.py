"""Assembles what agents speak MCP to."""

from dataclasses import dataclass
from importlib.metadata import version

from relay.auth.assembly import AuthPart
from relay.calls.assembly import CallsPart
from relay.environment import RelayEnvironment
from relay.fleet.assembly import FleetPart
from relay.mcp_api.endpoint import McpEndpoint
from relay.mcp_api.open_streams import OpenStreams
from relay.mcp_api.resources import ResourceCatalog
from relay.part import Part


@dataclass(frozen=True, slots=True)
class McpPart(Part):
    """MCP in both protocol eras, as an ASGI application."""

    endpoint: McpEndpoint


def assemble(environment: RelayEnvironment, auth: AuthPart, fleet: FleetPart, calls: CallsPart) -> McpPart:
    """Return the wing."""
    endpoint = McpEndpoint(
        version=version("edge-kubelet"),
        gateway=calls.gateway,
        fleet=fleet.fleet,
        authenticator=auth.authenticator,
        notifier=fleet.notifier,
        resources=ResourceCatalog(fleet.fleet, environment.registry),
        streams=OpenStreams(),
        now_ms=environment.clock,
    )
    return McpPart(endpoint)
