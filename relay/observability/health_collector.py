"""The health of the relay's subsystems in Prometheus' terms, made when it is read.

Must not judge the health of a part: the part does.
"""

from collections.abc import Callable, Iterable, Mapping

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
