"""A node's link in a loop that the test runs, against a relay that the test plays."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

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
from schemas.tokens import DEVICE_REF, TokenVerifier
from schemas.ulids import UlidSource
from tests.fakes.chance import FixedChance
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.node import identity_of, signer_of
from tests.fakes.pauses import Pauses
from tests.fakes.played_relay import PlayedRelay, RelayEnd
from tests.fakes.signer import ECHO, NOW_MS, SimulatedNode

BOUND_S = 30
HOUR_MS = 3_600_000
FIRST_WAIT_S = 0.5  # with every draw in the middle of its range
SUPERSEDED_WAIT_S = 300
REJECTION = {"code": "E_MANIFEST_INVALID", "message": "No.", "suggested_fix": "Wait."}


class EchoWorker(Handler):
    """Answers with what the test says, when it says so."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"message": "pong"}
        self.begun: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.stopped = asyncio.Event()
        self.failure: Exception | None = None

    @property
    def capability(self) -> Mapping[str, Any]:
        return ECHO

    async def invoke(self, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        assert verb == "invoke"
        await self.begun.put(arguments)
        if self.failure is not None:
            raise self.failure
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.stopped.set()
            raise
        return self.result


@dataclass
class Rig:
    """A link to a played relay, with all that it works with."""

    link: RelayLink
    relay: PlayedRelay
    worker: EchoWorker
    waits: Pauses
    heartbeats: Pauses
    ticks: FakeClock
    node: SimulatedNode
    log: LogLines

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Task[None]]:
        """Run the link and its announcer; the task is the link's."""
        self.link.announcer.add_sender(self.link.send_manifest)
        announcer = asyncio.create_task(self.link.announcer.run())
        await self.heartbeats.next()  # the first manifest is there before the first connection
        link = asyncio.create_task(self.link.run())
        try:
            yield link
        finally:
            for task in (link, announcer):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await self.link.dispatcher.close()

    async def opened(self, **welcome: Any) -> RelayEnd:
        """Return the next connection, announced and accepted."""
        end = await self.relay.next()
        await end.admit(**welcome)
        await end.accept()
        await end.receive("heartbeat")
        return end

    async def until_state(self, state: LinkState) -> None:
        """Wait until the node has handled what was sent before."""
        async with asyncio.timeout(BOUND_S):
            while self.link.state is not state:  # noqa: ASYNC110 - the link's state has no event
                await asyncio.sleep(0)


@dataclass
class World:
    """What every rig of a test shares."""

    node: SimulatedNode
    registry: SchemaRegistry
    kinds: KindRegistry
    reader: FrameReader
    clock: FakeClock
    log: LogLines

    def rig(self, relay: PlayedRelay, *others: str, timeout_s: float = BOUND_S) -> Rig:
        """Return a link to ``relay``, whose URL is the fleet's, and to ``others`` of its fleet."""
        relays = (relay.url, *others)
        logger = make_logger("kubelet", self.log)
        identity = identity_of(self.node)
        signer = signer_of(self.node, self.clock, self.registry, logger)
        worker, waits, heartbeats, ticks = EchoWorker(), Pauses(), Pauses(), FakeClock(1_000_000)
        chance = FixedChance(0.5)
        link = RelayLink(
            identity=identity,
            public_url=relays[0],
            relays=RelayAddresses(relays, identity.node_id, chance, ticks),
            reader=self.reader,
            announcer=Announcer(signer, 60.0, chance, logger, sleep=heartbeats.sleep),
            dispatcher=Dispatcher(self.node.node_id, [worker], self.kinds, self.registry, logger),
            frames=RelayFrames(logger),
            ulids=UlidSource(self.clock, os.urandom),
            log=logger,
            ticks_ms=ticks,
            sleep=waits.sleep,
            handshake_timeout_s=timeout_s,
        )
        return Rig(link, relay, worker, waits, heartbeats, ticks, self.node, self.log)


def claims_of(rig: Rig, token: str, *, now_s: int = NOW_MS // 1000) -> dict[str, Any]:
    verifier = TokenVerifier(SchemaRegistry(), DEVICE_REF)
    keys = {rig.node.kid: rig.node.public_key}
    return verifier.verify(token, keys.get, audiences=frozenset({rig.relay.url}), now_s=now_s)
