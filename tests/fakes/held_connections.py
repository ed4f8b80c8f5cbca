"""Connections of agents, as a server holds them, without sockets."""

from collections.abc import Hashable

from relay.http.connections import AcceptedConnection, Bounds, Connections
from relay.observability.metrics import Metrics
from tests.fakes.hub import counted

_BOUNDS = Bounds(total=8, unauthenticated=4, per_address=2, per_holder=3)


class HeldConnections:
    """Connections with low limits.

    Attributes:
        per_holder: how many an agent may hold.
    """

    per_holder = _BOUNDS.per_holder

    def __init__(self) -> None:
        self._metrics = Metrics()
        self._connections = Connections(_BOUNDS, self._metrics.connections_refused)

    def hold(self, holder: Hashable) -> AcceptedConnection:
        """Return a new connection that counts towards ``holder``, which must be possible."""
        connection = self._connections.begin("127.0.0.1")
        assert connection is not None
        assert connection.admit(holder)
        return connection

    def refused(self) -> float:
        """Return how often an agent was refused another connection."""
        return counted(self._metrics, "connections_refused_total", reason="holder")
