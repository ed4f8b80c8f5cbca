"""This relay in its cluster: its parts, connected, and how they run, close and are shown.

Must not decide anything.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from random import Random
from typing import Any

from relay.cluster.authority import AuthorityAnswerer, AuthorityAsker
from relay.cluster.commands import CommandOwner, NatsRouter
from relay.cluster.connection import ClusterConnection
from relay.cluster.credentials import read_credentials
from relay.cluster.fleet_frames import FleetFrames
from relay.cluster.fleet_identity import FleetIdentity, RelayIdentity
from relay.cluster.ledger_stream import LedgerStream
from relay.cluster.messages import AuthorityMessages, ClusterMessages, PeerMessages
from relay.cluster.peers import RelayPeers
from relay.cluster.presence import Effects, Presence
from relay.cluster.presence_bucket import PresenceBucket, Quorum
from relay.part import Part
from relay.routing.authority_port import AnsweringAuthority
from relay.routing.port import LocalRouter, NodeFrames, NodeRouter
from relay.settings.config import ClusterConfig, ClusterServer
from relay.settings.environment import RelayEnvironment
from relay.state.kinds import OLDEST, is_older
from relay.state.merging import SharedLedger
from relay.state.sharer import OnThread, Sharer
from schemas.health import Health, Loop
from schemas.text import counted


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
        identity: what the others have said of themselves.
    """

    connection: ClusterConnection
    messages: ClusterMessages
    owner: CommandOwner
    presence: Presence
    bucket: PresenceBucket
    ledgers: Sharer
    router: NodeRouter
    frames: FleetFrames
    peers: RelayPeers
    authority: AuthorityAsker
    answerer: AuthorityAnswerer | None
    identity: FleetIdentity

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
        """Return this relay's id, the other relays that run, their versions, and how many nodes each has."""
        version_of = self.identity.others.version_of
        others = [asdict(each) | {"version": version_of(each.relay)} for each in self.presence.other_relays()]
        return {"relay": self.peers.relay, "others": others}

    def _state(self) -> str:
        if not self.connection.is_connected:
            problem = self.connection.problem or "not tried yet"
            return f"not connected; only this relay's own nodes can be called: {problem}"
        if not self.ledgers.is_current:
            problem = self.ledgers.problem or "not read yet"
            return (
                f"connected to {self.connection.server}: "
                f"revocations and names of other relays are not up to date: {problem}"
            )
        if not self.presence.is_current:
            return f"connected to {self.connection.server}: only this relay's own nodes are listed"
        relays = counted(self.presence.relays(), "relay")
        nodes = counted(self.presence.nodes_elsewhere(), "node")
        return f"connected to {self.connection.server}: {relays}, {nodes} at others"


_SEED_BYTES = 16


def assemble(  # noqa: PLR0913 - what comes in from outside
    environment: RelayEnvironment,
    config: ClusterConfig,
    *,
    local: LocalRouter,
    frames: NodeFrames,
    effects: Effects,
    tenant_of: Callable[[str], str | None],
    ledgers: Sequence[SharedLedger],
    on_thread: OnThread,
    authority: AnsweringAuthority | None,
    roots: Callable[[], Sequence[str]],
) -> ClusterPart:
    """Return the part, which gives commands for this relay's own nodes to ``local``.

    It learns by ``frames`` which nodes these are. ``effects`` is what the sessions of others change here;
    ``tenant_of`` returns the tenant of a node that is known. ``ledgers`` are shared with the other relays;
    ``on_thread`` runs what waits for the disk. ``authority`` answers relays without the CA's key; None if
    this is one of them. ``roots`` returns the kids of the CA's roots.

    Raises:
        CredentialsError, TlsFilesError: the credentials, or the roots of the servers, cannot be used.
    """
    read_credentials(config)
    here = _Here.of(environment, config)
    messages = ClusterMessages(environment.registry)
    presence = Presence(here.relay, effects, environment.monotonic)
    bucket = _bucket(here, presence)
    owner = _owner(here, messages, local)
    # Before presence follows the sessions: of a node that moves, the end here comes before where it went.
    peers, fleet_frames = _frames(here, presence, frames, tenant_of)
    for follower in (owner.connection_changed, bucket.connection_changed):
        frames.on_connection(follower)
    stream = LedgerStream(here.fleet, ledgers, environment.registry, environment.now_ms)
    asker, answerer = _authority(here, authority)
    identity = _identity(here, roots)
    shared = _sharer(here, ledgers, on_thread, partial(_older_relay, presence, identity))
    connection = here.connection
    quorum = Quorum(presence, connection.move, stream=bucket.stream)
    connection.before(identity.check)
    for part in (identity, owner, bucket, quorum, peers, fleet_frames, answerer):
        if part is not None:
            connection.during(part.serve)
    connection.during(lambda client: shared.serve(stream.connected(client)))
    connection.at_end(bucket.leave)
    return ClusterPart(
        connection,
        messages,
        owner,
        presence,
        bucket,
        shared,
        _router(here, messages, local, owner),
        fleet_frames,
        peers,
        asker,
        answerer,
        identity,
    )


@dataclass(frozen=True, slots=True)
class _Here:
    """What nearly every part of this relay in ``fleet`` is made with; ``relay`` is its id."""

    environment: RelayEnvironment
    fleet: str
    relay: str
    connection: ClusterConnection

    @classmethod
    def of(cls, environment: RelayEnvironment, config: ClusterConfig) -> "_Here":
        relay = environment.ulids.new()
        connection = ClusterConnection(
            _in_any_order(config.servers, environment.random_bytes),
            lambda: read_credentials(config),
            name=f"edge-relay-{relay}",
            inbox=f"edge.{config.fleet}.inbox",
            loop=Loop(environment.monotonic),
            log=environment.log,
        )
        return cls(environment, config.fleet, relay, connection)


def _owner(here: _Here, messages: ClusterMessages, local: LocalRouter) -> CommandOwner:
    return CommandOwner(
        router=local,
        messages=messages,
        fleet=here.fleet,
        ticks_ms=here.environment.ticks_ms,
        count=partial(_count, here.environment, "answered"),
        log=here.environment.log,
    )


def _router(here: _Here, messages: ClusterMessages, local: LocalRouter, owner: CommandOwner) -> NodeRouter:
    return NatsRouter(
        local=local,
        holds=owner.holds,
        requests=here.connection,
        messages=messages,
        fleet=here.fleet,
        relay=here.relay,
        ticks_ms=here.environment.ticks_ms,
        count=partial(_count, here.environment, "asked"),
        log=here.environment.log,
    )


def _bucket(here: _Here, presence: Presence) -> PresenceBucket:
    return PresenceBucket(
        presence,
        fleet=here.fleet,
        relay=here.relay,
        url=here.environment.config.public_url,
        registry=here.environment.registry,
        count=partial(_count_entry, here.environment),
        log=here.environment.log,
    )


def _older_relay(presence: Presence, identity: FleetIdentity, since: str) -> str | None:
    """Return a relay that is older than ``since``, or may be: it was not heard yet."""
    if not is_older(OLDEST, since):
        return None
    if not presence.is_current:
        return "(not known yet)"
    return next(
        (relay for relay in presence.others() if is_older(identity.others.version_of(relay), since)), None
    )


def _sharer(
    here: _Here,
    ledgers: Sequence[SharedLedger],
    on_thread: OnThread,
    older_relay: Callable[[str], str | None],
) -> Sharer:
    return Sharer(
        ledgers,
        now_ms=here.environment.now_ms,
        on_thread=on_thread,
        count=partial(_count_entry, here.environment),
        filled=here.environment.metrics.cluster_ledger_filled.set,
        older_relay=older_relay,
        chance=Random(here.environment.random_bytes(_SEED_BYTES)).random,  # noqa: S311 - no secret
        log=here.environment.log,
    )


def _identity(here: _Here, roots: Callable[[], Sequence[str]]) -> FleetIdentity:
    environment = here.environment
    return FleetIdentity(
        lambda: RelayIdentity(here.relay, environment.config.public_url, roots(), version("edge-kubelet")),
        fleet=here.fleet,
        registry=environment.registry,
        monotonic=environment.monotonic,
        log=environment.log,
    )


def _authority(
    here: _Here, authority: AnsweringAuthority | None
) -> tuple[AuthorityAsker, AuthorityAnswerer | None]:
    """Return what asks the relay with the CA's key, and what answers the others if this is that relay."""
    environment, messages = here.environment, AuthorityMessages(here.environment.registry)
    asker = AuthorityAsker(
        requests=here.connection,
        messages=messages,
        fleet=here.fleet,
        relay=here.relay,
        count=partial(_count_ca, environment, "asked"),
        log=environment.log,
    )
    if authority is None:
        return asker, None
    return asker, AuthorityAnswerer(
        authority=authority,
        messages=messages,
        fleet=here.fleet,
        monotonic=environment.monotonic,
        count=partial(_count_ca, environment, "answered"),
        log=environment.log,
    )


def _frames(
    here: _Here, presence: Presence, local: NodeFrames, tenant_of: Callable[[str], str | None]
) -> tuple[RelayPeers, FleetFrames]:
    """Return the other relays, and the frames of the nodes of all; ``local`` has those of this relay."""
    environment = here.environment
    messages = PeerMessages(environment.registry, here.relay)
    count = partial(_count_message, environment)
    peers = RelayPeers(
        requests=here.connection,
        messages=messages,
        fleet=here.fleet,
        relay=here.relay,
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
        fleet=here.fleet,
        relay=here.relay,
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


def _count_entry(environment: RelayEnvironment, kind: str, outcome: str) -> None:
    environment.metrics.cluster_entries.labels(kind, outcome).inc()


def _count_message(environment: RelayEnvironment, kind: str, side: str, event: str) -> None:
    environment.metrics.cluster_messages.labels(kind, side, event).inc()
