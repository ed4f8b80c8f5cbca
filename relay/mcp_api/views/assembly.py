"""Assembles the views: registers the tools by which agents reach a large fleet.

Must not decide anything: it constructs the parts and connects them.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from relay.calls.assembly import CallsPart
from relay.calls.gateway import CallGateway
from relay.calls.relay_tools import RelayTool
from relay.fleet.assembly import FleetPart
from relay.fleet.fleet import Fleet
from relay.mcp_api.views.find_nodes import FindNodes, Measured
from relay.mcp_api.views.kind_tools import KindTool
from relay.mcp_api.views.many_nodes import ManyNodes
from relay.mcp_api.views.measurements import Measurements
from relay.mcp_api.views.node_choice import NodeChoice
from relay.part import Part
from relay.settings.environment import RelayEnvironment
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry


@dataclass(frozen=True, slots=True)
class ViewsPart(Part):
    """The tools of the views. They have no work of their own.

    Attributes:
        measurements: what nodes last measured; others may add what they have seen.
    """

    measurements: Measurements


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


def assemble(environment: RelayEnvironment, fleet: FleetPart, calls: CallsPart) -> ViewsPart:
    """Return the part, whose tools are registered with ``calls``.

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
    return ViewsPart(measurements)
