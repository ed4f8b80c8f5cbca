"""A relay's feed from a broker, and a fleet that tells what the feed handed to it."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from relay.fleet.fleet import Fleet
from relay.fleet.inventory import Inventory
from relay.fleet.mqtt_feed import MqttFeed
from schemas.addresses import BrokerAddress
from schemas.trust import Verdict
from tests.fakes.hub import Hub


class WatchedFleet(Fleet):
    """A fleet that tells what was handed to it, after it has dealt with it, and in which ``turn``."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.handed: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.inventory.heartbeat = self._heartbeat  # type: ignore[method-assign]  # to learn of each
        self.turn = 0
        self.turns: list[int] = []

    def offer_identity(self, node_id: str, pem: str) -> None:
        super().offer_identity(node_id, pem)
        self.handed.put_nowait(("identity", node_id))

    def offer_manifest(
        self, node_id: str, wire: bytes, way: str, parsed: Mapping[str, Any] | None = None
    ) -> Verdict:
        self.turns.append(self.turn)
        verdict = super().offer_manifest(node_id, wire, way, parsed)
        self.handed.put_nowait((verdict.outcome.value, node_id))
        return verdict

    def _heartbeat(self, node_id: str, etag: str) -> None:
        Inventory.heartbeat(self.inventory, node_id, etag)
        self.handed.put_nowait(("heartbeat", node_id))

    def tombstone(self, node_id: str) -> None:
        super().tombstone(node_id)
        self.handed.put_nowait(("tombstone", node_id))

    async def until(self, event: str, node_id: str) -> None:
        """Wait for ``event``: a verdict, or what else was handed over of ``node_id``."""
        async with asyncio.timeout(60):
            while await self.handed.get() != (event, node_id):
                pass


@asynccontextmanager
async def subscribed(hub: Hub, address: BrokerAddress, **parts: Any) -> AsyncIterator[MqttFeed]:
    """Hold a subscription of ``hub``; its fleet's is what comes of it."""
    feed = MqttFeed(
        broker=address,
        client_id="edge-relay-test",
        fleet=hub.fleet,
        registry=hub.registry,
        metrics=hub.metrics,
        refusals=hub.refusals,
        log=hub.log,
        # Not doubled: a broker that takes seconds to start would be found after 15 s or 31 s.
        longest_wait_s=1,
        **parts,
    )
    running = asyncio.create_task(feed.run())
    try:
        yield feed
        assert not running.done()
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
