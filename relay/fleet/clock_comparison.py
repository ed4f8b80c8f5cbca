"""Whether this machine's clock is behind those of the nodes.

A relay that is more than 5 min behind refuses the manifests of all nodes as those of the future, and agents'
new tokens too: no call flows, and nothing else shows why. One node proves nothing, for its own clock may be
the wrong one. Must not judge manifests.
"""

from collections.abc import Mapping

from attrs import define, field
from structlog.typing import FilteringBoundLogger

from relay.fleet.node_index import NodeIndex
from relay.fleet.node_record import ManifestStatus
from schemas.times import ValidityClock
from schemas.trust import ManifestReason, Verdict

FEWEST_AHEAD = 3
"""Of fewer nodes, all clocks may be wrong."""
HELD_MS = 600_000
"""How long a manifest of the future counts: twice the longest interval of heartbeats."""


@define(eq=False, repr=False)
class NodeClocks:
    """Which of ``nodes`` sign manifests that are of the future by this machine's clock."""

    _nodes: NodeIndex
    _now_ms: ValidityClock
    _log: FilteringBoundLogger
    are_ahead: bool = field(default=False, init=False)
    """Whether they were at the last comparison: in every tenant more nodes than not."""
    _wrong: dict[str, tuple[str, int]] = field(factory=dict, init=False)

    @property
    def wrong(self) -> Mapping[str, str]:
        """The nodes whose clocks are ``ahead`` of this machine's or ``behind`` it, by what they signed."""
        now_ms = self._now_ms()
        return {node_id: how for node_id, (how, until_ms) in self._wrong.items() if now_ms < until_ms}

    def judged(self, node_id: str, verdict: Verdict, *, is_live: bool) -> None:
        """Note what ``verdict`` says of a node's clock: only what the node has signed gets that far.

        ``is_live``: the manifest came by the node's session, so that it is no old one.
        """
        node, now_ms = self._nodes.get(node_id), self._now_ms()
        if node is None:
            return
        if verdict.reason is ManifestReason.FUTURE:
            self._wrong[node_id] = ("ahead", now_ms + HELD_MS)
        elif verdict.reason is ManifestReason.EXPIRED and is_live:
            self._wrong[node_id] = ("behind", now_ms + HELD_MS)
        elif verdict.manifest is not None:
            self._wrong.pop(node_id, None)
        if verdict.reason is ManifestReason.FUTURE:
            node.ahead_until_ms = now_ms + HELD_MS
        elif verdict.manifest is not None and node.ahead_until_ms:
            node.ahead_until_ms = 0
        else:
            return
        self._nodes.update(node, now_ms)

    def compare(self) -> None:
        """Compare anew. The index has settled: what was signed too long ago counts no more."""
        now_ms = self._now_ms()
        self._wrong = {node_id: held for node_id, held in self._wrong.items() if now_ms < held[1]}
        ahead = self._nodes.counts.of_tenants(ManifestStatus.AHEAD)
        in_force = self._nodes.counts.of_tenants(ManifestStatus.IN_FORCE)
        count = sum(ahead.values())
        are_ahead = count >= FEWEST_AHEAD and all(
            ahead.get(tenant, 0) > in_force.get(tenant, 0) for tenant in ahead.keys() | in_force.keys()
        )
        if are_ahead and not self.are_ahead:
            self._log.error(
                "this machine's clock is behind those of the nodes: their manifests are refused", nodes=count
            )
        elif self.are_ahead and not are_ahead:
            self._log.info("this machine's clock is not behind those of the nodes any more")
        self.are_ahead = are_ahead
