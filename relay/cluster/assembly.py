"""Assembles what joins this relay to the others of its fleet."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from random import Random
from typing import Any

from relay.cluster.authority_answerer import AuthorityAnswerer
from relay.cluster.authority_asker import AuthorityAsker
from relay.cluster.command_owner import CommandOwner
from relay.cluster.connection import ClusterConnection
from relay.cluster.credentials import read_credentials
from relay.cluster.fleet_frames import FleetFrames
from relay.cluster.fleet_identity import FleetIdentity, Identity
from relay.cluster.ledger_stream import LedgerStream
from relay.cluster.peer_messages import PeerMessages
from relay.cluster.presence import Effects, Presence
from relay.cluster.presence_bucket import PresenceBucket
from relay.cluster.quorum import Quorum
from relay.cluster.relay_peers import RelayPeers
from relay.cluster.shared_ledgers import OnThread, SharedLedgers
from relay.config import ClusterConfig, ClusterServer
from relay.environment import RelayEnvironment
from relay.part import Part
from relay.routing.authority_messages import AuthorityMessages
from relay.routing.authority_port import AnswerAuthority
from relay.routing.cluster_messages import ClusterMessages
from relay.routing.nats import NatsRouter
from relay.routing.port import NodeFrames, NodeRouter
from relay.shared_ledger import SharedLedger
from schemas.health import Health, Loop

_SEED_BYTES = 16


@dataclass(frozen=True, slots=True)
class ClusterPart(Part):
    """This relay in its cluster.

    Attributes:
        connection: the one to NATS; what else is to use it registers a work there.
        presence: which relay each node is connected to.
        bucket: what it is read from, and written to.
        ledgers: what all relays must know of the operator's decisions.
        router, frames: reach the nodes of all relays.
        peers: the other relays.
        authority: asks the relay that has the CA's key.
        answerer: answers those that do not; None where this relay does not have it.
    """

    connection: ClusterConnection
    messages: ClusterMessages
    owner: CommandOwner
    presence: Presence
    bucket: PresenceBucket
    ledgers: SharedLedgers
    router: NodeRouter
    frames: FleetFrames
    peers: RelayPeers
    authority: AuthorityAsker
    answerer: AuthorityAnswerer | None

    async def run(self) -> None:
        """Keep up the connection, and the lists without one, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.connection.run())
            tasks.create_task(self.bucket.keep_lists())

    async def close(self) -> None:
        """End the commands and questions of other relays that are in flight, and what waits for them."""
        await self.owner.close()
        if self.answerer is not None:
            await self.answerer.close()
        await self.peers.close()
        await self.frames.close()

    def health(self) -> Mapping[str, Health]:
        """Nodes of other relays can be reached; without that, calls of this relay's own nodes flow on."""
        ready = self.connection.is_connected and self.presence.is_current and self.ledgers.is_current
        return {"cluster": Health.of(self.connection.loop, ready=ready, state=self._state(), essential=False)}

    def loops(self) -> Mapping[str, Loop]:
        """The connection is made again."""
        return {"cluster": self.connection.loop}

    def status(self) -> Mapping[str, Any]:
        """Return this relay's id, the other relays that run, and how many nodes each of them has."""
        return {"relay": self.peers.relay, "others": [asdict(each) for each in self.presence.other_relays()]}

    def _state(self) -> str:
        if not self.connection.is_connected:
            problem = self.connection.problem or "not tried yet"
            return f"not connected, its own nodes alone: {problem}"
        if not self.ledgers.is_current:
            problem = self.ledgers.problem or "not read yet"
            return f"connected to {self.connection.server}: shared ledgers: {problem}"
        if not self.presence.is_current:
            return f"connected to {self.connection.server}: lists have its own nodes alone"
        relays, nodes = self.presence.relays(), self.presence.nodes_elsewhere()
        return f"connected to {self.connection.server}: {relays} relays, {nodes} nodes at others"


def assemble(  # noqa: PLR0913 - what comes in from outside
    environment: RelayEnvironment,
    config: ClusterConfig,
    *,
    local: NodeRouter,
    frames: NodeFrames,
    effects: Effects,
    tenant_of: Callable[[str], str | None],
    ledgers: Sequence[SharedLedger],
    on_thread: OnThread,
    authority: AnswerAuthority | None,
    roots: Callable[[], Sequence[str]],
) -> ClusterPart:
    """Return the part, which gives commands for this relay's own nodes to ``local``.

    It learns by ``frames`` which nodes these are. ``effects`` is what the sessions of others change here;
    ``tenant_of`` returns the tenant of a node that is known. ``ledgers`` are shared with the other relays;
    ``on_thread`` runs what waits for the disk. ``authority`` answers relays without the CA's key; None if
    this is one of them. ``roots`` returns the kids of the CA's roots.

    Raises:
        CredentialsError, OSError: the credentials cannot be used.
    """
    read_credentials(config)
    relay, messages = environment.ulids.new(), ClusterMessages(environment.registry)
    asked, answered = (partial(_count, environment, side) for side in ("asked", "answered"))
    connection = ClusterConnection(
        _in_any_order(config.servers, environment.random_bytes),
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
    # Before presence follows the sessions: of a node that moves, the end here comes before where it went.
    peers, fleet_frames = _frames(environment, config.fleet, relay, connection, presence, frames, tenant_of)
    for follower in (owner.connection_changed, bucket.connection_changed):
        frames.on_connection(follower)
    shared = SharedLedgers(
        ledgers,
        LedgerStream(config.fleet, ledgers, environment.registry),
        on_thread=on_thread,
        count=lambda kind, outcome: environment.metrics.cluster_entries.labels(kind, outcome).inc(),
        log=environment.log,
    )
    identity = FleetIdentity(
        lambda: Identity(relay, environment.config.public_url, roots()),
        fleet=config.fleet,
        registry=environment.registry,
        log=environment.log,
    )
    quorum = Quorum(presence, connection.move, stream=bucket.stream)
    connection.before(identity.check)
    for work in (
        identity.serve,
        owner.serve,
        bucket.serve,
        quorum.serve,
        shared.serve,
        peers.serve,
        fleet_frames.serve,
    ):
        connection.during(work)
    connection.at_end(bucket.leave)
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
    about_ca, ca_count = AuthorityMessages(environment.registry), partial(_count_ca, environment)
    asker = AuthorityAsker(
        requests=connection,
        messages=about_ca,
        fleet=config.fleet,
        relay=relay,
        count=partial(ca_count, "asked"),
        log=environment.log,
    )
    answerer = None
    if authority is not None:
        answerer = AuthorityAnswerer(
            authority=authority,
            messages=about_ca,
            fleet=config.fleet,
            monotonic=environment.monotonic,
            count=partial(ca_count, "answered"),
            log=environment.log,
        )
        connection.during(answerer.serve)
    return ClusterPart(
        connection,
        messages,
        owner,
        presence,
        bucket,
        shared,
        router,
        fleet_frames,
        peers,
        asker,
        answerer,
    )


def _frames(  # noqa: PLR0913, PLR0917 - what was made before
    environment: RelayEnvironment,
    fleet: str,
    relay: str,
    connection: ClusterConnection,
    presence: Presence,
    local: NodeFrames,
    tenant_of: Callable[[str], str | None],
) -> tuple[RelayPeers, FleetFrames]:
    """Return the other relays, and the frames of the nodes of all; ``local`` has those of this relay."""
    messages, count = PeerMessages(environment.registry, relay), partial(_count_message, environment)
    peers = RelayPeers(
        requests=connection,
        messages=messages,
        fleet=fleet,
        relay=relay,
        running=presence.others,
        relay_of=presence.relay_of,
        ulids=environment.ulids,
        count=count,
        log=environment.log,
    )
    frames = FleetFrames(
        local,
        peers,
        messages,
        fleet=fleet,
        relay=relay,
        tenant_of=tenant_of,
        registry=environment.registry,
        ulids=environment.ulids,
        seconds=environment.monotonic,
        count=count,
        log=environment.log,
    )
    presence.on_elsewhere(frames.elsewhere_changed)
    presence.on_relay_gone(frames.relay_gone)
    return peers, frames


def _in_any_order(
    servers: Sequence[ClusterServer], random_bytes: Callable[[int], bytes]
) -> Sequence[ClusterServer]:
    """Return ``servers`` in an order of this relay's own, so that relays with one list spread over them."""
    return Random(random_bytes(_SEED_BYTES)).sample(servers, len(servers))  # noqa: S311 - no secret


def _count(environment: RelayEnvironment, side: str, outcome: str) -> None:
    environment.metrics.cluster_commands(side, outcome).inc()


def _count_ca(environment: RelayEnvironment, side: str, outcome: str) -> None:
    environment.metrics.cluster_ca_requests.labels(side, outcome).inc()


def _count_message(environment: RelayEnvironment, kind: str, side: str, event: str) -> None:
    environment.metrics.cluster_messages.labels(kind, side, event).inc()
