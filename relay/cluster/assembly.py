"""Assembles what joins this relay to the others of its fleet."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from relay.cluster.command_owner import CommandOwner
from relay.cluster.connection import ClusterConnection
from relay.cluster.credentials import read_credentials
from relay.cluster.presence import Effects, Presence
from relay.cluster.presence_bucket import PresenceBucket
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
        presence: which relay each node is connected to.
        router: reaches the nodes of all relays.
    """

    connection: ClusterConnection
    messages: ClusterMessages
    owner: CommandOwner
    presence: Presence
    router: NodeRouter

    async def run(self) -> None:
        """Keep up the connection until cancelled."""
        await self.connection.run()

    async def close(self) -> None:
        """End the commands of other relays that are in flight."""
        await self.owner.close()

    def health(self) -> Mapping[str, Health]:
        """Nodes of other relays can be reached; without that, calls of this relay's own nodes flow on."""
        ready = self.connection.is_connected and self.presence.is_current
        return {"cluster": Health.of(self.connection.loop, ready=ready, state=self._state(), essential=False)}

    def loops(self) -> Mapping[str, Loop]:
        """The connection is made again."""
        return {"cluster": self.connection.loop}

    def _state(self) -> str:
        if not self.connection.is_connected:
            return "not connected: its own nodes alone"
        if not self.presence.is_current:
            return f"connected to {self.connection.server}: lists have its own nodes alone"
        relays, nodes = self.presence.relays(), self.presence.nodes_elsewhere()
        return f"connected to {self.connection.server}: {relays} relays, {nodes} nodes at others"


def assemble(
    environment: RelayEnvironment,
    config: ClusterConfig,
    *,
    local: NodeRouter,
    frames: NodeFrames,
    effects: Effects,
) -> ClusterPart:
    """Return the wing, which gives commands for this relay's own nodes to ``local``.

    It learns by ``frames`` which nodes these are. ``effects`` is what the sessions of others change here.

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
    presence = Presence(relay, effects, environment.monotonic)
    bucket = PresenceBucket(
        presence,
        fleet=config.fleet,
        relay=relay,
        url=environment.config.public_url,
        registry=environment.registry,
        log=environment.log,
    )
    for follower in (owner.connection_changed, bucket.connection_changed):
        frames.on_connection(follower)
    for work in (owner.serve, bucket.serve):
        connection.during(work)
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
    return ClusterPart(connection, messages, owner, presence, router)


def _count(environment: RelayEnvironment, side: str, outcome: str) -> None:
    environment.metrics.cluster_commands.labels(side, outcome).inc()
