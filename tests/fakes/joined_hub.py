"""The parts of a relay around one fleet, joined to other relays in this process by a real nats-server."""

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

from relay.cluster.assembly import ClusterPart, assemble
from relay.cluster.presence import Effects
from relay.fleet.node_record import Where
from relay.routing.port import NodeFrames, Peers
from relay.settings.config import ClusterConfig
from relay.settings.environment import ticks_ms
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.cluster import ROOTS
from tests.fakes.environment import config, fake_environment
from tests.fakes.hub import Hub
from tests.fakes.polling import until
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import SimulatedCa


class JoinedHub(Hub):
    """A hub in a fleet of several, to which ``part`` joins it. ``superseded`` has the nodes that it ended."""

    part: ClusterPart

    def __init__(
        self, cluster: ClusterConfig, directory: Path, registry: SchemaRegistry, ca: SimulatedCa
    ) -> None:
        self._cluster = cluster
        self._directory = directory
        self.superseded: list[str] = []
        super().__init__(directory, registry, ca=ca)

    def reached(self) -> tuple[NodeFrames, Peers | None]:
        """Return what reaches the nodes of all relays."""
        wanted = replace(config(self._directory), cluster=self._cluster)
        environment = replace(
            fake_environment(wanted, self.registry).environment,
            ulids=UlidSource(lambda: time.time_ns() // 1_000_000, os.urandom),
            monotonic=time.monotonic,
            ticks_ms=ticks_ms,
            metrics=self.metrics,
            log=self.log,
        )

        def show(node_id: str, elsewhere: bool) -> bool:  # noqa: FBT001 - as ``Effects`` has it
            return self.fleet.connection_changed(node_id, Where.ELSEWHERE if elsewhere else Where.NOWHERE)

        self.part = assemble(
            environment,
            self._cluster,
            local=ScriptedRouter(),
            frames=self.one_way,
            effects=Effects(
                lambda node, _relay: self.superseded.append(node),
                show,
                lambda _node: None,
                lambda _node, _whether: None,
            ),
            tenant_of=self.fleet.tenant_of,
            ledgers=(),
            on_thread=asyncio.to_thread,
            authority=None,
            roots=lambda: ROOTS,
        )
        return self.part.frames, self.part.peers

    @classmethod
    @asynccontextmanager
    async def joined(
        cls, cluster: ClusterConfig, directory: Path, registry: SchemaRegistry, ca: SimulatedCa
    ) -> AsyncIterator["JoinedHub"]:
        """Hold one that is connected."""
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
