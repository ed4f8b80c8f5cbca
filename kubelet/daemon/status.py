"""What the daemon does now, as JSON for ``kubelet status`` and ``kubelet doctor``; its health, its metrics.

Holds no secret. It reads, and must not change or count anything: the loopback server's threads call it too.
"""

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kubelet.announce.mqtt import Publisher
from kubelet.caller_tools.assembly import CallerTools
from kubelet.config import DaemonPlan
from kubelet.daemon.node import Node
from kubelet.loopback.pages import Readiness
from kubelet.session.link import LinkState
from schemas.health import Health, Loop
from schemas.identity import first_certificate_in, validity_of
from schemas.process.resources import Uptime, resources, watchdog_s


def loops_of(node: Node, publisher: Publisher) -> dict[str, Loop]:
    """Return the loops without whose progress the daemon should be restarted, by subsystem."""
    return {"manifest": node.announcer.loop, "relay": node.link.loop, "broker": publisher.loop}


def readiness_of(node: Node, publisher: Publisher, tools: CallerTools) -> Readiness:
    """Return whether calls flow, and the health of each subsystem.

    A broker that is away is shown, but the session suffices for announcing.
    """
    link, announcer = node.link, node.announcer
    is_announced = link.state is LinkState.ANNOUNCED
    flow = link.flow
    flows = is_announced and flow.is_answered and flow.is_fresh
    is_issued = node.identity.root_pem is not None
    subsystems = {
        "identity": Health.passive(
            ready=is_issued, state="issued" if is_issued else "self-signed: install a certificate"
        ),
        "manifest": Health.of(
            announcer.loop,
            ready=announcer.current is not None,
            state=announcer.obstacle or ("signed" if announcer.current else "not signed yet"),
        ),
        "broker": publisher.health,
        "relay": Health.of(link.loop, ready=is_announced, state=link.state.value),
        "calls": Health(started=flow.is_answered, live=True, ready=flows, state=flow.state),
        "caller tools": Health.passive(ready=True, state=tools.summary()),
    }
    return Readiness(flows and not any(not health.live for health in subsystems.values()), subsystems)


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


Labels = Mapping[str, str]
_Sample = tuple[Labels, float]
_NO_LABELS: Labels = {}


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return the metrics of ``status``, as ``DaemonStatus`` returns it, in Prometheus' text format.

    Written here: Prometheus' own library would take a tenth of the daemon's memory. Label values are fixed
    words.
    """
    families = [
        *_health(status),
        _gauge("version_info", "The version that runs", [({"version": status["version"]}, 1)]),
        _gauge("uptime_seconds", "Seconds since the start", [(_NO_LABELS, status["uptime_s"])]),
        _gauge(
            "certificate_expires_timestamp_seconds",
            "When the node's certificate ends, in seconds since the epoch",
            [(_NO_LABELS, status["certificate_expires_at_ms"] / 1000)],
        ),
        _gauge(
            "manifest_expires_timestamp_seconds",
            "When the newest manifest ends, in seconds since the epoch; 0 before the first",
            [(_NO_LABELS, (status["manifest"]["expires_at_ms"] or 0) / 1000)],
        ),
        *_connections(status),
        _counter(
            "calls",
            "Commands by code, ok if they succeeded, and by the hop that failed",
            [({"code": one["code"], "hop": one["hop"]}, one["count"]) for one in status["calls"]["outcomes"]],
        ),
        _gauge("calls_in_flight", "Commands that run", [(_NO_LABELS, status["calls"]["in_flight"])]),
        _counter(
            "messages_refused",
            "Messages that the connection to the relay or to the broker did not take",
            [({"by": by}, count) for by, count in status["messages_refused"].items()],
        ),
        _counter(
            "local_clients",
            "What was refused or dropped between local agents and callers, by what it was",
            [({"event": event}, count) for event, count in status["local_clients"].items()],
        ),
        _counter("faults", "Exceptions that were not expected", [(_NO_LABELS, status["faults"])]),
        _counter(
            "log_lines_lost", "Log lines that could not be written", [(_NO_LABELS, status["log_lines_lost"])]
        ),
        _gauge("resident_memory_bytes", "Memory in use", [(_NO_LABELS, status["resident_bytes"])]),
        _gauge("open_files", "Open file descriptors", [(_NO_LABELS, status["open_files"])]),
        _gauge("max_open_files", "The limit of these", [(_NO_LABELS, status["max_open_files"])]),
        _gauge("tasks", "Tasks of the event loop that have not ended", [(_NO_LABELS, status["tasks"])]),
    ]
    return "".join(families)


def _health(status: Mapping[str, Any]) -> Iterable[str]:
    subsystems = status["subsystems"].items()
    yield _gauge("ready", "Whether calls flow, as /readyz says", [(_NO_LABELS, status["ready"])])
    for state, text in (
        ("live", "Whether the loops of a subsystem make progress"),
        ("ready", "Whether a subsystem can do its part of a call"),
    ):
        samples: list[_Sample] = [({"subsystem": name}, health[state]) for name, health in subsystems]
        yield _gauge(f"subsystem_{state}", text, samples)


def _connections(status: Mapping[str, Any]) -> Iterable[str]:
    relay, broker = status["relay"], status["broker"]
    ago_s = relay["acknowledged_s_ago"]
    received = broker["relay_received"]
    yield _counter("sessions", "Sessions that the relay has opened", [(_NO_LABELS, relay["sessions"])])
    yield _gauge(
        "heartbeat_acknowledged_seconds_ago",
        "Seconds since the relay acknowledged a heartbeat of this session",
        [] if ago_s is None else [(_NO_LABELS, ago_s)],
    )
    yield _gauge(
        "relay_receives_by_broker",
        "Whether the relay receives by the broker what this node publishes, where the relay names that",
        [] if received is None else [(_NO_LABELS, received in broker["published"])],
    )


def _gauge(name: str, text: str, samples: Iterable[_Sample]) -> str:
    return _family(f"edge_kubelet_{name}", "gauge", text, samples)


def _counter(name: str, text: str, samples: Iterable[_Sample]) -> str:
    return _family(f"edge_kubelet_{name}_total", "counter", text, samples)


def _family(name: str, type_: str, text: str, samples: Iterable[_Sample]) -> str:
    lines = [f"# HELP {name} {text}", f"# TYPE {name} {type_}"]
    for labels, value in samples:
        shown = ",".join(f'{label}="{word}"' for label, word in labels.items())
        lines.append(f"{name}{{{shown}}} {float(value)}" if shown else f"{name} {float(value)}")
    return "\n".join(lines) + "\n"
