"""Assembles the MCP endpoint, and the tools by which agents reach a large fleet.

Must not decide anything: it constructs the parts and connects them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

from relay.auth.assembly import AuthPart
from relay.calls.assembly import CallsPart
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import RelayTool
from relay.fleet.assembly import FleetPart
from relay.fleet.fleet import Fleet
from relay.mcp_api.change_streams import ChangeStreams, OpenStreams
from relay.mcp_api.endpoint import McpEndpoint
from relay.mcp_api.log_streams import LogStreams
from relay.mcp_api.methods import Methods
from relay.mcp_api.resources import RelayOf, ResourceCatalog
from relay.mcp_api.sdk import SdkServer, instructions
from relay.mcp_api.tool_list import ToolList
from relay.mcp_api.url_options import UrlOptionReader
from relay.mcp_api.views.find_nodes import FindNodes, Measured, Measurements
from relay.mcp_api.views.kind_tools import KindTool
from relay.mcp_api.views.many_nodes import ManyNodes
from relay.mcp_api.views.node_choice import NodeChoice
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from relay.streams.caller_tools.event_streams import EventStreams
from relay.streams.telemetry.assembly import TelemetryPart
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry


def view_tools(  # noqa: PLR0913 - what comes in from outside
    *,
    registry: SchemaRegistry,
    kinds: KindRegistry,
    fleet: Fleet,
    gateway: CallGateway,
    measured: Measured,
    now_ms: Callable[[], int],
    monotonic: Callable[[], float],
) -> Iterator[RelayTool]:
    """Yield the tools of the views.

    Raises:
        ValueError: a verb of a kind has a member of the same name as one of the kinds view's.
    """
    choice = NodeChoice(fleet, now_ms, gateway.charge)
    many = ManyNodes(gateway, monotonic)
    yield FindNodes(fleet, kinds, measured, gateway.charge).tool(registry)
    for kind in kinds:
        for verb in kind.verbs.values():
            yield KindTool(registry, kind, verb, choice, many).tool()


def assemble_views(environment: RelayEnvironment, fleet: FleetPart, calls: CallsPart) -> Measurements:
    """Register the tools of the views with ``calls``; return what nodes last measured, for others to add to.

    Raises:
        ValueError: as ``view_tools``.
    """
    measurements = Measurements()
    calls.executor.on_result(measurements.on_result)
    tools = view_tools(
        registry=environment.registry,
        kinds=environment.kinds,
        fleet=fleet.fleet,
        gateway=calls.gateway,
        measured=measurements.last,
        now_ms=environment.clock,
        monotonic=environment.monotonic,
    )
    for tool in tools:
        calls.relay_tools.register(tool)
    return measurements


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
    server = SdkServer(version("edge-kubelet"), partial(instructions, fleet.fleet))
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
