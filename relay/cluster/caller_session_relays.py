"""Which relay each caller's session with a node of this relay is kept at: the one that has opened it.

Learned from the frames that pass; bounded, since another relay may be wrong. Must not send anything.
"""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from relay.cluster.frame_queues import NodeAt
from relay.routing.port import NodeRef
from schemas.caller_tools import MAX_SESSIONS
from schemas.errors import Failure, ToolError
from schemas.frames import OneWayType

_RETRY_MS = 60_000


class CallerSessionRelays:
    """The relays of callers' sessions, for each node by its own session."""

    def __init__(self) -> None:
        self._of_node: dict[NodeRef, dict[str, str]] = defaultdict(dict)

    def passed(self, where: NodeAt, type_: OneWayType, payload: Mapping[str, Any]) -> None:
        """Take in a frame to a node of this relay, from the relay of ``where``.

        Raises:
            ToolError: RATE_LIMITED: the node has as many sessions as it may have.
        """
        relays = self._of_node[where.node]
        session_id: str = payload["session_id"]
        if type_ is OneWayType.SESSION_END:
            relays.pop(session_id, None)
        elif type_ is OneWayType.SESSION_OPEN:
            if session_id not in relays and len(relays) >= MAX_SESSIONS:
                raise ToolError(Failure.RATE_LIMITED, retry_after_ms=_RETRY_MS)
            relays[session_id] = where.relay

    def relay_of(self, node: NodeRef, session_id: str) -> str | None:
        """Return the other relay that has the session; None if there is none."""
        return self._of_node.get(node, {}).get(session_id)

    def node_connected(self, node: NodeRef) -> None:
        """Forget the sessions of an older session of the node: they are opened again."""
        for known in [known for known in self._of_node if known.node_id == node.node_id and known != node]:
            del self._of_node[known]

    def relay_gone(self, relay: str) -> list[tuple[NodeRef, str]]:
        """Forget the sessions of a relay that has ended; return them, each with its node."""
        ended = [
            (node, session_id)
            for node, relays in self._of_node.items()
            for session_id, kept_at in relays.items()
            if kept_at == relay
        ]
        for node, session_id in ended:
            del self._of_node[node][session_id]
        return ended
