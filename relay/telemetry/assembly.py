"""Assembles the streams of telemetry."""

from collections.abc import Mapping
from dataclasses import dataclass

from relay.audit.assembly import AuditPart
from relay.auth.assembly import AuthPart
from relay.environment import RelayEnvironment
from relay.fleet.assembly import FleetPart
from relay.part import Part
from relay.routing.port import NodeFrames
from relay.telemetry.hub import TelemetryHub
from relay.telemetry.reading import TelemetryResource
from schemas.health import Loop


@dataclass(frozen=True, slots=True)
class TelemetryPart(Part):
    """The streams of one relay, and the resource that shows them."""

    hub: TelemetryHub
    resource: TelemetryResource

    async def run(self) -> None:
        """Renew leases and end what has lapsed until cancelled."""
        await self.hub.run()

    def loops(self) -> Mapping[str, Loop]:
        """Leases are renewed, and what has lapsed is ended."""
        return {"telemetry": self.hub.loop}


def assemble(
    environment: RelayEnvironment, *, audit: AuditPart, auth: AuthPart, fleet: FleetPart, frames: NodeFrames
) -> TelemetryPart:
    """Return the wing, which reaches nodes by ``frames``."""
    hub = TelemetryHub(
        fleet=fleet.fleet,
        frames=frames,
        authenticator=auth.authenticator,
        metrics=environment.metrics,
        refusals=audit.refusals,
        seconds=environment.monotonic,
        log=environment.log,
    )
    return TelemetryPart(hub, TelemetryResource(hub, fleet.fleet))
