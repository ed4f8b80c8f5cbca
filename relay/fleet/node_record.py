"""What the relay knows of one node.

Must not decide what is trusted: that is for ``leaves`` and the trust rules.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import NamedTuple

from relay.fleet.tools import Tool
from schemas.identity import Identity
from schemas.payloads import OpenFinding
from schemas.trust import HighWaterMark, Known, TrustedManifest

NO_TOOLS: Mapping[str, Tool] = MappingProxyType({})
_MAX_IDENTITIES = 2


class Where(Enum):
    """Where a node is connected: to this relay, to another one of the fleet, or to none that is known."""

    HERE = "here"
    ELSEWHERE = "elsewhere"
    NOWHERE = "nowhere"


class ManifestStatus(StrEnum):
    """What the newest manifest of a node is by this machine's clock; one that has ended is neither."""

    IN_FORCE = "in_force"
    AHEAD = "ahead"


class NodeState(NamedTuple):
    """What is counted of one node.

    Attributes:
        received_in: in which subscription the broker sent its announce; None if none is expected of it.
    """

    tenant: str
    manifest_status: ManifestStatus | None
    received_in: int | None


@dataclass(slots=True)
class NodeRecord:
    """What is known of one node.

    Attributes:
        tenant: of its newest leaf that was verified, now or before a restart.
        has_announced: a manifest of it was accepted since the relay's start.
        leaf_dropped: its manifest was dropped because its leaf is no longer trusted.
        tools: what its manifest announces, by canonical name; ``kinds`` are the names of their kinds.
        since_ms: when it has connected, or its connection was lost; None if neither was seen.
        received_in: the relay's latest subscription to the broker in which that sent an announce.
        broker_etag: the ETag of what the broker sent last as its announce; it may not have been accepted.
        grace_until_ms: how long its tools stay listed without a connection.
        ahead_until_ms: how long it counts that it has sent a manifest of the future by this machine's clock;
            0 if it has not since one was accepted.
        findings: what of ``linux.health`` it has reported to be open in its session, the worst first.
        indexed_tenant, indexed_tools, indexed_state: what ``NodeIndex`` has taken in; written by it alone.
    """

    node_id: str
    tenant: str
    identities: dict[str, Identity] = field(default_factory=dict)
    mark: HighWaterMark | None = None
    manifest: TrustedManifest | None = None
    has_announced: bool = False
    rejected: bool = False
    leaf_dropped: bool = False
    tools: Mapping[str, Tool] = field(default_factory=lambda: NO_TOOLS)
    kinds: frozenset[str] = frozenset()
    where: Where = Where.NOWHERE
    since_ms: int | None = None
    received_in: int = 0
    broker_etag: str | None = None
    grace_until_ms: int = 0
    ahead_until_ms: int = 0
    findings: tuple[OpenFinding, ...] = ()
    indexed_tenant: str | None = None
    indexed_tools: Mapping[str, Tool] = field(default_factory=lambda: NO_TOOLS)
    indexed_state: NodeState | None = None

    def withdraw(self) -> None:
        self._set_tools(NO_TOOLS)
        self.manifest = None

    def announce(self, tools: Mapping[str, Tool]) -> None:
        self._set_tools(tools)
        self.has_announced = True

    def _set_tools(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools
        # Searches read them of thousands of nodes, and they change with the tools alone.
        self.kinds = frozenset(tool.surface.kind.name for tool in tools.values())

    @property
    def connected(self) -> bool:
        return self.where is not Where.NOWHERE

    @property
    def in_force_until_ms(self) -> int:
        """When its manifest ends; 0 if it has none."""
        return self.manifest.good_until_ms if self.manifest is not None else 0

    @property
    def listed_until_ms(self) -> int:
        """When its tools are listed no longer: its manifest has ended, or its grace without a connection."""
        in_force_until_ms = self.in_force_until_ms
        return in_force_until_ms if self.connected else min(in_force_until_ms, self.grace_until_ms)

    def is_listed(self, now_ms: int) -> bool:
        return now_ms < self.listed_until_ms

    def state(self, now_ms: int, *, is_expected: bool) -> NodeState:
        """Return what is counted of it; ``is_expected``: the broker has an announce of it."""
        return NodeState(self.tenant, self._standing(now_ms), self.received_in if is_expected else None)

    def _standing(self, now_ms: int) -> ManifestStatus | None:
        # What a node has signed says nothing once its leaves are revoked.
        if now_ms < self.ahead_until_ms and self.identities:
            return ManifestStatus.AHEAD
        return ManifestStatus.IN_FORCE if now_ms < self.in_force_until_ms else None

    def next_end_ms(self, now_ms: int) -> int | None:
        """Return when what holds of it now ends next; None if nothing does by itself."""
        ends = (self.listed_until_ms, self.in_force_until_ms, self.ahead_until_ms)
        return min((end_ms for end_ms in ends if end_ms > now_ms), default=None)

    def connection_changed(self, where: Where, now_ms: int, grace_until_ms: int) -> None:
        was_connected, self.where = self.connected, where
        if self.connected is not was_connected:
            self.since_ms = now_ms
            self.findings = ()
        self.grace_until_ms = grace_until_ms

    def drop_leaves(self, is_untrusted: Callable[[Identity], bool]) -> bool:
        """Drop the leaves that are no longer trusted; return whether there was one."""
        before = len(self.identities)
        self.identities = {kid: leaf for kid, leaf in self.identities.items() if not is_untrusted(leaf)}
        return len(self.identities) < before

    def keep(self, identity: Identity) -> None:
        """Add a verified leaf of this node, and take the tenant of the newest."""
        self.identities[identity.kid] = identity
        if len(self.identities) > _MAX_IDENTITIES:
            # At renewal there are two; an old leaf that is retained again must not push out a newer one.
            del self.identities[min(self.identities.values(), key=_not_before).kid]
        # Leaves are public and can be published again: the newest decides the tenant, not the last received.
        self.tenant = max(self.identities.values(), key=_not_before).tenant


def known_of(node: NodeRecord | None, revoked: frozenset[str], *, is_live: bool) -> Known:
    """Return what the trust rules need to know of ``node``; None: of one that is not known.

    ``is_live``: for a manifest that comes by the node's session.
    """
    if node is None:
        return Known({}, revoked=revoked)
    return Known(
        identities=node.identities,
        mark=node.mark,
        current_etag=node.manifest.etag if node.manifest else None,
        session_alive=node.connected,
        is_live=is_live,
        revoked=revoked,
    )


def _not_before(identity: Identity) -> int:
    return identity.not_before_ms
