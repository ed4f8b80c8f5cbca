"""Assembles the streams of telemetry.

Must not decide anything: it constructs the parts and connects them.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from relay.audit.assembly import AuditPart
from relay.auth.assembly import AuthPart
from relay.fleet.assembly import FleetPart
from relay.part import Part
from relay.routing.port import NodeFrames, Peers
from relay.settings.environment import RelayEnvironment
from relay.streams.telemetry.fleet_resource import FleetListening, FleetReading
from relay.streams.telemetry.hub import TelemetryHub
from relay.streams.telemetry.reading import TelemetryResource
from schemas.health import Loop


@dataclass(frozen=True, slots=True)
class TelemetryPart(Part):
    """The streams of one relay, and the resource that shows them.

    Attributes:
        elsewhere: the same resource at the other relays; None without a cluster.
        listening: those who follow it there; None without a cluster.
    """

    hub: TelemetryHub
    resource: TelemetryResource
    elsewhere: FleetReading | None
    listening: FleetListening | None

    async def run(self) -> None:
        """Renew leases and end what has lapsed until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.hub.run())
            if self.listening is not None:
                tasks.create_task(self.listening.run())

    def loops(self) -> Mapping[str, Loop]:
        """Leases are renewed, and what has lapsed is ended."""
        loops = {"telemetry": self.hub.loop}
        return loops if self.listening is None else loops | {"telemetry elsewhere": self.listening.loop}


def assemble(  # noqa: PLR0913 - the packages below
    environment: RelayEnvironment,
    *,
    audit: AuditPart,
    auth: AuthPart,
    fleet: FleetPart,
    frames: NodeFrames,
    peers: Peers | None,
) -> TelemetryPart:
    """Return the part, which reaches nodes by ``frames``."""
    hub = TelemetryHub(
        fleet=fleet.fleet,
        frames=frames,
        authenticator=auth.authenticator,
        metrics=environment.metrics,
        refusals=audit.refusals,
        seconds=environment.monotonic,
        log=environment.log,
    )
    resource = TelemetryResource(hub, fleet.fleet)
    if peers is None:
        return TelemetryPart(hub, resource, None, None)
    listening = FleetListening(resource, hub.listen, peers, auth.authenticator, environment.monotonic)
    return TelemetryPart(hub, resource, FleetReading(resource, peers, auth.authenticator), listening)
