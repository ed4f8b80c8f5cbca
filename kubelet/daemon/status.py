"""What the daemon does now, as JSON: for ``kubelet status``, ``kubelet doctor`` and ``/metrics``.

Holds no secret. It reads, and must not change anything: the loopback server's threads call it too.
"""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kubelet.announce.publisher import Publisher
from kubelet.caller_tools.assembly import CallerTools
from kubelet.config import DaemonPlan
from kubelet.daemon.health import readiness_of
from kubelet.daemon.node import Node
from schemas.identity import first_certificate_in, validity_of
from schemas.process.resources import Uptime, resources, watchdog_s


@dataclass(slots=True)
class LogCounts:
    """What the log has counted: faults, and lines that were lost."""

    faults: int = 0
    lines_lost: int = 0

    def fault(self, _source: str) -> None:
        """Count a fault."""
        self.faults += 1

    def lost(self, count: int) -> None:
        """Count lines that were lost."""
        self.lines_lost += count


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """The parts that the status is read from. ``settings`` returns those that the daemon runs with."""

    plan: DaemonPlan
    node: Node
    publisher: Publisher
    tools: CallerTools
    counts: LogCounts
    now_ms: Callable[[], int]
    uptime: Uptime
    loop: asyncio.AbstractEventLoop
    settings: Callable[[], Mapping[str, Mapping[str, str]]]

    def __call__(self) -> dict[str, Any]:
        """Return the status."""
        node = self.node
        readiness = readiness_of(node, self.publisher, self.tools)
        manifest = node.announcer.current
        outcomes = sorted(node.dispatcher.outcomes.copy().items())
        return {
            "program": "kubelet",
            "version": self.plan.version,
            "now_ms": self.now_ms(),
            "uptime_s": self.uptime(),
            "watchdog_s": watchdog_s(os.environ),
            **resources(self.loop),
            "ready": readiness.ready,
            "subsystems": {name: health.to_json() for name, health in readiness.subsystems.items()},
            "settings": self.settings(),
            "node_id": node.identity.node_id,
            "certificate_expires_at_ms": validity_of(first_certificate_in(node.identity.leaf_pem))[1],
            "relay": self._relay(),
            "broker": {
                "url": str(self.plan.config.broker or "none"),
                "published": list(node.by_broker),
                "relay_received": node.link.flow.relay_saw,
            },
            "manifest": {
                "etag": manifest.etag if manifest else None,
                "expires_at_ms": manifest.expires_at_ms if manifest else None,
            },
            "calls": {
                "in_flight": node.dispatcher.inflight,
                "outcomes": [{"code": code, "hop": hop, "count": n} for (code, hop), n in outcomes],
            },
            "messages_refused": {"relay": node.frames.refused, "broker": self.publisher.refused},
            "local_clients": dict(self.tools.counts),
            "faults": self.counts.faults,
            "log_lines_lost": self.counts.lines_lost,
        }

    def _relay(self) -> dict[str, Any]:
        flow, connected_to = self.node.link.flow, self.node.link.connected_to
        return {
            "url": self.plan.config.relay_url,
            "relays": list(self.plan.config.relays),
            "connected_to": None if connected_to is None else str(connected_to),
            "sessions": flow.sessions,
            "gets_echo": flow.gets_echo,
            "echo_answered": flow.is_answered,
            "acknowledgements": flow.acknowledgements,
            "acknowledged_s_ago": flow.acknowledged_s_ago,
            "heartbeat_s": self.node.announcer.interval_s,
        }
