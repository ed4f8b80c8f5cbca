from typing import Any

from relay.mcp_api.views.find_nodes import Measurements

SAMPLE: dict[str, Any] = {"ts_ms": 1, "uptime_s": 2, "node_id": "n"}


def test_the_newest_measurement_is_kept_briefly() -> None:
    measurements = Measurements()
    cpu = {"cores": 4, "usage_pct": 1.0, "per_core_pct": [1.0] * 4096}
    measurements.keep("a", {**SAMPLE, "cpu": cpu, "disk": [{"mount": "/"}] * 64})
    assert measurements.last("a") == {"ts_ms": 1, "uptime_s": 2, "cpu": {"usage_pct": 1.0}}
    measurements.keep("a", {**SAMPLE, "ts_ms": 3, "load": {"one": 0.5, "five": 1, "fifteen": 1}})
    assert measurements.last("a") == {"ts_ms": 3, "uptime_s": 2, "load": {"one": 0.5}}
    assert measurements.last("b") is None


def test_a_sample_of_other_parts_displaces_nothing() -> None:
    measurements = Measurements()
    measurements.keep("a", {**SAMPLE, "load": {"one": 0.5}})
    measurements.keep("a", {**SAMPLE, "ts_ms": 9, "disk": []})
    assert measurements.last("a") == {"ts_ms": 1, "uptime_s": 2, "load": {"one": 0.5}}


def test_of_too_many_nodes_those_measured_last_are_kept() -> None:
    measurements = Measurements(max_nodes=2)
    for node_id in ("a", "b", "a", "c"):
        measurements.keep(node_id, {**SAMPLE, "load": {"one": 0.5}})
    assert [measurements.last(node_id) is not None for node_id in ("a", "b", "c")] == [True, False, True]
