"""The leases of nodes: tells each what to sample, for as long as its stream has a subscriber.

A node that has lost its session lets its lease end by itself; it gets another when it connects. Must not
decide who may subscribe.
"""

from collections.abc import Callable

from relay.routing.port import NodeFrames
from relay.streams.telemetry.stream import Stream, Terms
from relay.streams.telemetry.subscription import lease_s
from schemas.errors import ToolError
from schemas.frames import OneWayType
from schemas.payloads import TelemetryLease

_RENEWALS_IN_A_LEASE = 3
_SHORTEST_INTERVAL_MS = 1000


class Leases:
    """Sends leases by ``frames``. ``seconds`` is a monotonic clock."""

    def __init__(self, frames: NodeFrames, seconds: Callable[[], float]) -> None:
        self._frames = frames
        self._seconds = seconds
        self._to_stop: set[tuple[str, str]] = set()

    def update(self, stream: Stream) -> None:
        """Send the lease of ``stream`` if its terms have changed, or a third of its time has passed.

        What cannot be sent now is sent by a later call.
        """
        now, terms = self._seconds(), stream.terms()
        if terms is None:
            return
        ttl_s = lease_s(terms.interval_ms / 1000)
        self._to_stop.discard(stream.tool.capability)
        if terms == stream.leased and now - stream.leased_s < ttl_s / _RENEWALS_IN_A_LEASE:
            return
        if self._sent(stream.tool.capability, terms, int(ttl_s * 1000)):
            stream.leased, stream.leased_s = terms, now

    def stop(self, stream: Stream) -> None:
        """End the lease of ``stream``, which has no subscriber any more."""
        if stream.leased is not None:
            stream.leased = None
            self._to_stop.add(stream.tool.capability)
            self.stop_pending()

    def stop_pending(self) -> None:
        """Send what ends leases and could not be sent before."""
        ended = Terms(_SHORTEST_INTERVAL_MS, None)
        for capability in list(self._to_stop):
            if self._sent(capability, ended, 0):
                self._to_stop.discard(capability)

    def lost(self, node_id: str) -> None:
        """Forget what was to be sent to a node whose connection is lost: its leases end by themselves."""
        self._to_stop = {capability for capability in self._to_stop if capability[0] != node_id}

    def _sent(self, capability: tuple[str, str], terms: Terms, ttl_ms: int) -> bool:
        node_id, cap_id = capability
        lease: TelemetryLease = {"cap_id": cap_id, "interval_ms": terms.interval_ms, "ttl_ms": ttl_ms}
        if terms.include is not None:
            lease["include"] = sorted(terms.include)
        try:
            self._frames.send(node_id, OneWayType.TELEMETRY_LEASE, lease)
        except ToolError:
            return False  # offline, or too often: it is sent when it connects, or by the next sweep
        return True
