"""Assembles the views: registers the tools by which agents reach a large fleet."""

from relay.calls.assembly import CallsPart
from relay.environment import RelayEnvironment
from relay.fleet.assembly import FleetPart
from relay.part import Part
from relay.views.find_nodes import FindNodes


class ViewsPart(Part):
    """The tools of the views. They have no work of their own."""


def assemble(environment: RelayEnvironment, fleet: FleetPart, calls: CallsPart) -> ViewsPart:
    """Return the wing, whose tools are registered with ``calls``."""
    calls.relay_tools.register(FindNodes(fleet.fleet).tool(environment.registry))
    return ViewsPart()
