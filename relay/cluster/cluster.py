"""This relay in its cluster: its parts, connected, and how they run, close and are shown.

Must not decide anything.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from random import Random
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client

from relay.cluster.account import FleetAccount
from relay.cluster.authority import AuthorityAnswerer, AuthorityAsker
from relay.cluster.commands import CommandOwner, NatsRouter, RecordCommand
from relay.cluster.connection import ClusterConnection
from relay.cluster.credentials import RelayKeyFile, read_credentials
from relay.cluster.fleet_identity import FleetIdentity, RelayIdentity
from relay.cluster.frames import FleetFrames
from relay.cluster.ledger_stream import LedgerStream
from relay.cluster.messages import AuthorityMessages, ClusterMessages, PeerMessages
from relay.cluster.peers import RelayPeers
from relay.cluster.presence import Effects, Presence
from relay.cluster.presence_bucket import PresenceBucket, Quorum
from relay.cluster.sealed_link import RelayTrust, SealedLink
from relay.cluster.signed_entries import SignedDocuments
from relay.routing.authority_port import AnsweringAuthority
from relay.routing.port import LocalRouter, NodeFrames
from relay.settings.config import ClusterConfig
from relay.settings.environment import RelayEnvironment
from relay.state.merging import OLDEST, SINCE_SEALED, SharedLedger, is_older
from relay.state.sharer import OnThread, Sharer
from schemas.health import Health, Loop
from schemas.text import counted

if TYPE_CHECKING:
    from relay.routing.port import NodeRouter

_SEED_BYTES = 16


class Cluster:
    """The parts by which one relay is joined to the others of its fleet.

    It gives commands for this relay's own nodes to ``local``, and learns by ``local_frames`` which these are.
    ``effects`` is what the sessions of others change here; ``tenant_of`` returns the tenant of a node
    that is known. ``ledgers`` are shared with the other relays; ``on_thread`` runs what waits for the disk.
    ``authority`` answers relays without the CA's key; None if this is one of them. ``roots`` returns the kids
    of the CA's roots. ``trust`` judges certificates of relays. ``record`` records each command of another
    relay before it is run.

    Attributes:
        link: the channels to the other relays. What it says of being sealed holds for all of this.
        connection: the one to NATS; what else is to use it registers a work there.
        identity: what the others have said of themselves.
        presence: which relay each node is connected to; it is read from ``bucket``, and written to it.
        owner: answers the commands of other relays for nodes of this one.
        router, frames: reach the nodes of all relays.
        peers: the other relays.
        authority: asks the relay that has the CA's key.
        answerer: answers those that do not; None where this relay does not have it.
        ledgers: what all relays must know of the operator's decisions.

    Raises:
        CredentialsError, TlsFilesError: the credentials, or the roots of the servers, cannot be used.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        environment: RelayEnvironment,
        config: ClusterConfig,
        *,
        local: LocalRouter,
        local_frames: NodeFrames,
        effects: Effects,
        tenant_of: Callable[[str], str | None],
        ledgers: Sequence[SharedLedger],
        on_thread: OnThread,
        authority: AnsweringAuthority | None,
        roots: Callable[[], Sequence[str]],
        trust: RelayTrust,
        record: RecordCommand,
    ) -> None:
        read_credentials(config)
        self._seal_changed = asyncio.Event()
        registry, ulids, log = environment.registry, environment.ulids, environment.log
        metrics, monotonic, ticks_ms = environment.metrics, environment.monotonic, environment.ticks_ms
        fleet, relay, url = config.fleet, ulids.new(), environment.config.public_url

        def chance() -> Random:
            return Random(environment.random_bytes(_SEED_BYTES))  # noqa: S311 - no secret

        def count_command(side: str, outcome: str) -> None:
            metrics.cluster_commands(side, outcome).inc()

        def count_ca_request(side: str, outcome: str) -> None:
            metrics.cluster_ca_requests.labels(side, outcome).inc()

        def count_entry(kind: str, outcome: str) -> None:
            metrics.cluster_entries.labels(kind, outcome).inc()

        def count_message(kind: str, side: str, event: str) -> None:
            metrics.cluster_messages.labels(kind, side, event).inc()

        self.relay, self._log = relay, log
        self.connection = connection = ClusterConnection(
            # In an order of this relay's own, so that relays with one list spread over them.
            chance().sample(config.servers, len(config.servers)),
            lambda: read_credentials(config),
            name=f"edge-relay-{relay}",
            inbox=f"edge.{fleet}.inbox",
            loop=Loop(monotonic),
            log=log,
        )
        key = RelayKeyFile(environment.config.state.cluster_tls)
        signed = SignedDocuments(key.read, trust.signer, trust.accepts, lambda: self.link.is_sealed)
        self.name = key.name
        self.identity = FleetIdentity(
            lambda: RelayIdentity(relay, url, roots(), version("edge-kubelet"), key.name()),
            fleet=fleet,
            registry=registry,
            signed=signed,
            monotonic=monotonic,
            log=log,
        )
        self.presence = presence = Presence(relay, effects, monotonic)
        self.bucket = PresenceBucket(
            presence,
            fleet=fleet,
            relay=relay,
            url=url,
            registry=registry,
            count=count_entry,
            signed=signed,
            log=log,
        )
        self.link = link = SealedLink(
            requests=connection,
            fleet=fleet,
            relay=relay,
            key=key.read,
            trust=trust,
            random_bytes=environment.random_bytes,
            monotonic=monotonic,
            ticks_ms=ticks_ms,
            count=count_message,
            log=log,
        )
        presence.on_relay_gone(link.relay_gone)
        self.messages = ClusterMessages(registry)
        self.owner = CommandOwner(
            router=local,
            link=link,
            record=record,
            messages=self.messages,
            ticks_ms=ticks_ms,
            count=partial(count_command, "answered"),
            log=log,
        )
        self.router: NodeRouter = NatsRouter(
            local=local,
            holds=self.owner.holds,
            link=link,
            holders=presence.holders,
            messages=self.messages,
            ticks_ms=ticks_ms,
            count=partial(count_command, "asked"),
            log=log,
        )
        peer_messages = PeerMessages(registry, relay)
        self.peers = RelayPeers(
            link=link,
            messages=peer_messages,
            running=presence.others,
            relay_of=presence.relay_of,
            ulids=ulids,
            count=count_message,
            log=log,
        )
        # Before presence follows the sessions: of a node that moves, the end here comes before where it went.
        self.frames = FleetFrames(
            local_frames,
            self.peers,
            peer_messages,
            link=link,
            tenant_of=tenant_of,
            registry=registry,
            ulids=ulids,
            seconds=monotonic,
            count=count_message,
            log=log,
        )
        presence.on_elsewhere(self.frames.elsewhere_changed)
        presence.on_relay_gone(self.frames.relay_gone)
        local_frames.on_connection(self.owner.connection_changed)
        local_frames.on_connection(self.bucket.connection_changed)
        authority_messages = AuthorityMessages(registry)
        self.authority = AuthorityAsker(
            link=link,
            others=presence.others,
            messages=authority_messages,
            count=partial(count_ca_request, "asked"),
            log=log,
        )
        self.answerer = None
        if authority is not None:
            self.answerer = AuthorityAnswerer(
                authority=authority,
                link=link,
                messages=authority_messages,
                monotonic=monotonic,
                count=partial(count_ca_request, "answered"),
                log=log,
            )
        self.ledgers = Sharer(
            ledgers,
            now_ms=environment.now_ms,
            on_thread=on_thread,
            count=count_entry,
            filled=metrics.cluster_ledger_filled.set,
            older_relay=self._older_relay,
            chance=chance().random,
            log=log,
        )
        stream = LedgerStream(fleet, ledgers, registry, environment.now_ms, signed)
        quorum = Quorum(presence, connection.move, stream=self.bucket.stream)
        connection.before(FleetAccount(config.account).check)
        connection.before(self.identity.check)
        works = (link, self.identity, self.owner, self.bucket, quorum, self.peers, self.frames, self.answerer)
        for part in works:
            if part is not None:
                connection.during(part.serve)
        connection.during(self._until_sealed)
        connection.during(lambda client: self.ledgers.serve(stream.connected(client)))
        connection.at_end(self.bucket.leave)

    def seal(self) -> None:
        """Say nothing that is not sealed from now on, and hear nothing else: with a new connection."""
        if not self.link.is_sealed:
            self.link.is_sealed = True
            self._seal_changed.set()

    def shares(self) -> bool:
        """Return whether what the relays have in common is up to date, and can be changed."""
        return self.connection.is_connected and self.ledgers.is_current

    async def _until_sealed(self, _client: Client) -> None:
        """End the connection once this relay is sealed: its works begin anew with the next one."""
        if self.link.is_sealed:
            self._seal_changed.clear()
        await self._seal_changed.wait()
        self._seal_changed.clear()
        self._log.info("this relay seals what it says to others from now on")

    def _older_relay(self, since: str) -> str | None:
        """Return a relay that is older than ``since``, or may be: it was not heard yet."""
        if not is_older(OLDEST, since) or (self.link.is_sealed and not is_older(SINCE_SEALED, since)):
            return None
        if not self.presence.is_current:
            return "(not known yet)"
        version_of = self.identity.others.version_of
        return next((relay for relay in self.presence.others() if is_older(version_of(relay), since)), None)

    @property
    def loop(self) -> Loop:
        """The connection is made again."""
        return self.connection.loop

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
        await self.link.close()

    def health(self) -> Health:
        """Nodes of other relays can be reached; without that, calls of this relay's own nodes flow on."""
        ready = self.connection.is_connected and self.presence.is_current and self.ledgers.is_current
        return Health.of(self.connection.loop, ready=ready, state=self._state(), essential=False)

    def status(self) -> Mapping[str, Any]:
        """Return this relay's id and name, whether it is sealed, and what is known of those that run."""
        heard = self.identity.others
        others = [
            asdict(each) | {"version": heard.version_of(each.relay), "name": heard.name_of(each.relay)}
            for each in self.presence.other_relays()
        ]
        return {"relay": self.relay, "name": self.name(), "sealed": self.link.is_sealed, "others": others}

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
