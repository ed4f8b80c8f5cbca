"""Assembles what joins this relay to the others of its fleet."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from relay.cluster.command_owner import CommandOwner
from relay.cluster.connection import ClusterConnection
from relay.cluster.credentials import read_credentials
from relay.config import ClusterConfig
from relay.environment import RelayEnvironment
from relay.part import Part
from relay.routing.cluster_messages import ClusterMessages
from relay.routing.nats import NatsRouter
from relay.routing.port import NodeFrames, NodeRouter
from schemas.health import Health, Loop


@dataclass(frozen=True, slots=True)
class ClusterPart(Part):
    """This relay in its cluster.

    Attributes:
        connection: the one to NATS; what else is to use it registers a work there.
        router: reaches the nodes of all relays.
    """

    connection: ClusterConnection
    messages: ClusterMessages
    owner: CommandOwner
    router: NodeRouter

    async def run(self) -> None:
        """Keep up the connection until cancelled."""
        await self.connection.run()

    async def close(self) -> None:
        """End the commands of other relays that are in flight."""
        await self.owner.close()

    def health(self) -> Mapping[str, Health]:
        """Nodes of other relays can be reached; without that, calls of this relay's own nodes flow on."""
        connected = self.connection.is_connected
        state = (
            f"connected to {self.connection.server}" if connected else "not connected: its own nodes alone"
        )
        return {"cluster": Health.of(self.connection.loop, ready=connected, state=state, essential=False)}

    def loops(self) -> Mapping[str, Loop]:
        """The connection is made again."""
        return {"cluster": self.connection.loop}


def assemble(
    environment: RelayEnvironment, config: ClusterConfig, *, local: NodeRouter, frames: NodeFrames
) -> ClusterPart:
    """Return the wing, which gives commands for this relay's own nodes to ``local``.

    It learns by ``frames`` which nodes these are.

    Raises:
        CredentialsError, OSError: the credentials cannot be used.
    """
    read_credentials(config)
    relay, messages = environment.ulids.new(), ClusterMessages(environment.registry)
    asked, answered = (partial(_count, environment, side) for side in ("asked", "answered"))
    connection = ClusterConnection(
        config.servers,
        lambda: read_credentials(config),
        name=f"edge-relay-{relay}",
        inbox=f"edge.{config.fleet}.inbox",
        loop=Loop(environment.monotonic),
        log=environment.log,
    )
    owner = CommandOwner(
        router=local,
        messages=messages,
        fleet=config.fleet,
        ticks_ms=environment.ticks_ms,
        count=answered,
        log=environment.log,
    )
    frames.on_connection(owner.connection_changed)
    connection.during(owner.serve)
    router = NatsRouter(
        local=local,
        holds=owner.holds,
        requests=connection,
        messages=messages,
        fleet=config.fleet,
        relay=relay,
        ticks_ms=environment.ticks_ms,
        count=asked,
        log=environment.log,
    )
    return ClusterPart(connection, messages, owner, router)


def _count(environment: RelayEnvironment, side: str, outcome: str) -> None:
    environment.metrics.cluster_commands.labels(side, outcome).inc()
