"""One-way frames between this node and its relay, whichever connection there is at the moment.

What waits to be sent is bounded, and is lost with the connection. Must not know what a frame is for: its
handler does.
"""

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from structlog.typing import FilteringBoundLogger

from kubelet.session.channel import Channel
from schemas.callbacks import Followers, Handlers
from schemas.frames import MAX_FRAME_BYTES, ONE_WAY, SUBPROTOCOL_1_2, Frame, OneWayType
from schemas.process.send_queue import SendQueue
from schemas.session import DropReason, OverRateError, ProtocolError

MAX_QUEUED_BYTES = 2 * MAX_FRAME_BYTES
"""How much waits for a relay that does not read."""


class LinkEvent(Enum):
    """What happens to the session, for those that depend on it."""

    CONNECTED = "a new session"
    RESUMED = "the same session on a new connection"
    LOST = "no connection"


RelayFrameHandler = Callable[[Any], None]
"""Handles the payload of a frame, which has the type in ``payloads`` named for it. Must not block."""
LinkHandler = Callable[[LinkEvent], None]


class RelayFrames:
    """The one-way frames of one node.

    Attributes:
        refused: how many frames a connection did not take, which was over its rate or did not read.
        dropped: how many of the relay's frames were dropped since the start, by reason.
    """

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._channel: Channel | None = None
        self._handlers = Handlers[OneWayType, RelayFrameHandler]()
        self._followers = Followers[[LinkEvent]](self._not_followed)
        self._queue: SendQueue[str] | None = None
        self.refused = 0
        self.dropped: dict[DropReason, int] = {}

    def send(self, frame_type: OneWayType, payload: Mapping[str, Any]) -> bool:
        """Queue a frame for the relay; return whether there was a connection that could take it.

        False also if the relay does not read, or does not know the type, and beyond its size and rate.
        """
        channel, queue = self._channel, self._queue
        if channel is None or queue is None or not channel.is_open:
            return False
        if frame_type is OneWayType.FINDINGS and not channel.speaks(SUBPROTOCOL_1_2):
            return False
        if queue.is_full:
            self.refused += 1
            return False
        try:
            text = channel.encoded(frame_type, payload)
        except OverRateError:
            self.refused += 1
            return False
        except ProtocolError as error:
            self._log.error("frame does not fit its type", type=frame_type.value, exc_info=error)
            return False
        queue.put(text, len(text))
        return True

    def on_frame(self, frame_type: OneWayType, handler: RelayFrameHandler) -> None:
        """Call ``handler`` with every frame of that type.

        Raises:
            ValueError: the type has a handler.
        """
        self._handlers.add(frame_type, handler)

    def on_link(self, handler: LinkHandler) -> None:
        """Call ``handler`` whenever the session is connected, resumed or lost."""
        self._followers.add(handler)

    def attach(self, channel: Channel, *, resumed: bool) -> None:
        """Use ``channel``, whose session is open, from now on."""
        self._channel, self._queue = channel, SendQueue(channel.send_text, MAX_QUEUED_BYTES)
        self._followers.notify(LinkEvent.RESUMED if resumed else LinkEvent.CONNECTED)

    def detach(self) -> None:
        """Forget the connection, which is lost, and what waits to be sent on it."""
        if self._queue is None:
            return
        self._queue.close()
        self._channel = self._queue = None
        self._followers.notify(LinkEvent.LOST)

    def received(self, frame: Frame) -> None:
        handler = self._handlers.get(ONE_WAY[frame.type])
        if handler is None:
            return
        try:
            handler(frame.payload)
        except Exception as error:  # noqa: BLE001 - a bug of one handler must not end the session
            self._log.error("frame not handled", type=frame.type, exc_info=error)

    def count_dropped(self, dropped: Mapping[DropReason, int]) -> None:
        """Count frames of the relay that were dropped; the first of each reason is logged."""
        for reason, count in dropped.items():
            if reason not in self.dropped:
                self._log.warning("a frame of the relay is dropped", reason=reason.value)
            self.dropped[reason] = self.dropped.get(reason, 0) + count

    def _not_followed(self, error: Exception, _event: LinkEvent) -> None:
        self._log.error("connection not followed", exc_info=error)
