"""Assembles the MCP endpoint.

Must not decide anything: it constructs the parts and connects them.
"""

from dataclasses import dataclass
from importlib.metadata import version

from relay.auth.assembly import AuthPart
from relay.calls.assembly import CallsPart
from relay.fleet.assembly import FleetPart
from relay.mcp_api.change_streams import ChangeStreams
from relay.mcp_api.endpoint import McpEndpoint
from relay.mcp_api.fleet_resources import RelayOf
from relay.mcp_api.instructions import Instructions
from relay.mcp_api.log_streams import LogStreams
from relay.mcp_api.methods import Methods
from relay.mcp_api.open_streams import OpenStreams
from relay.mcp_api.resources import ResourceCatalog
from relay.mcp_api.sdk import SdkServer
from relay.mcp_api.tool_list import ToolList
from relay.mcp_api.url_options import UrlOptionReader
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from relay.streams.caller_tools.event_streams import EventStreams
from relay.streams.telemetry.assembly import TelemetryPart


@dataclass(frozen=True, slots=True)
class McpPart(Part):
    """MCP in both protocol eras, as an ASGI application. ``options`` reads what a URL chooses."""

    endpoint: McpEndpoint
    options: UrlOptionReader


def assemble(  # noqa: PLR0913, PLR0917 - the parts that it connects
    environment: RelayEnvironment,
    auth: AuthPart,
    fleet: FleetPart,
    calls: CallsPart,
    telemetry: TelemetryPart,
    events: EventStreams,
    relay_of: RelayOf | None,
) -> McpPart:
    """Return the part; ``events`` are the streams on which callers get the events of their sessions.

    ``relay_of`` tells which of several relays a node is connected to; None if there is one.
    """
    server = SdkServer(version("edge-kubelet"), Instructions(fleet.fleet).text)
    options = UrlOptionReader(environment.kinds, environment.config.default_view)
    methods = Methods(
        calls.gateway,
        ToolList(fleet.fleet, calls.relay_tools, options),
        auth.authenticator,
        ResourceCatalog(fleet.fleet, environment.registry, telemetry.resource, telemetry.elsewhere, relay_of),
        server.discovered,
    )
    changes = ChangeStreams(
        fleet.notifier, telemetry.listening or telemetry.resource, OpenStreams(), options, environment.clock
    )
    return McpPart(McpEndpoint(server, methods, changes, LogStreams(events)), options)
