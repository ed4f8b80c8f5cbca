"""What reads the frames of all nodes at one relay, and notes them."""

from collections.abc import Mapping
from typing import Any

from relay.routing.port import NodeFrames, NodeRef
from schemas.frames import OneWayType, Role
from tests.fakes.polling import until


class FrameReader:
    """Reads the frames of ``frames``.

    Attributes:
        taken: the node, the type and the payload of each, in order.
        connections: the node's session, and whether it began, in order.
    """

    def __init__(self, frames: NodeFrames) -> None:
        self.taken: list[tuple[NodeRef, OneWayType, Mapping[str, Any]]] = []
        self.connections: list[tuple[NodeRef, bool]] = []
        for type_ in OneWayType:
            if type_.sender is Role.NODE:
                frames.on_frame(type_, self._reader_of(type_))
        frames.on_connection(lambda node, connected: self.connections.append((node, connected)))

    async def until_connected(self, node: NodeRef) -> None:
        """Wait until ``node`` is the session that it knows last."""
        await until(lambda: bool(self.connections) and self.connections[-1] == (node, True))

    def _reader_of(self, type_: OneWayType) -> Any:
        return lambda node, payload: self.taken.append((node, type_, payload))
