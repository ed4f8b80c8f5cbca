"""What the daemon does now, as JSON for ``kubelet status`` and ``kubelet doctor``; its health, its metrics.

Holds no secret. It reads, and must not change or count anything: the loopback server's threads call it too.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kubelet.caller_tools.assembly import CallerTools
from kubelet.daemon.node import Node, NodeSettings
from kubelet.loopback import Readiness
from kubelet.session.link import LinkState
from schemas.health import Health, Loop
from schemas.identity import first_certificate_in, validity_of
from schemas.process.resources import Uptime, resources, watchdog_s


@dataclass(slots=True)
class LogCounts:
    """What the log has counted: faults, and lines that were lost."""

    faults: int = 0
    lines_lost: int = 0

    def fault(self, _source: str) -> None:
        self.faults += 1

    def lost(self, count: int) -> None:
        self.lines_lost += count


@dataclass(frozen=True, slots=True)
class DaemonStatus:
    """The parts that the status is read from. ``kinds`` tells of each kind whether it is announced."""

    settings: NodeSettings
    node: Node
    tools: CallerTools
    counts: LogCounts
    now_ms: Callable[[], int]
    uptime: Uptime
    loop: asyncio.AbstractEventLoop
    kinds: Callable[[], Mapping[str, Any]]

    def loops(self) -> dict[str, Loop]:
        """Return the loops without whose progress the daemon should be restarted, by subsystem."""
        node = self.node
        return {"manifest": node.announcer.loop, "relay": node.link.loop, "broker": node.publisher.loop}

    def line(self) -> str:
        """Return what the service manager shows, in one line."""
        broker, inflight = self.node.publisher.health.state, self.node.dispatcher.inflight
        return f"relay: {self.node.link.state.value}; broker: {broker}; commands: {inflight}"

    def readiness(self) -> Readiness:
        """Return whether calls flow, and the health of each subsystem.

        A broker that is away is shown, but the session suffices for announcing.
        """
        link, announcer = self.node.link, self.node.announcer
        is_announced = link.state is LinkState.ANNOUNCED
        flow = link.flow
        flows = is_announced and flow.is_answered and flow.is_fresh
        is_issued = self.node.identity.root_pem is not None
        subsystems = {
            "identity": Health.passive(
                ready=is_issued, state="issued" if is_issued else "self-signed: install a certificate"
            ),
            "manifest": Health.of(
                announcer.loop,
                ready=announcer.current is not None,
                state=announcer.blocked_reason or ("signed" if announcer.current else "not signed yet"),
            ),
            "broker": self.node.publisher.health,
            "relay": Health.of(link.loop, ready=is_announced, state=link.state.value),
            "calls": Health(started=flow.is_answered, live=True, ready=flows, state=flow.state),
            "caller tools": Health.passive(ready=True, state=self.tools.summary()),
        }
        return Readiness(flows and not any(not health.live for health in subsystems.values()), subsystems)

    def __call__(self) -> dict[str, Any]:
        node, plan = self.node, self.settings.plan
        readiness = self.readiness()
        manifest, flow, connected_to = node.announcer.current, node.link.flow, node.link.connected_to
        outcomes = sorted(node.dispatcher.outcomes.copy().items())
        return {
            "program": "kubelet",
            "version": plan.version,
            "now_ms": self.now_ms(),
            "uptime_s": self.uptime(),
            "watchdog_s": watchdog_s(os.environ),
            **resources(self.loop),
            "ready": readiness.ready,
            "subsystems": {name: health.to_json() for name, health in readiness.subsystems.items()},
            "settings": plan.settings,
            "node_id": node.identity.node_id,
            "certificate_expires_at_ms": validity_of(first_certificate_in(node.identity.leaf_pem))[1],
            "relay": {
                "url": plan.config.relay_url,
                "relays": list(plan.config.relays),
                "connected_to": None if connected_to is None else str(connected_to),
                "sessions": flow.sessions,
                "gets_echo": flow.gets_echo,
                "echo_answered": flow.is_answered,
                "acknowledgements": flow.acknowledgements,
                "acknowledged_s_ago": flow.acknowledged_s_ago,
                "heartbeat_s": node.announcer.interval_s,
            },
            "broker": {
                "url": str(plan.config.broker or "none"),
                "published": list(node.by_broker),
                "relay_received": flow.relay_saw,
            },
            "manifest": {
                "etag": manifest.etag if manifest else None,
                "expires_at_ms": manifest.expires_at_ms if manifest else None,
            },
            "calls": {
                "in_flight": node.dispatcher.inflight,
                "outcomes": [{"code": code, "hop": hop, "count": n} for (code, hop), n in outcomes],
            },
            "messages_refused": {"relay": node.frames.refused, "broker": node.publisher.refused},
            "local_clients": dict(self.tools.counts),
            "kinds": {**self.kinds(), **dict.fromkeys(node.relay_kinds.left_out, _NOT_KNOWN)},
            "faults": self.counts.faults,
            "log_lines_lost": self.counts.lines_lost,
        }


_NOT_KNOWN = {
    "announced": False,
    "lacks": "its relay does not know it, or did not say so yet",
    "relay": False,
}

_Samples = float | Sequence[tuple[Mapping[str, str], float]]
"""The value of a family, or one for each set of labels; of fixed words, like the labels."""


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return the metrics of ``status``, as ``DaemonStatus`` returns it, in Prometheus' text format.

    Written here: Prometheus' own library would take a tenth of the daemon's memory.
    """
    relay, broker, calls = status["relay"], status["broker"], status["calls"]
    ago_s, received = relay["acknowledged_s_ago"], broker["relay_received"]
    rows: Sequence[tuple[str, str, _Samples]] = (
        ("ready", "Whether calls flow, as /readyz says", status["ready"]),
        (
            "subsystem_live",
            "Whether the loops of a subsystem make progress",
            [({"subsystem": name}, health["live"]) for name, health in status["subsystems"].items()],
        ),
        (
            "subsystem_ready",
            "Whether a subsystem can do its part of a call",
            [({"subsystem": name}, health["ready"]) for name, health in status["subsystems"].items()],
        ),
        ("version_info", "The version that runs", [({"version": status["version"]}, 1)]),
        ("uptime_seconds", "Seconds since the start", status["uptime_s"]),
        (
            "certificate_expires_timestamp_seconds",
            "When the node's certificate ends, in seconds since the epoch",
            status["certificate_expires_at_ms"] / 1000,
        ),
        (
            "manifest_expires_timestamp_seconds",
            "When the newest manifest ends, in seconds since the epoch; 0 before the first",
            (status["manifest"]["expires_at_ms"] or 0) / 1000,
        ),
        ("sessions_total", "Sessions that the relay has opened", relay["sessions"]),
        (
            "heartbeat_acknowledged_seconds_ago",
            "Seconds since the relay acknowledged a heartbeat of this session",
            [] if ago_s is None else ago_s,
        ),
        (
            "relay_receives_by_broker",
            "Whether the relay receives by the broker what this node publishes, where the relay names that",
            [] if received is None else received in broker["published"],
        ),
        (
            "calls_total",
            "Commands by code, ok if they succeeded, and by the hop that failed",
            [({"code": one["code"], "hop": one["hop"]}, one["count"]) for one in calls["outcomes"]],
        ),
        ("calls_in_flight", "Commands that run", calls["in_flight"]),
        (
            "messages_refused_total",
            "Messages that the connection to the relay or to the broker did not take",
            [({"by": by}, count) for by, count in status["messages_refused"].items()],
        ),
        (
            "local_clients_total",
            "What was refused or dropped between local agents and callers, by what it was",
            [({"event": event}, count) for event, count in status["local_clients"].items()],
        ),
        ("faults_total", "Exceptions that were not expected", status["faults"]),
        ("log_lines_lost_total", "Log lines that could not be written", status["log_lines_lost"]),
        ("resident_memory_bytes", "Memory in use", status["resident_bytes"]),
        ("open_files", "Open file descriptors", status["open_files"]),
        ("max_open_files", "The limit of these", status["max_open_files"]),
        ("tasks", "Tasks of the event loop that have not ended", status["tasks"]),
    )
    return "".join(_family(f"edge_kubelet_{name}", text, samples) for name, text, samples in rows)


def _family(name: str, text: str, samples: _Samples) -> str:
    type_ = "counter" if name.endswith("_total") else "gauge"
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {type_}"]
    for labels, value in [({}, samples)] if isinstance(samples, int | float) else samples:
        shown = ",".join(f'{label}="{word}"' for label, word in labels.items())
        lines.append(f"{name}{{{shown}}} {float(value)}" if shown else f"{name} {float(value)}")
    return "\n".join(lines) + "\n"
