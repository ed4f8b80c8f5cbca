"""What the relay does now, as JSON: for ``relay status`` and ``relay doctor``. Must not contain a secret."""

import asyncio
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any, NotRequired, TypedDict

from relay.audit.assembly import AuditPart
from relay.broker.assembly import BrokerPart
from relay.calls.assembly import CallsPart
from relay.fleet.assembly import FleetPart
from relay.fleet.facts import NodesStatus
from relay.part import Part
from relay.pki.assembly import PkiPart
from relay.settings.environment import RelayEnvironment
from schemas.health import Health
from schemas.process.resources import Uptime, resources, watchdog_s
from schemas.settings import SerializedSettings


class BrokerStatus(TypedDict):
    """The broker, and of how many known nodes it has not sent the manifests."""

    url: str
    missing: int
    probe_node: str | None


class RelayStatusDocument(TypedDict):
    """What ``relay status --json`` prints; ``settings`` are those that the relay runs with."""

    program: str
    version: str
    now_ms: int
    uptime_s: int
    watchdog_s: float | None
    pid: int
    resident_bytes: int
    open_files: int
    max_open_files: int
    tasks: int
    ready: bool
    subsystems: Mapping[str, Mapping[str, bool | str]]
    settings: NotRequired[SerializedSettings]
    public_url: str
    listen: str
    broker: BrokerStatus
    nodes: NodesStatus
    ca: str
    cluster: Mapping[str, Any]
    calls: Mapping[str, Any]
    certificates: Mapping[str, int]
    audit_head: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayStatus:
    """The parts that the status is read from.

    Attributes:
        health: returns that of every subsystem.
        settings: returns those that the relay runs with; None if it was started without a loader of such.
    """

    environment: RelayEnvironment
    audit: AuditPart
    broker: BrokerPart
    pki: PkiPart
    fleet: FleetPart
    calls: CallsPart
    cluster: Part
    health: Callable[[], Mapping[str, Health]]
    settings: Callable[[], SerializedSettings] | None
    uptime: Uptime = field(default_factory=Uptime)

    def line(self) -> str:
        """Return what the service manager shows, in one line."""
        missing = sorted(name for name, part in self.health().items() if not part.lets_calls_flow)
        return f"not ready: {', '.join(missing)}" if missing else "ready: calls can be made"

    def __call__(self) -> RelayStatusDocument:
        config, health = self.environment.config, self.health()
        used = resources(asyncio.get_running_loop())
        inventory, warnings = self.fleet.fleet.inventory, self.fleet.fleet.warnings
        canaries, expiries = self.calls.canaries, self.pki.expiries
        status: RelayStatusDocument = {
            "program": "relay",
            "version": version("edge-kubelet"),
            "now_ms": self.environment.now_ms(),
            "uptime_s": self.uptime(),
            "watchdog_s": watchdog_s(os.environ),
            "pid": used["pid"],
            "resident_bytes": used["resident_bytes"],
            "open_files": used["open_files"],
            "max_open_files": used["max_open_files"],
            "tasks": used["tasks"],
            "ready": all(part.lets_calls_flow for part in health.values()),
            "subsystems": {name: part.to_json() for name, part in health.items()},
            "public_url": config.public_url,
            "listen": str(config.listen),
            "broker": {
                "url": str(config.broker or "none"),
                "missing": inventory.missing(),
                "probe_node": self.broker.probe_node,
            },
            "nodes": {
                "known": inventory.known(),
                "connected": canaries.connected,
                "wrong_clocks": warnings.nodes("wrong_clocks"),
                "silent": warnings.nodes("silent"),
            },
            "ca": "here" if self.pki.service is not None else "elsewhere",
            "cluster": self.cluster.status(),
            "calls": {"outcomes": self.environment.metrics.outcomes()},
            "certificates": {name: expiries.end_ms(name) for name in expiries.names},
            "audit_head": self.audit.log.head,
        }
        if self.settings is not None:
            status["settings"] = self.settings()
        return status
