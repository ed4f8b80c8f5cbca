"""What the daemon counts, in Prometheus' text format, made of its status.

Written here: Prometheus' own library would take a tenth of the daemon's memory. Label values are fixed words.
Must not count anything itself.
"""

from collections.abc import Iterable, Mapping
from typing import Any

Labels = Mapping[str, str]
_Sample = tuple[Labels, float]
_NO_LABELS: Labels = {}


def metrics_text(status: Mapping[str, Any]) -> str:
    """Return the metrics of ``status``, as ``DaemonStatus`` returns it."""
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
