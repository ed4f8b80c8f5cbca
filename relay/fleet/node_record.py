"""What the relay knows of one node.

Must not decide what is trusted: that is for ``leaves`` and the trust rules.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from relay.fleet.tools import Tool
from schemas.identity import Identity
from schemas.verdicts import Known, Mark, TrustedManifest

NO_TOOLS: Mapping[str, Tool] = MappingProxyType({})
_MAX_IDENTITIES = 2


@dataclass(slots=True)
class NodeRecord:
    """What is known of one node.

    Attributes:
        tenant: of its newest leaf that was verified, now or before a restart.
        has_announced: a manifest of it was accepted since the relay's start.
        leaf_dropped: its manifest was dropped because its leaf is no longer trusted.
        tools: what its manifest announces, by canonical name; ``kinds`` are the names of their kinds.
        since_ms: when it has connected, or its connection was lost; None if neither was seen.
        announced_in: the relay's latest subscription to the broker in which that sent an announce.
        broker_etag: the ETag of what the broker sent last as its announce; it may not have been accepted.
        grace_until_ms: how long its tools stay listed without a connection.
        indexed_tenant, indexed_tools: what ``NodeIndex`` has taken in; written by the index alone.
    """

    node_id: str
    tenant: str
    identities: dict[str, Identity] = field(default_factory=dict)
    mark: Mark | None = None
    manifest: TrustedManifest | None = None
    has_announced: bool = False
    rejected: bool = False
    leaf_dropped: bool = False
    tools: Mapping[str, Tool] = field(default_factory=lambda: NO_TOOLS)
    kinds: frozenset[str] = frozenset()
    connected: bool = False
    since_ms: int | None = None
    announced_in: int = 0
    broker_etag: str | None = None
    grace_until_ms: int = 0
    indexed_tenant: str | None = None
    indexed_tools: Mapping[str, Tool] = field(default_factory=lambda: NO_TOOLS)

    def withdraw(self) -> None:
        """Drop its manifest, and what that announced."""
        self._set_tools(NO_TOOLS)
        self.manifest = None

    def announce(self, tools: Mapping[str, Tool]) -> None:
        """Take ``tools`` as what its manifest announces."""
        self._set_tools(tools)
        self.has_announced = True

    def _set_tools(self, tools: Mapping[str, Tool]) -> None:
        self.tools = tools
        # Searches read them of thousands of nodes, and they change with the tools alone.
        self.kinds = frozenset(tool.surface.kind.name for tool in tools.values())

    @property
    def listed_until_ms(self) -> int:
        """When its tools are listed no longer: its manifest has ended, or its grace without a connection."""
        if self.manifest is None:
            return 0
        good_until_ms = self.manifest.good_until_ms
        return good_until_ms if self.connected else min(good_until_ms, self.grace_until_ms)

    def is_listed(self, now_ms: int) -> bool:
        """Return whether its tools are listed."""
        return now_ms < self.listed_until_ms

    def set_connected(self, *, connected: bool, now_ms: int, grace_until_ms: int) -> None:
        """Record that its session began or ended."""
        if connected != self.connected:
            self.connected, self.since_ms = connected, now_ms
        self.grace_until_ms = grace_until_ms

    def keep(self, identity: Identity) -> None:
        """Add a verified leaf of this node, and take the tenant of the newest."""
        self.identities[identity.kid] = identity
        if len(self.identities) > _MAX_IDENTITIES:
            # At renewal there are two; an old leaf that is retained again must not push out a newer one.
            del self.identities[min(self.identities.values(), key=_not_before).kid]
        # Leaves are public and can be published again: the newest decides the tenant, not the last received.
        self.tenant = max(self.identities.values(), key=_not_before).tenant


def known_of(node: NodeRecord | None, revoked: frozenset[str]) -> Known:
    """Return what the trust rules need to know of ``node``; None: of one that is not known."""
    if node is None:
        return Known({}, revoked=revoked)
    return Known(
        identities=node.identities,
        mark=node.mark,
        current_etag=node.manifest.etag if node.manifest else None,
        session_alive=node.connected,
        revoked=revoked,
    )


def _not_before(identity: Identity) -> int:
    return identity.not_before_ms
