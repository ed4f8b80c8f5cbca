"""What the relay knows of one node. Must not decide what is believed: that is ``fleet``."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from relay.fleet.tools import Tool
from schemas.identity import Identity
from schemas.trust import Mark, TrustedManifest


@dataclass(slots=True)
class NodeRecord:
    """What is known of one node. ``tenant`` comes from a leaf that was verified, now or before a restart.

    ``barred`` says that its manifest was dropped because its leaf is not believed any more.
    """

    node_id: str
    tenant: str
    identities: dict[str, Identity] = field(default_factory=dict)
    mark: Mark | None = None
    manifest: TrustedManifest | None = None
    rejected: bool = False
    barred: bool = False
    tools: Mapping[str, Tool] = field(default_factory=dict)
    connected: bool = False
    listed_until_ms: int = 0

    def is_listed(self, now_ms: int) -> bool:
        """Tell whether its tools are shown: a live manifest, and a connection now, or a grace without one."""
        if self.manifest is None or self.manifest.good_until_ms <= now_ms:
            return False
        return self.connected or now_ms < self.listed_until_ms
