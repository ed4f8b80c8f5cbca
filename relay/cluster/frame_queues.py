"""How one-way frames travel to other relays: in queues, and samples on subjects of their own.

A queue is in order for each node and bounded, and each frame is acknowledged. One that another relay has
refused because it is busy is sent again; one that may have arrived never is. Samples are published once, on
``edge.<fleet>.telemetry.<node_id>``, by the relay that holds the node's session, and every relay that has
leased them reads them. Must not know what a frame is for, nor who follows what.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attrs import define, field
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from structlog.typing import FilteringBoundLogger

from relay.ascii_json import encoded
from relay.cluster.messages import FRAME, ClusterMessageError, CountMessage, PeerMessages
from relay.routing.peers import NoResponderError, Peers
from relay.routing.port import NodeRef
from schemas.errors import Failure, ToolError
from schemas.frame_types import OneWayType
from schemas.frames import MAX_FRAME_BYTES
from schemas.ulids import UlidSource

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
"""How much waits for one node on its way to one relay; the frame that exceeds it is the last."""

_TIMEOUT_S = 2.0
_RETRY_S = 1.0
_FULL_RETRY_MS = 1000
_MOST_TRIES = 100
"""How often a frame is sent to a relay that refuses it for now: about as long as a request waits."""


@dataclass(frozen=True, slots=True)
class NodeAt:
    """A session of a node, and the other relay: the one that holds it, or the one that a frame goes to."""

    node: NodeRef
    relay: str


@dataclass(frozen=True, slots=True)
class QueuedFrame:
    """A frame that waits."""

    type: OneWayType
    payload: Mapping[str, Any]
    size: int


@define(eq=False)
class _FrameQueue:
    """What waits. ``is_broken`` from a frame that was lost until its loss was told."""

    frames: deque[QueuedFrame] = field(factory=deque)
    size: int = 0
    is_broken: bool = False
    task: asyncio.Task[None] | None = None


Before = Callable[[NodeAt, QueuedFrame], Awaitable[None]]
"""Prepares for what a frame will cause. Is awaited before the frame is sent."""
Lost = Callable[[NodeAt, QueuedFrame], None]
"""Is called with the frame with which a queue broke. What waited behind it is lost too."""


@define(eq=False, repr=False)
class FrameQueues:
    """The queues to all other relays. One that broke takes frames again when ``lost`` is called."""

    _peers: Peers
    _before: Before = field(kw_only=True)
    _lost: Lost = field(kw_only=True)
    _count: CountMessage = field(kw_only=True)
    _log: FilteringBoundLogger = field(kw_only=True)
    _sleep: Callable[[float], Awaitable[None]] = field(kw_only=True, default=asyncio.sleep)
    _queues: dict[NodeAt, _FrameQueue] = field(init=False, factory=dict)

    def put(self, where: NodeAt, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Queue a frame.

        Raises:
            ToolError: NODE_OFFLINE while the queue is broken; RATE_LIMITED if too much waits; INTERNAL if it
                is larger than its type allows.
        """
        size = len(encoded(payload))
        if size > type_.max_bytes:
            raise ToolError(Failure.INTERNAL, "The frame does not fit its type.")
        queue = self._queues.setdefault(where, _FrameQueue())
        if queue.is_broken:
            raise ToolError(Failure.NODE_OFFLINE)
        if queue.size >= MAX_QUEUED_BYTES:
            self._count(FRAME, "asked", "refused")
            raise ToolError(Failure.RATE_LIMITED, "The node does not read.", retry_after_ms=_FULL_RETRY_MS)
        queue.frames.append(QueuedFrame(type_, payload, size))
        queue.size += size
        if queue.task is None:
            queue.task = asyncio.create_task(self._run(where, queue))

    def drop(self, node_id: str, but: NodeRef | None = None) -> None:
        """Drop what waits for a node, or of it, except in its session ``but``."""
        for where in [known for known in self._queues if known.node.node_id == node_id]:
            if where.node == but:
                continue
            if (task := self._queues.pop(where).task) is not None:
                task.cancel()

    async def close(self) -> None:
        tasks = [queue.task for queue in self._queues.values() if queue.task is not None]
        self._queues.clear()
        if tasks:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _run(self, where: NodeAt, queue: _FrameQueue) -> None:
        try:
            while queue.frames:
                frame = queue.frames[0]
                try:
                    await self._send(where, frame)
                except (NoResponderError, TimeoutError):
                    await self._broke(where, queue, frame)
                    return
                queue.frames.popleft()
                queue.size -= frame.size
        except Exception as error:  # noqa: BLE001 - a bug must end one queue, and be seen
            self._log.error("frames not sent", node_id=where.node.node_id, exc_info=error)
        finally:
            if self._queues.get(where) is queue:
                del self._queues[where]

    async def _send(self, where: NodeAt, frame: QueuedFrame) -> None:
        """Send one frame, again while the other relay refuses it for now.

        Raises:
            NoResponderError: no relay holds it any more.
            TimeoutError: no answer: it may have been taken.
        """
        await self._before(where, frame)
        body = {
            "node_id": where.node.node_id,
            "session_id": where.node.session_id,
            "type": frame.type.value,
            "payload": frame.payload,
        }
        for _ in range(_MOST_TRIES):
            try:
                await self._peers.ask(where.relay, FRAME, body, _TIMEOUT_S)
            except ToolError as error:
                if error.failure is Failure.NODE_OFFLINE:
                    raise NoResponderError("the node is not there") from None
                if error.failure is not Failure.RATE_LIMITED:
                    break
                await self._sleep((error.retry_after_ms or _FULL_RETRY_MS) / 1000)
            else:
                self._count(FRAME, "asked", "ok")
                return
        self._count(FRAME, "asked", "refused")
        self._log.warning(
            "frame not taken by another relay",
            node_id=where.node.node_id,
            relay=where.relay,
            type=frame.type.value,
        )

    async def _broke(self, where: NodeAt, queue: _FrameQueue, frame: QueuedFrame) -> None:
        for _ in queue.frames:
            self._count(FRAME, "asked", "lost")
        queue.frames.clear()
        queue.is_broken = True
        await self._sleep(_RETRY_S)
        del self._queues[where]
        self._lost(where, frame)


SAMPLE = "sample"
"""What a sample is counted as."""
MAX_WAITING = 256
"""The samples that wait to be published: those of all nodes of this relay."""
MAX_UNREAD = 64
"""The samples of one node that wait to be read."""

TakeFrame = Callable[[str, Mapping[str, Any]], None]
"""Takes a body of ``cluster.frame`` that the named relay has published. Must not block."""


@define(eq=False, repr=False, kw_only=True)
class SampleSubjects:
    """Publishes samples, and reads those of the nodes that are followed."""

    _messages: PeerMessages
    _fleet: str
    _take: TakeFrame
    _ulids: UlidSource
    _count: CountMessage
    _log: FilteringBoundLogger
    _waiting: deque[tuple[str, bytes]] = field(init=False, factory=deque)
    _wake: asyncio.Event = field(init=False, factory=asyncio.Event)
    _client: Client | None = field(init=False, default=None)
    _followed: dict[str, "Subscription | None"] = field(init=False, factory=dict)
    _ended: list["Subscription"] = field(init=False, factory=list)

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
        if (subscription := self._followed.pop(node_id, None)) is not None:
            self._ended.append(subscription)
            self._wake.set()

    async def serve(self, client: Client) -> None:
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
