"""Samples of nodes on the subjects of the relays, ``edge.<fleet>.telemetry.<node_id>``.

The relay that holds a node's session publishes each sample once, and every relay that has leased it reads it.
Must not know who follows what.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from structlog.typing import FilteringBoundLogger

from relay.cluster.peer_messages import FRAME, CountMessage, PeerMessages
from relay.routing.cluster_messages import ClusterMessageError
from relay.routing.port import NodeRef
from schemas.frames import OneWayType
from schemas.ulids import UlidSource

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

SAMPLE = "sample"
"""What a sample is counted as."""
MAX_WAITING = 256
"""The samples that wait to be published: those of all nodes of this relay."""
MAX_UNREAD = 64
"""The samples of one node that wait to be read."""

TakeFrame = Callable[[str, Mapping[str, Any]], None]
"""Takes a body of ``cluster.frame`` that the named relay has published. Must not block."""


class SampleSubjects:
    """Publishes samples, and reads those of the nodes that are followed."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        messages: PeerMessages,
        fleet: str,
        take: TakeFrame,
        ulids: UlidSource,
        count: CountMessage,
        log: FilteringBoundLogger,
    ) -> None:
        self._messages = messages
        self._fleet = fleet
        self._take = take
        self._ulids = ulids
        self._count = count
        self._log = log
        self._waiting: deque[tuple[str, bytes]] = deque()
        self._wake = asyncio.Event()
        self._client: Client | None = None
        self._followed: dict[str, Subscription | None] = {}
        self._ended: list[Subscription] = []

    def publish(self, node: NodeRef, payload: Mapping[str, Any]) -> None:
        """Publish a sample of a node of this relay; the oldest that waits makes space for it."""
        body = {
            "node_id": node.node_id,
            "session_id": node.session_id,
            "type": OneWayType.TELEMETRY.value,
            "payload": payload,
        }
        if len(self._waiting) >= MAX_WAITING:
            self._waiting.popleft()
            self._count(SAMPLE, "asked", "dropped")
        self._waiting.append((self._subject(node.node_id), self._messages.ask(self._ulids.new(), body)))
        self._wake.set()

    async def follow(self, node_id: str) -> None:
        """Read the samples of a node from now on, during every connection."""
        if node_id not in self._followed:
            self._followed[node_id] = None
            if self._client is not None:
                # The connection may have just ended: the next one reads the samples of all that is followed.
                with suppress(NatsError):
                    await self._subscribe(self._client, node_id)

    def unfollow(self, node_id: str) -> None:
        """Read the samples of a node no longer."""
        if (subscription := self._followed.pop(node_id, None)) is not None:
            self._ended.append(subscription)
            self._wake.set()

    async def serve(self, client: Client) -> None:
        """Publish and read by ``client`` until cancelled."""
        self._waiting.clear()  # from before the connection: too old
        self._ended.clear()
        self._followed = dict.fromkeys(self._followed)  # the subscriptions of a former client ended with it
        self._client = client
        try:
            for node_id in list(self._followed):
                await self._subscribe(client, node_id)
            while True:
                while self._waiting:
                    await client.publish(*self._waiting.popleft())
                    self._count(SAMPLE, "asked", "ok")
                while self._ended:
                    await self._ended.pop().unsubscribe()
                self._wake.clear()
                await self._wake.wait()
        finally:
            self._client = None

    async def _subscribe(self, client: Client, node_id: str) -> None:
        subscription = await client.subscribe(
            self._subject(node_id), cb=self._received, pending_msgs_limit=MAX_UNREAD
        )
        if self._client is not client:
            return  # it has ended meanwhile, and its subscriptions with it
        if node_id in self._followed:
            self._followed[node_id] = subscription
        else:
            self._ended.append(subscription)
            self._wake.set()

    def _subject(self, node_id: str) -> str:
        return f"edge.{self._fleet}.telemetry.{node_id}"

    async def _received(self, message: Msg) -> None:
        try:
            asked = self._messages.read_ask(message.data, FRAME)
        except ClusterMessageError as error:
            self._count(SAMPLE, "answered", "invalid")
            self._log.warning("sample of another relay dropped", reason=str(error))
            return
        if message.subject != self._subject(asked.body["node_id"]):
            self._count(SAMPLE, "answered", "invalid")
            self._log.warning("sample of another relay dropped", reason="it is of another node")
            return
        self._take(asked.relay, asked.body)
