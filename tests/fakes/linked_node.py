"""A node's end of the session as it really is, around an identity in memory; its waits end when a test says
so.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from kubelet.announce.announcer import Announcer
from kubelet.dispatch import Dispatcher
from kubelet.handlers.base import Handler
from kubelet.session.link import LinkState, RelayLink
from kubelet.session.relay_addresses import RelayAddresses
from kubelet.session.relay_frames import RelayFrames
from schemas.frames import FrameReader
from schemas.kinds import KindRegistry
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.ulids import UlidSource
from tests.fakes.chance import FixedChance
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.node import identity_of, signer_of
from tests.fakes.pauses import Pauses
from tests.fakes.signer import METRICS, NOW_MS, SimulatedNode

BOUND_S = 30


@dataclass(frozen=True, slots=True)
class LinkedNode:
    """A node that connects to ``relay_url``, which is also the audience that it has pinned.

    Attributes:
        waits: the pauses between its attempts.
        running_link: what holds the link; it ends by a fault alone, or when the node is revoked.
    """

    link: RelayLink
    waits: Pauses
    log: LogLines
    running_link: "asyncio.Task[None]"

    @classmethod
    @asynccontextmanager
    async def running(
        cls,
        node: SimulatedNode,
        relay_url: str,
        registry: SchemaRegistry,
        handlers: Sequence[Handler] = (),
        reader: FrameReader | None = None,
    ) -> AsyncIterator["LinkedNode"]:
        """Run until the end of the block, with ``handlers`` and, if it is to be another, with ``reader``."""
        lines, waits, heartbeats, chance = LogLines(), Pauses(), Pauses(), FixedChance(0.5)
        log, clock, kinds = make_logger("kubelet", lines), FakeClock(NOW_MS), KindRegistry()
        identity = identity_of(node)
        signer = signer_of(
            node,
            clock,
            registry,
            log,
            capabilities=[handler.capability for handler in handlers] or [METRICS],
        )
        announcer = Announcer(signer, 60.0, chance, log, sleep=heartbeats.sleep)
        dispatcher = Dispatcher(node.node_id, list(handlers), kinds, registry, log)
        link = RelayLink(
            identity=identity,
            public_url=relay_url,
            relays=RelayAddresses([relay_url], node.node_id, chance, FakeClock(0)),
            reader=reader or FrameReader(registry),
            announcer=announcer,
            dispatcher=dispatcher,
            frames=RelayFrames(log),
            ulids=UlidSource(clock, os.urandom),
            log=log,
            sleep=waits.sleep,
        )
        announcer.add_sender(link.send_manifest)
        tasks = [asyncio.create_task(announcer.run())]
        await heartbeats.next()  # the first manifest is there before the first connection
        tasks.append(asyncio.create_task(link.run()))
        try:
            yield cls(link, waits, lines, tasks[-1])
        finally:
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await dispatcher.close()

    async def until(self, state: LinkState) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.link.state is not state:  # noqa: ASYNC110 - readiness is polled, it has no callback
                await asyncio.sleep(0)
