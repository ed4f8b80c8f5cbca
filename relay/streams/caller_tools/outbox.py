"""Frames to nodes, in order: what a node cannot take yet is sent later.

A frame is lost with the connection, and so is what waits here: what a node needs after a reconnect is sent
anew. Must not know what a frame is for.
"""

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.routing.port import NodeFrames
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType

_RETRY_MS = 1000
MAX_WAITING = 1024
"""The frames that wait for one node."""


@define(eq=False, repr=False)
class Outbox:
    """What waits for each node. ``on_dropped`` is called with the type of each frame that does not fit."""

    _frames: NodeFrames
    _log: FilteringBoundLogger
    _on_dropped: Callable[[OneWayType], None] = lambda _: None
    _waiting: dict[str, deque[tuple[OneWayType, Mapping[str, Any]]]] = field(init=False, factory=dict)
    _overflowing: set[str] = field(init=False, factory=set)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def send(self, node_id: str, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Send a frame now, behind what waits.

        Raises:
            ToolError: NODE_OFFLINE or RATE_LIMITED; nothing was sent.
        """
        if not self._flushed(node_id):
            raise ToolError(Failure.RATE_LIMITED, "The node does not read.", retry_after_ms=_RETRY_MS)
        self._frames.send(node_id, type_, payload)

    def offer(self, node_id: str, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Send a frame now if the node can take it; drop it otherwise."""
        with suppress(ToolError):
            self.send(node_id, type_, payload)

    def post(self, node_id: str, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Send a frame as soon as the node can take it; it is dropped if the node is not connected."""
        waiting = self._waiting.setdefault(node_id, deque())
        if len(waiting) >= MAX_WAITING:
            self._on_dropped(type_)
            # A node that sends requests and does not read the answers; it requests them again.
            if node_id not in self._overflowing:
                self._overflowing.add(node_id)
                self._log.warning("frames dropped: the node does not read", node_id=node_id)
            return
        waiting.append((type_, payload))
        self._flushed(node_id)

    def drop(self, node_id: str) -> None:
        """Drop what waits for a node whose connection is lost."""
        self._waiting.pop(node_id, None)
        self._overflowing.discard(node_id)

    def flush(self) -> None:
        """Send what nodes can take by now."""
        for node_id in list(self._waiting):
            self._flushed(node_id)

    def _flushed(self, node_id: str) -> bool:
        """Send what waits for a node; return whether nothing is left."""
        waiting = self._waiting.get(node_id)
        while waiting:
            type_, payload = waiting[0]
            try:
                self._frames.send(node_id, type_, payload)
            except Exception as error:  # noqa: BLE001 - a bug with one frame must not hold up those behind it
                failure = error.failure if isinstance(error, ToolError) else None
                if failure is Failure.RATE_LIMITED:
                    return False
                if failure is not Failure.NODE_OFFLINE:
                    self._log.error("frame not sent", node_id=node_id, type=type_.value, exc_info=error)
            waiting.popleft()
        self.drop(node_id)
        return True
