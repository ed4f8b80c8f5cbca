"""Relays of one fleet in this process, as far as the cluster knows them: joined by a real nats-server."""

import asyncio
import os
import shutil
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import pytest

from relay.cluster.cluster import Cluster
from relay.cluster.connection import ClusterConnection
from relay.cluster.credentials import read_credentials
from relay.cluster.messages import command_subject
from relay.cluster.presence import Effects
from relay.fleet.node_record import Where
from relay.observability.metrics import Metrics
from relay.pki.authority import CertificateAuthority
from relay.routing.authority_port import AnsweringAuthority
from relay.routing.port import (
    AnnounceHandler,
    Command,
    ConnectionHandler,
    FrameHandler,
    LocalRouter,
    NodeRef,
    NoResponderError,
)
from relay.settings.config import ClusterConfig, StateFiles
from relay.settings.environment import ticks_ms
from relay.state.join_tokens import JoinTokens
from relay.state.kinds import CERTIFICATES, KINDS, files_of, shared_ledgers
from relay.state.merging import Merging, SharedLedger, StateKind
from relay.state.names import NameLedger
from relay.state.seal import FleetSeal
from relay.state.tokens import RevokedTokens, TokenKeys
from schemas.certificates import make_csr
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.health import Loop
from schemas.identity import first_certificate_in, kid_of
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.clock import FakeClock
from tests.fakes.cluster_server import FLEET
from tests.fakes.environment import PUBLIC_URL, FakeEnvironment, config, fake_environment
from tests.fakes.hub import Hub, counted
from tests.fakes.lines import LogLines
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import RelayCa
from tests.fakes.routers import HeldRouter, ScriptedRouter, echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NOW_MS, SimulatedCa, key_named

TENANT = "acme"
ROOTS = ["ab" * 32]


@dataclass
class HeldNodes:
    """The nodes of one relay, as ``NodeFrames`` tells of them.

    Attributes:
        sent: what was sent to nodes: the node, the type and the payload of each frame.
        refusals: what sending raises instead, one after the other.
    """

    ulids: UlidSource
    handlers: list[ConnectionHandler] = field(default_factory=list)
    sessions: dict[str, NodeRef] = field(default_factory=dict)
    readers: dict[OneWayType, FrameHandler] = field(default_factory=dict)
    sent: list[tuple[str, OneWayType, Mapping[str, Any]]] = field(default_factory=list)
    refusals: list[ToolError] = field(default_factory=list)

    def on_connection(self, handler: ConnectionHandler) -> None:
        self.handlers.append(handler)

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        self.readers[frame_type] = handler

    def on_announce(self, _handler: AnnounceHandler) -> None:
        """Have no announces."""

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        if node_id not in self.sessions:
            raise ToolError(Failure.NODE_OFFLINE)
        self.sent.append((node_id, frame_type, payload))

    def receive(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        self.readers[frame_type](self.sessions[node_id], payload)

    def connect(self, node_id: str, session_id: str | None = None) -> None:
        """Let ``node_id`` connect, in a new session if it resumes none."""
        node = self.sessions[node_id] = NodeRef(TENANT, node_id, session_id or self.ulids.new())
        self._tell(node, connected=True)

    def lose(self, node_id: str) -> None:
        """Let the connection of ``node_id`` end."""
        self._tell(self.sessions.pop(node_id), connected=False)

    def _tell(self, node: NodeRef, *, connected: bool) -> None:
        for handler in self.handlers:
            handler(node, connected)


@dataclass
class Seen:
    """What presence has changed in one relay, which knows every node.

    Attributes:
        elsewhere: the nodes that are shown as connected to another relay.
        history_unknown: the nodes of which it is not known yet which relay had them before.
        changes: every change of that, in order.
    """

    nodes: HeldNodes
    elsewhere: set[str] = field(default_factory=set)
    changes: list[tuple[str, bool]] = field(default_factory=list)
    moved: list[str] = field(default_factory=list)
    history_unknown: set[str] = field(default_factory=set)
    superseded: list[str] = field(default_factory=list)

    def show(self, node_id: str, connected: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
        """Show whether a node is connected elsewhere."""
        self.changes.append((node_id, connected))
        (self.elsewhere.add if connected else self.elsewhere.discard)(node_id)
        return True

    def note_history(self, node_id: str, whether: bool) -> None:  # noqa: FBT001 - as ``Effects`` has it
        """Note whether it is not known yet which relay had the node before."""
        (self.history_unknown.add if whether else self.history_unknown.discard)(node_id)

    def end_superseded(self, node_id: str, _relay: str) -> None:
        self.superseded.append(node_id)
        self.nodes.lose(node_id)


@dataclass(frozen=True)
class Member:
    """One relay of the fleet: ``local`` stands for its nodes; ``recorded`` has the commands of others."""

    part: Cluster
    nodes: HeldNodes
    local: LocalRouter
    fake: FakeEnvironment
    seen: Seen
    recorded: list[tuple[str, Command]]

    @classmethod
    @asynccontextmanager
    async def joined(  # noqa: PLR0913, PLR0917 - the parts that a test may want to have otherwise
        cls,
        cluster: ClusterConfig,
        state: Path,
        registry: SchemaRegistry,
        local: LocalRouter | None = None,
        ledgers: Sequence[SharedLedger] = (),
        authority: AnsweringAuthority | None = None,
        public_url: str = PUBLIC_URL,
        random_bytes: Callable[[int], bytes] = os.urandom,
        ca: RelayCa | None = None,
        *,
        sealed: bool = False,
    ) -> AsyncIterator["Member"]:
        """Hold a relay that is connected, or knows why it is not; with a certificate of ``ca``, if any."""
        if ca is not None:
            await asyncio.to_thread(ca.write, state.name, StateFiles(state).cluster_tls)
        recorded = list[tuple[str, Command]]()
        wanted = replace(config(state), cluster=cluster, public_url=public_url)
        fake = fake_environment(wanted, registry)
        ulids = UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom)
        environment = replace(
            fake.environment,
            ulids=ulids,
            monotonic=time.monotonic,
            ticks_ms=ticks_ms,
            metrics=Metrics(),
            random_bytes=random_bytes,
        )
        nodes, router = HeldNodes(ulids), local or ScriptedRouter()
        seen = Seen(nodes)
        effects = Effects(seen.end_superseded, seen.show, seen.moved.append, seen.note_history)
        part = Cluster(
            environment,
            cluster,
            local=router,
            local_frames=nodes,
            effects=effects,
            tenant_of=lambda _node_id: TENANT,
            ledgers=ledgers,
            on_thread=asyncio.to_thread,
            authority=authority,
            roots=lambda: ROOTS,
            trust=(ca or RelayCa()).trust,
            record=lambda relay, command: recorded.append((relay, command)),
        )
        if sealed:
            part.seal()
        member = cls(part, nodes, router, replace(fake, environment=environment), seen, recorded)
        running = asyncio.create_task(part.run())
        try:
            await until(
                lambda: part.connection.is_connected or part.connection.problem is not None or running.done()
            )
            yield member
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await part.close()

    async def hold(self, node_id: str, asker: "Member") -> None:
        """Let ``node_id`` connect here, and return when ``asker`` reaches this relay for it."""
        self.nodes.connect(node_id)
        await asker.until_reached(node_id)

    async def refused(self, command: Command) -> ToolError:
        """Return why ``command``, which is asked here, has failed."""
        with pytest.raises(ToolError) as error:
            await self.part.router.run(command)
        return error.value

    async def until_reached(self, node_id: str, *, reached: bool = True) -> None:
        """Return when a relay answers this one for ``node_id``, or when none does any more."""
        async with asyncio.timeout(BOUND_S):
            # What is no command is answered too, and reaches no node.
            while await self.reaches(node_id) is not reached:  # noqa: ASYNC110 - NATS reports no change of interest
                await asyncio.sleep(0.001)

    async def reaches(self, node_id: str) -> bool:
        """Return whether a relay answers for ``node_id``."""
        try:
            await self.part.connection.request(command_subject(FLEET, node_id), b"{}", BOUND_S)
        except NoResponderError:
            return False
        return True

    @property
    def held(self) -> HeldRouter:
        """Its nodes, which wait until the test answers."""
        assert isinstance(self.local, HeldRouter)
        return self.local

    async def echoes(self) -> Command:
        """Answer the next command as a good node does, and return it."""
        command, waiter = await self.held.next()
        waiter.set_result(echoed(command))
        return command

    def counted(self, side: str, outcome: str) -> float:
        """Return how many commands were counted so."""
        return counted(self.fake.environment.metrics, "cluster_commands_total", side=side, outcome=outcome)

    def counted_entries(self, outcome: str, kind: str) -> float:
        """Return how many entries of shared ledgers were counted so."""
        return counted(self.fake.environment.metrics, "cluster_entries_total", kind=kind, outcome=outcome)

    def framed(self, side: str, event: str) -> float:
        """Return how many one-way frames were counted so."""
        metrics = self.fake.environment.metrics
        return counted(metrics, "cluster_messages_total", kind="frame", side=side, event=event)


def echo(node_id: str, deadline_ms: int = 5000, **members: Any) -> Command:
    good = {
        "node_id": node_id,
        "tool": f"sysecho.{node_id}.echo.invoke",
        "arguments": {"message": "ping"},
        "deadline_ms": deadline_ms,
        "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XC",
    }
    return Command(**(good | members))  # type: ignore[arg-type]


async def current(*members: Member) -> None:
    """Return when each has read what the others share."""
    await until(lambda: all(member.part.ledgers.is_current for member in members))


class Trial:
    """A connection on its own, whose waits take no time."""

    def __init__(self, config: ClusterConfig, name: str = "a relay", probe_interval_s: float = 10) -> None:
        self.lines = LogLines()
        self.log = make_logger("relay", self.lines)
        self.pauses = 0
        self.connection = ClusterConnection(
            config.servers,
            lambda: read_credentials(config),
            name=name,
            inbox=f"edge.{FLEET}.inbox",
            loop=Loop(Seconds()),
            log=self.log,
            sleep=self._pause,
            probe_interval_s=probe_interval_s,
        )

    async def _pause(self, _seconds: float) -> None:
        self.pauses += 1
        await asyncio.sleep(0.01)

    async def __aenter__(self) -> Self:
        self._running = asyncio.create_task(self.connection.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError):
            await self._running


# --- The parts of a relay around one fleet, joined to other relays in this process by a real nats-server.


class JoinedHub(Hub):
    """A hub in a fleet of several, to which ``part`` joins it. ``superseded`` has the nodes that it ended."""

    part: Cluster

    def __init__(
        self, cluster: ClusterConfig, directory: Path, registry: SchemaRegistry, ca: SimulatedCa
    ) -> None:
        self._joins = cluster
        self.superseded: list[str] = []
        super().__init__(directory, registry, ca=ca)

    def reach_nodes(self) -> None:
        wanted = replace(self.environment.config, cluster=self._joins)
        environment = replace(
            self.environment,
            config=wanted,
            ulids=UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom),
            monotonic=time.monotonic,
            ticks_ms=ticks_ms,
        )

        def show(node_id: str, elsewhere: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
            return self.fleet.connection_changed(node_id, Where.ELSEWHERE if elsewhere else Where.NOWHERE)

        self.part = Cluster(
            environment,
            self._joins,
            local=ScriptedRouter(),
            local_frames=self.one_way,
            effects=Effects(
                lambda node, _relay: self.superseded.append(node),
                show,
                lambda _node: None,
                lambda _node, _whether: None,
                self.fleet.found,
            ),
            tenant_of=self.fleet.tenant_of,
            ledgers=(),
            on_thread=asyncio.to_thread,
            authority=None,
            roots=lambda: ROOTS,
            trust=RelayCa().trust,
            record=lambda _relay, _command: None,
        )
        self.frames, self.peers, self.cluster = self.part.frames, self.part.peers, self.part
        self.one_way.on_frame(OneWayType.FINDINGS, self._found)

    @classmethod
    @asynccontextmanager
    async def joined(
        cls, cluster: ClusterConfig, directory: Path, registry: SchemaRegistry, ca: SimulatedCa
    ) -> AsyncIterator["JoinedHub"]:
        await asyncio.to_thread(directory.mkdir)
        hub = cls(cluster, directory, registry, ca)
        running = asyncio.create_task(hub.part.run())
        try:
            await until(lambda: hub.part.connection.is_connected or running.done())
            yield hub
            assert not running.done(), running.exception()
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await hub.part.close()
            hub.close()


# --- The state directory of one relay of a fleet, as far as its ledgers are shared: real files, and a CA.


@dataclass
class Machine:
    """One relay's state directory with a CA of its own, which knows no node of the others.

    Attributes:
        keys, join_tokens: as the relay reads them.
        lines: what it has logged of them.
    """

    directory: Path
    ca: CertificateAuthority
    tokens: RevokedTokens
    names: NameLedger
    keys: TokenKeys
    join_tokens: JoinTokens
    seal: FleetSeal
    clock: FakeClock
    issues: bool
    lines: LogLines = field(default_factory=LogLines)
    refused: int = 0
    kinds: Sequence[StateKind] = KINDS

    @classmethod
    def made(cls, directory: Path, *, issues: bool) -> "Machine":
        """Return one that has decided nothing; ``issues``: the CA's key is there."""
        CertificateAuthority(directory / "ca", FakeClock(NOW_MS), os.urandom).create()
        return cls.at(directory, issues=issues)

    @classmethod
    def like(cls, other: "Machine", directory: Path) -> "Machine":
        """Return one of the same CA without its key, which has decided nothing."""
        shutil.copytree(other.directory / "ca", directory / "ca", ignore=shutil.ignore_patterns("*.key"))
        return cls.at(directory, issues=False)

    @classmethod
    def restored(cls, other: "Machine", directory: Path) -> "Machine":
        """Return one that a backup of ``other`` is restored to, as it is now."""
        shutil.copytree(other.directory, directory)
        return cls.at(directory, issues=other.issues)

    @classmethod
    def at(cls, directory: Path, *, issues: bool) -> "Machine":
        """Return the one whose files are in ``directory``."""
        clock = FakeClock(NOW_MS)
        ca = CertificateAuthority(directory / "ca", clock, os.urandom)
        tokens = RevokedTokens(directory / "revoked_tokens.jsonl")
        names = NameLedger(directory / "node_names.jsonl", clock)
        keys = TokenKeys(directory / "token_keys.jsonl", ca, clock)
        join_tokens = JoinTokens(directory / "join_tokens.jsonl", clock, os.urandom)
        seal = FleetSeal(directory / "cluster_seal.jsonl", ca)
        return cls(directory, ca, tokens, names, keys, join_tokens, seal, clock, issues)

    def issued(self, node_id: str) -> str:
        """Return the kid of a node's certificate."""
        return kid_of(first_certificate_in(self.ca.issue(make_csr(key_named(node_id), node_id), TENANT)))

    @property
    def ledgers(self) -> Sequence[SharedLedger]:
        merging = Merging(
            self.clock,
            make_logger("relay", self.lines),
            issues=self.issues,
            is_endorsed={"token_key": self.keys.is_endorsed, "seal": self.seal.is_endorsed},
            refused=self._count_refused,
        )
        ledgers = {file: file.ledger(self.directory) for file in files_of(self.kinds)}
        return shared_ledgers(ledgers | {CERTIFICATES: self.ca.ledger}, merging, self.kinds)

    def _count_refused(self, _kind: str) -> None:
        self.refused += 1

    @asynccontextmanager
    async def joined(
        self,
        cluster: ClusterConfig,
        registry: SchemaRegistry,
        ca: RelayCa | None = None,
        *,
        sealed: bool = False,
    ) -> AsyncIterator[Member]:
        """Hold a relay of it that is connected."""
        joining = Member.joined(cluster, self.directory, registry, ledgers=self.ledgers, ca=ca, sealed=sealed)
        async with joining as member:
            yield member

    def revoke(self, node_id: str, member: Member) -> None:
        """Revoke as a command does, and let the relay notice it."""
        self.ca.revoke(node_id)
        member.part.ledgers.changed("revocation")

    @property
    def labels(self) -> dict[str, str]:
        return {node_id: name.label for node_id, name in self.names.read().by_node.items() if name.label}

    @property
    def revoked(self) -> frozenset[str]:
        return self.ca.revoked_kids()
