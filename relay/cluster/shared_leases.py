"""The telemetry of this relay's nodes, leased to the relays that follow it: one lease at the node for all.

A node samples at the shortest interval and with all parts that a relay has leased. Must not read samples.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass

from relay.routing.port import NodeFrames
from schemas.errors import ToolError
from schemas.frames import OneWayType
from schemas.payloads import TelemetryLease

NodeCapability = tuple[str, str]
"""The id of a node, and that of a capability of it."""


@dataclass(frozen=True, slots=True)
class _Share:
    """What one relay has leased: ``include`` None for all parts; ``until_s`` on the monotonic clock."""

    interval_ms: int
    include: frozenset[str] | None
    until_s: float


class SharedLeases:
    """Sends leases by ``frames``. ``seconds`` is a monotonic clock."""

    def __init__(self, frames: NodeFrames, seconds: Callable[[], float]) -> None:
        self._frames = frames
        self._seconds = seconds
        self._shares: dict[NodeCapability, dict[str, _Share]] = {}

    def ask(self, relay: str, node_id: str, lease: TelemetryLease) -> None:
        """Take in what ``relay`` leases, in place of what it had, and send the node what follows for all.

        Raises:
            ToolError: that was not sent, as ``NodeFrames`` describes. To ask again sends it.
        """
        capability = (node_id, lease["cap_id"])
        shares = self._shares.setdefault(capability, {})
        before = shares.pop(relay, None)
        if lease["ttl_ms"] > 0:
            until_s = self._seconds() + lease["ttl_ms"] / 1000
            include = frozenset(lease["include"]) if "include" in lease else None
            shares[relay] = _Share(lease["interval_ms"], include, until_s)
        try:
            self._send(capability, lease["interval_ms"])
        except ToolError:
            if lease["ttl_ms"] > 0:
                self._restore(capability, relay, before)
            raise

    def relays_of(self, node_id: str, cap_id: str) -> Collection[str]:
        """Return the relays that have leased the capability."""
        now = self._seconds()
        shares = self._shares.get((node_id, cap_id), {})
        return [relay for relay, share in shares.items() if share.until_s > now]

    def relay_gone(self, relay: str) -> None:
        """End what a relay has leased that has ended."""
        for capability, shares in list(self._shares.items()):
            if (share := shares.pop(relay, None)) is not None:
                with suppress(ToolError):  # the lease of the node ends by itself
                    self._send(capability, share.interval_ms)

    def node_changed(self, node_id: str) -> None:
        """Forget the leases of a node that has connected or is lost: each relay leases it again."""
        for capability in [known for known in self._shares if known[0] == node_id]:
            del self._shares[capability]

    def _restore(self, capability: NodeCapability, relay: str, before: _Share | None) -> None:
        """Take back what ``relay`` has asked for, since it was not sent."""
        shares = self._shares[capability]
        del shares[relay]
        if before is not None:
            shares[relay] = before
        elif not shares:
            del self._shares[capability]

    def _send(self, capability: NodeCapability, interval_ms: int) -> None:
        """Send the lease for all; ``interval_ms`` is that of one that ends the last."""
        node_id, cap_id = capability
        now = self._seconds()
        shares = self._shares[capability]
        for relay in [relay for relay, share in shares.items() if share.until_s <= now]:
            del shares[relay]
        lease: TelemetryLease = {"cap_id": cap_id, "interval_ms": interval_ms, "ttl_ms": 0}
        if shares:
            lease["interval_ms"] = min(share.interval_ms for share in shares.values())
            lease["ttl_ms"] = int(1000 * (max(share.until_s for share in shares.values()) - now))
            if (parts := _all_parts(share.include for share in shares.values())) is not None:
                lease["include"] = parts
        else:
            del self._shares[capability]
        self._frames.send(node_id, OneWayType.TELEMETRY_LEASE, lease)


def _all_parts(includes: Iterable[frozenset[str] | None]) -> list[str] | None:
    """Return every part that one of ``includes`` names; None if one of them wants all."""
    wanted: set[str] = set()
    for include in includes:
        if include is None:
            return None
        wanted |= include
    return sorted(wanted)
