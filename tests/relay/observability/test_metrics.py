import pytest
from prometheus_client.parser import text_string_to_metric_families

from relay.observability.metrics import Metrics
from tests.fakes.hub import counted


def test_every_name_says_whose_it_is() -> None:
    families = list(text_string_to_metric_families(Metrics().render().decode()))
    assert len(families) > 10
    assert all(family.name.startswith("edge_relay_") for family in families)
    assert all(family.documentation for family in families)


def test_two_relays_in_one_process_count_apart() -> None:
    one, other = Metrics(), Metrics()
    one.calls("ok", "").inc()
    assert (counted(one, "calls_total", code="ok"), counted(other, "calls_total", code="ok")) == (1, 0)


def test_a_gauge_and_a_histogram_are_rendered_too() -> None:
    metrics = Metrics()
    metrics.nodes_connected.inc()
    metrics.call_seconds.observe(0.03)
    assert counted(metrics, "nodes_connected") == 1
    assert counted(metrics, "call_seconds_count") == 1
    assert counted(metrics, "call_seconds_bucket", le="0.025") == 0
    assert counted(metrics, "call_seconds_bucket", le="0.05") == 1


@pytest.mark.parametrize("label", ['"', "\\", "\n"])
def test_a_label_cannot_break_the_format(label: str) -> None:
    metrics = Metrics()
    metrics.calls(label, "relay").inc()
    assert counted(metrics, "calls_total", code=label) == 1
