"""Whether this machine's clock is behind those of the nodes.

A relay that is more than 5 min behind refuses the manifests of all nodes as those of the future, and agents'
new tokens too: no call flows, and nothing else shows why. One node proves nothing, for its own clock may be
the wrong one. Must not judge manifests.
"""

from collections import Counter
from collections.abc import Callable

from structlog.typing import FilteringBoundLogger

from relay.fleet.node_index import NodeIndex
from schemas.verdicts import Reason, Verdict

FEWEST_AHEAD = 3
"""Of fewer nodes, all clocks may be wrong."""

HELD_MS = 600_000
"""How long a manifest of the future counts: twice the longest interval of heartbeats."""


class NodeClocks:
    """Which of ``nodes`` sign manifests that are of the future by this machine's clock."""

    def __init__(self, nodes: NodeIndex, now_ms: Callable[[], int], log: FilteringBoundLogger) -> None:
        self._nodes = nodes
        self._now_ms = now_ms
        self._log = log
        self._seen_ms: dict[str, int] = {}
        self._are_ahead = False

    @property
    def are_ahead(self) -> bool:
        """Whether they were ahead at the last comparison: in every tenant more nodes than not."""
        return self._are_ahead

    def judged(self, node_id: str, verdict: Verdict) -> None:
        """Take in what ``verdict`` says of a node's clock: only what the node has signed gets that far."""
        if verdict.reason is Reason.FUTURE:
            self._seen_ms[node_id] = self._now_ms()
        elif verdict.manifest is not None:
            self._seen_ms.pop(node_id, None)

    def compare(self) -> None:
        """Compare anew. Reads every node, but only while some of them are ahead."""
        now_ms = self._now_ms()
        self._seen_ms = {
            node_id: seen_ms
            for node_id, seen_ms in self._seen_ms.items()
            if 0 <= now_ms - seen_ms < HELD_MS and (node := self._nodes.get(node_id)) and node.identities
        }
        are_ahead = len(self._seen_ms) >= FEWEST_AHEAD and self._prevail(now_ms)
        if are_ahead and not self._are_ahead:
            self._log.error(
                "this machine's clock is behind those of the nodes: their manifests are refused",
                nodes=len(self._seen_ms),
            )
        elif self._are_ahead and not are_ahead:
            self._log.info("this machine's clock is not behind those of the nodes any more")
        self._are_ahead = are_ahead

    def _prevail(self, now_ms: int) -> bool:
        """Return whether in each tenant more nodes are ahead than have a manifest in force."""
        ahead = Counter(self._nodes[node_id].tenant for node_id in self._seen_ms)
        others = Counter(
            node.tenant
            for node in self._nodes
            if node.manifest is not None
            and node.manifest.good_until_ms > now_ms
            and node.node_id not in self._seen_ms
        )
        return all(ahead[tenant] > others[tenant] for tenant in ahead.keys() | others.keys())
