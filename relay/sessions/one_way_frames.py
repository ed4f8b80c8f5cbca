"""One-way frames between this process and the nodes that are connected to it: ``NodeFrames``.

Each connection has a bounded queue of its own, so that a node that does not read delays no other and takes a
bounded amount of memory. Must not know what a frame is for: its handler does.
"""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.http.websocket_protocol import CREDIT_OF_A_COMMAND, SocketClosedError
from relay.observability.metrics import Metrics
from relay.routing.port import AnnounceHandler, ConnectionHandler, FrameHandler, NodeRef
from relay.sessions.session import NodeConnection, NodeSession
from schemas.callbacks import Followers, Handlers
from schemas.errors import Failure, ToolError
from schemas.frames import MAX_FRAME_BYTES, ONE_WAY, Frame, OneWayType
from schemas.process.send_queue import SendQueue
from schemas.session import OverRateError, ProtocolError

MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
"""How much waits for one node that does not read."""
_UNREAD_RETRY_MS = 1000
_CREDITS = MappingProxyType(
    {
        OneWayType.SESSION_OPEN: 256.0,
        OneWayType.SESSION_MESSAGE: CREDIT_OF_A_COMMAND,
        OneWayType.CALLER_TOOL_RESULT: CREDIT_OF_A_COMMAND,
    }
)
"""What a node may send besides its rate because of a frame: its local agent's requests and replies."""


@define(eq=False, repr=False)
class OneWayFrames:
    """The one-way frames of all sessions of this process."""

    _metrics: Metrics
    _log: FilteringBoundLogger
    _queues: dict[str, tuple[NodeConnection, SendQueue[str]]] = field(init=False, factory=dict)
    _handlers: Handlers[OneWayType, FrameHandler] = field(init=False, factory=Handlers)
    _followers: Followers[[NodeRef, bool]] = field(init=False)
    _announce_followers: Followers[[NodeRef]] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._followers = Followers(self._connection_not_followed)
        self._announce_followers = Followers(self._announce_not_followed)

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        connection, queue = self._queues.get(node_id, (None, None))
        if connection is None or queue is None or not connection.is_open:
            raise ToolError(Failure.NODE_OFFLINE)
        try:
            text = _encoded(connection, queue, frame_type, payload)
        except ToolError:
            self._metrics.one_way_frames.labels(frame_type, "refused").inc()
            raise
        if (credit := _CREDITS.get(frame_type)) is not None:
            connection.meter.expect(credit)
        queue.put(text, len(text))
        self._metrics.one_way_frames.labels(frame_type, "sent").inc()

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        self._handlers.add(frame_type, handler)

    def on_connection(self, handler: ConnectionHandler) -> None:
        self._followers.add(handler)

    def on_announce(self, handler: AnnounceHandler) -> None:
        self._announce_followers.add(handler)

    def announced(self, session: NodeSession) -> None:
        self._announce_followers.notify(_reference(session))

    def connected(self, session: NodeSession, connection: NodeConnection) -> None:
        node_id = session.identity.node_id
        if (before := self._queues.get(node_id)) is not None:
            before[1].close()
        self._queues[node_id] = connection, SendQueue(partial(_send, connection), MAX_QUEUED_BYTES)
        self._notify(_reference(session), connected=True)

    def lost(self, session: NodeSession) -> None:
        if (lost := self._queues.pop(session.identity.node_id, None)) is not None:
            lost[1].close()
            self._notify(_reference(session), connected=False)

    def received(self, session: NodeSession, frame: Frame) -> None:
        frame_type = ONE_WAY[frame.type]
        handler = self._handlers.get(frame_type)
        self._metrics.one_way_frames.labels(frame_type, "received" if handler else "unhandled").inc()
        if handler is None:
            return
        try:
            handler(_reference(session), frame.payload)
        except Exception as error:  # noqa: BLE001 - a bug of one handler must not end the node's session
            self._log.error(
                "frame not handled", type=frame_type.value, session_id=session.session_id, exc_info=error
            )

    def _notify(self, node: NodeRef, *, connected: bool) -> None:
        event = "node connected" if connected else "node disconnected"
        self._log.info(event, node_id=node.node_id, tenant=node.tenant, session_id=node.session_id)
        self._followers.notify(node, connected)

    def _connection_not_followed(
        self,
        error: Exception,
        node: NodeRef,
        _connected: bool,  # noqa: FBT001 - as a follower
    ) -> None:
        self._log.error("connection not followed", session_id=node.session_id, exc_info=error)

    def _announce_not_followed(self, error: Exception, node: NodeRef) -> None:
        self._log.error("announce not followed", node_id=node.node_id, exc_info=error)


def _reference(session: NodeSession) -> NodeRef:
    return NodeRef(session.identity.tenant, session.identity.node_id, session.session_id)


def _encoded(
    connection: NodeConnection, queue: SendQueue[str], frame_type: OneWayType, payload: Mapping[str, Any]
) -> str:
    if queue.is_full:
        raise ToolError(Failure.RATE_LIMITED, "The node does not read.", retry_after_ms=_UNREAD_RETRY_MS)
    try:
        return connection.encoded(frame_type, payload)
    except OverRateError as error:
        retry_ms = max(1, int(error.wait_s * 1000) + 1)
        raise ToolError(Failure.RATE_LIMITED, retry_after_ms=retry_ms) from None
    except ProtocolError as error:
        raise ToolError(Failure.INTERNAL, "The frame does not fit its type.") from error


async def _send(connection: NodeConnection, text: str) -> bool:
    try:
        await connection.send_text(text)
    except SocketClosedError:
        return False  # the session learns of it by itself
    return True
