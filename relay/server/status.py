"""What the relay does now, as JSON: for ``relay status`` and ``relay doctor``. Must not contain a secret."""

import asyncio
import os
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, NotRequired, TypedDict

from attrs import define, field

from relay.fleet.facts import NodesStatus
from relay.server.app import Relay
from schemas.health import HealthDocument
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
    subsystems: Mapping[str, HealthDocument]
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


@define(eq=False, repr=False)
class RelayStatus:
    """The status of ``_relay``.

    ``_settings`` returns those that it runs with; None if it was started without a loader of such.
    """

    _relay: Relay
    _settings: Callable[[], SerializedSettings] | None
    _uptime: Uptime = field(factory=Uptime, init=False)

    def line(self) -> str:
        """Return what the service manager shows, in one line."""
        missing = sorted(name for name, part in self._relay.health().items() if not part.lets_calls_flow)
        return f"not ready: {', '.join(missing)}" if missing else "ready: calls can be made"

    def __call__(self) -> RelayStatusDocument:
        relay, config, health = self._relay, self._relay.environment.config, self._relay.health()
        used = resources(asyncio.get_running_loop())
        inventory = relay.fleet.inventory
        status: RelayStatusDocument = {
            "program": "relay",
            "version": version("edge-kubelet"),
            "now_ms": relay.environment.now_ms(),
            "uptime_s": self._uptime(),
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
                "probe_node": None if relay.own_broker is None else relay.own_broker.probe_node,
            },
            "nodes": relay.fleet.warnings.status(inventory.known(), relay.canaries.connected),
            "ca": "elsewhere" if relay.forwards else "here",
            "cluster": {} if relay.cluster is None else relay.cluster.status(),
            "calls": {"outcomes": relay.environment.metrics.outcomes()},
            "certificates": {name: relay.expiries.end_ms(name) for name in relay.expiries.names},
            "audit_head": relay.audit.head,
        }
        if self._settings is not None:
            status["settings"] = self._settings()
        return status
