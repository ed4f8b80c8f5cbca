"""Counts, audits and logs what nodes do wrong. Must not act on it."""

from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.http.websocket_protocol import FLOODED
from relay.observability.metrics import Metrics
from relay.sessions.connection import NodeConnection
from relay.sessions.handshake import rejection_of
from schemas.session import CloseCode, PeerProtocolError
from schemas.text import printable

_TOO_LARGE = 1009  # the server's own: a frame over the limit does not reach this package


class PeerFaults:
    """The faults of all nodes."""

    def __init__(self, metrics: Metrics, refusals: RefusalCounter, log: FilteringBoundLogger) -> None:
        self._metrics = metrics
        self._refusals = refusals
        self._log = log

    def refused(self, address: str, error: Exception) -> CloseCode:
        """Record that ``error`` ended the handshake with ``address``; return the code that closes it."""
        reason, code = rejection_of(error)
        self._metrics.sessions.labels(f"refused_{reason}").inc()
        if self._refusals.count(RefusalEvent.NODE_REFUSED, address, reason):
            self._log.warning("node refused", address=address, reason=reason)
        return code

    def identity_twice(self, node_id: str) -> None:
        """Record that two machines use one identity."""
        self._metrics.sessions.labels("duplicate_identity").inc()
        if self._refusals.count(RefusalEvent.IDENTITY_TWICE, node_id, RefusalReason.SUPERSEDED):
            self._log.warning("two machines use one identity; the newer stays", node_id=node_id)

    def newer_elsewhere(self, node_id: str, relay: str) -> None:
        """Record that the node has a newer session at another relay: it has moved, or there are two of it."""
        self._metrics.sessions.labels("superseded_elsewhere").inc()
        self._log.warning("node has a newer session at another relay", node_id=node_id, relay=relay)

    def broken(self, node_id: str, error: PeerProtocolError) -> None:
        """Record that the node broke the protocol."""
        self._metrics.sessions.labels("protocol_violation").inc()
        if self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, RefusalReason.PROTOCOL):
            self._log.warning("node broke the protocol", node_id=node_id, reason=printable(error.reason))

    def closed_by_server(self, node_id: str, code: int) -> None:
        """Record that the server closed the connection by itself, before a frame reached this package."""
        if code == _TOO_LARGE:
            self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, RefusalReason.FRAME_TOO_LARGE)
        elif code == FLOODED:
            self._metrics.sessions.labels("flooded").inc()
            if self._refusals.count(RefusalEvent.SESSION_BROKEN, node_id, RefusalReason.FLOODED):
                self._log.warning("node sent more frames than its rate", node_id=node_id)

    def dropped(self, node_id: str, connection: NodeConnection) -> None:
        """Record the frames that were dropped since the last call."""
        for reason, count in connection.take_dropped().items():
            self._metrics.frames_dropped.labels(reason).inc(count)
            if self._refusals.count(RefusalEvent.FRAME_DROPPED, node_id, reason, count):
                self._log.warning("frame dropped", node_id=node_id, reason=reason)
