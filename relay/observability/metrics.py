"""What the relay counts, in Prometheus' terms. Must not have text from outside as the value of a label."""

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from schemas.health import Health


class HealthCollector(Collector):
    """Makes the samples of what ``health`` returns."""

    def __init__(self, health: Callable[[], Mapping[str, Health]]) -> None:
        self._health = health

    def describe(self) -> Iterable[Metric]:
        """Return no family: the parts whose health it is may not be assembled yet."""
        return ()

    def collect(self) -> Iterable[Metric]:
        """Yield whether each subsystem is live and ready, and whether calls can be made."""
        parts = self._health()
        live = GaugeMetricFamily(
            "edge_relay_subsystem_live",
            "Whether the loops of a subsystem make progress",
            labels=["subsystem"],
        )
        ready = GaugeMetricFamily(
            "edge_relay_subsystem_ready",
            "Whether a subsystem can do its part of a call",
            labels=["subsystem"],
        )
        for name, part in parts.items():
            live.add_metric([name], part.live)
            ready.add_metric([name], part.ready)
        yield live
        yield ready
        yield GaugeMetricFamily(
            "edge_relay_ready",
            "Whether calls can be made, as /readyz says",
            all(part.lets_calls_flow for part in parts.values()),
        )


_FAULT_SOURCES = frozenset({"relay", "asyncio", "uvicorn", "websockets", "starlette", "mcp", "paho"})
_LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class Metrics:
    """The counters of one relay."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        # Of every heartbeat and every call: a lookup takes longer than the increment, and labels are few.
        manifests = self._counter("manifests", "Manifests by verdict and way", "outcome", "reason", "way")
        self.manifests = cache(manifests.labels)
        self.identities = self._counter("identities", "Identities by verdict", "verdict")
        self.heartbeats = cache(self._counter("heartbeats", "Heartbeats by validity", "verdict").labels)
        self.broker_ends = self._counter(
            "broker_ends", "How often the relay's own broker has ended, and was started again"
        )
        self.broker_store_filled = self._gauge(
            "broker_store_filled_ratio",
            "Which share of the bytes is used that the relay's own broker may retain; 0 without one",
        )
        self.messages_dropped = self._counter("messages_dropped", "Broker messages dropped unread", "reason")
        self.sessions = self._counter("sessions", "Sessions of nodes by how they began or ended", "event")
        self.frames_dropped = self._counter("frames_dropped", "Frames of nodes that were dropped", "reason")
        self.one_way_frames = self._counter(
            "one_way_frames", "Frames without an answer, by type", "type", "event"
        )
        self.telemetry_samples = self._counter("telemetry_samples", "Samples of nodes by verdict", "verdict")
        self.telemetry_lost = self._counter("telemetry_lost", "Samples that slow readers lost")
        self.telemetry_streams = self._gauge("telemetry_streams", "Capabilities that are followed")
        self.telemetry_subscriptions = self._gauge("telemetry_subscriptions", "Subscribers of these")
        self._calls = self._counter(
            "calls", "Agents' calls by code, ok if they succeeded, and by the hop that failed", "code", "hop"
        )
        self.calls = cache(self._calls.labels)
        cluster_commands = self._counter(
            "cluster_commands", "Commands asked of other relays, or answered for them", "side", "outcome"
        )
        self.cluster_commands = cache(cluster_commands.labels)
        self.cluster_entries = self._counter(
            "cluster_entries",
            "Entries of what relays share, ledgers and presence, by outcome",
            "kind",
            "outcome",
        )
        self.cluster_ledger_filled = self._gauge(
            "cluster_ledger_filled_ratio",
            "Which share of the bytes is used that the stream of shared ledgers may have",
        )
        self.cluster_ca_requests = self._counter(
            "cluster_ca_requests",
            "Requests to the CA that were asked of another relay, or answered for one",
            "side",
            "outcome",
        )
        self.cluster_messages = self._counter(
            "cluster_messages",
            "One-way frames and questions that were asked of other relays, or answered for them",
            "kind",
            "side",
            "event",
        )
        self.canaries = self._counter(
            "canaries", "The relay's own echoes by code, and by the hop that failed", "code", "hop"
        )
        self.tokens_refused = self._counter("tokens_refused", "Agents' tokens refused", "reason")
        self.sign_ins = self._counter("sign_ins", "What people and their clients did to sign in", "event")
        self.issuer_fetches = self._counter(
            "issuer_fetches", "Fetches of the outside issuer's keys", "outcome"
        )
        self.requests_refused = self._counter("requests_refused", "HTTP requests refused", "reason")
        self.connections_refused = self._counter(
            "connections_refused", "Connections refused, by the limit that was reached", "reason"
        )
        self.requests_delayed = self._counter(
            "requests_delayed",
            "HTTP requests over the rate of their source: they waited, or got 429",
            "source",
        )
        self._faults = self._counter("faults", "Exceptions that were not expected, by where", "source")
        self.log_lines_lost = self._counter("log_lines_lost", "Log lines that could not be written")
        self.caller_requests = self._counter(
            "caller_tool_requests", "Requests of local agents for callers' tools, by how they ended", "code"
        )
        self.caller_sessions = self._gauge("caller_sessions", "Live sessions of callers with nodes")
        self.nodes_connected = self._gauge("nodes_connected", "Nodes with an open session")
        self.inventory_missing = self._gauge(
            "inventory_missing",
            "Nodes that announced themselves before, and of which the broker has not sent an announce since "
            "the relay subscribed to it",
        )
        self.call_seconds = Histogram(
            "edge_relay_call_seconds",
            "Time from the call gateway and back",
            registry=self._registry,
            buckets=_LATENCY_BUCKETS_S,
        )

    def outcomes(self) -> list[dict[str, Any]]:
        """Return how agents' calls ended: ``code``, ``hop`` and ``count``."""
        (family,) = self._calls.collect()
        return [
            {**sample.labels, "count": int(sample.value)}
            for sample in family.samples
            if sample.name.endswith("_total")
        ]

    def watch_certificates(self, names: Iterable[str], end_ms: Callable[[str], int]) -> None:
        """Show when the certificates ``names`` end, as ``end_ms`` returns it."""
        gauge = self._gauge(
            "certificate_expires_timestamp_seconds",
            "When a certificate of the relay ends, in seconds since the epoch; 0 if it cannot be read",
            "certificate",
        )
        for name in names:
            gauge.labels(name).set_function(lambda name=name: end_ms(name) / 1000)  # type: ignore[misc]

    def watch(self, name: str, text: str, value: Callable[[], float]) -> None:
        """Show a gauge of what ``value`` returns."""
        self._gauge(name, text).set_function(value)

    def watch_health(self, health: Callable[[], Mapping[str, Health]]) -> None:
        self._registry.register(HealthCollector(health))

    def fault(self, source: str) -> None:
        """Count a fault; ``source`` is the relay, or a library's name, which may be arbitrary text."""
        self._faults.labels(source if source in _FAULT_SOURCES else "other").inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"edge_relay_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"edge_relay_{name}", text, labels, registry=self._registry)
