"""One-way frames on their way to another relay: in order for each node, bounded, and each acknowledged.

A frame that another relay has refused because it is busy is sent again; one that may have arrived never is.
Must not know what a frame is for.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.ascii_json import encoded
from relay.cluster.peer_messages import FRAME, CountMessage
from relay.routing.peers import NoResponderError, Peers
from relay.routing.port import NodeRef
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, OneWayType

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


@dataclass(slots=True)
class _FrameQueue:
    """What waits. ``is_broken`` from a frame that was lost until its loss was told."""

    frames: deque[QueuedFrame] = field(default_factory=deque)
    size: int = 0
    is_broken: bool = False
    task: asyncio.Task[None] | None = None


Before = Callable[[NodeAt, QueuedFrame], Awaitable[None]]
"""Prepares for what a frame will cause. Is awaited before the frame is sent."""
Lost = Callable[[NodeAt, QueuedFrame], None]
"""Is called with the frame with which a queue broke. What waited behind it is lost too."""


class FrameQueues:
    """The queues to all other relays. One that broke takes frames again when ``lost`` is called."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        peers: Peers,
        *,
        before: Before,
        lost: Lost,
        count: CountMessage,
        log: FilteringBoundLogger,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._peers = peers
        self._before = before
        self._lost = lost
        self._count = count
        self._log = log
        self._sleep = sleep
        self._queues: dict[NodeAt, _FrameQueue] = {}

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
        """Drop everything."""
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
