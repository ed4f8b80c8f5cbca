"""Relays of one fleet in this process, as far as the cluster knows them: joined by a real nats-server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from relay.cluster.assembly import ClusterPart, assemble
from relay.cluster.messages import command_subject
from relay.cluster.presence import Effects
from relay.observability.metrics import Metrics
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
from relay.settings.config import ClusterConfig
from relay.settings.environment import ticks_ms
from relay.state.merging import SharedLedger
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.cluster_server import FLEET
from tests.fakes.environment import PUBLIC_URL, FakeEnvironment, config, fake_environment
from tests.fakes.hub import counted
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import ScriptedRouter

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
        """Tell ``handler`` of every node that connects or is lost."""
        self.handlers.append(handler)

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        """Give ``handler`` the frames of that type."""
        self.readers[frame_type] = handler

    def on_announce(self, _handler: AnnounceHandler) -> None:
        """Have no announces."""

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        """Send a frame to a node that is connected."""
        if self.refusals:
            raise self.refusals.pop(0)
        if node_id not in self.sessions:
            raise ToolError(Failure.NODE_OFFLINE)
        self.sent.append((node_id, frame_type, payload))

    def receive(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        """Let ``node_id`` send a frame."""
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
        """End the session of a node."""
        self.superseded.append(node_id)
        self.nodes.lose(node_id)


@dataclass(frozen=True)
class Member:
    """One relay of the fleet: ``local`` stands for its nodes."""

    part: ClusterPart
    nodes: HeldNodes
    local: LocalRouter
    fake: FakeEnvironment
    seen: Seen

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
    ) -> AsyncIterator["Member"]:
        """Hold a relay that is connected, or knows why it is not."""
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
        part = assemble(
            environment,
            cluster,
            local=router,
            frames=nodes,
            effects=effects,
            tenant_of=lambda _node_id: TENANT,
            ledgers=ledgers,
            on_thread=asyncio.to_thread,
            authority=authority,
            roots=lambda: ROOTS,
        )
        member = cls(part, nodes, router, replace(fake, environment=environment), seen)
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
        async with asyncio.timeout(BOUND_S):
            # What is no command is answered too, and reaches no node.
            while not await asker.reaches(node_id):  # noqa: ASYNC110 - NATS reports no change of interest
                await asyncio.sleep(0.001)

    async def reaches(self, node_id: str) -> bool:
        """Return whether a relay answers for ``node_id``."""
        try:
            await self.part.connection.request(command_subject(FLEET, node_id), b"{}", BOUND_S)
        except NoResponderError:
            return False
        return True

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
    """Return a command to echo."""
    good = {
        "node_id": node_id,
        "tool": f"sysecho.{node_id}.echo.invoke",
        "arguments": {"message": "ping"},
        "deadline_ms": deadline_ms,
        "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XC",
    }
    return Command(**(good | members))  # type: ignore[arg-type]
