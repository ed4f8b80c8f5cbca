"""Which sessions' leaves have expired, without examining every session each time.

With ten thousand nodes that would be most of what an idle relay does. Must not end a session.
"""

from collections.abc import Mapping

from relay.fleet.node_index import DueTimes
from relay.sessions.session import NodeSession


class LeafExpiry:
    """The times at which the leaves of sessions expire. Times are milliseconds since the epoch."""

    def __init__(self) -> None:
        self._due = DueTimes()
        self._checked_ms = 0

    def watch(self, session: NodeSession) -> None:
        """Examine ``session`` when its leaf expires. A leaf that replaces it there is found then."""
        self._due.no_later_than(session.identity.node_id, session.identity.not_after_ms)

    def expired(self, sessions: Mapping[str, NodeSession], now_ms: int) -> list[str]:
        """Return the nodes of ``sessions``, by node id, whose leaf is not valid at ``now_ms``."""
        # After the clock was set back, leaves may not be valid yet: none of them is due for that.
        is_set_back, self._checked_ms = now_ms < self._checked_ms, now_ms
        due = list(self._due.take(now_ms))
        examined = list(sessions) if is_set_back else [node_id for node_id in due if node_id in sessions]
        expired = []
        for node_id in examined:
            if sessions[node_id].identity.valid_at(now_ms):
                self.watch(sessions[node_id])
            else:
                expired.append(node_id)
        return expired
