from pathlib import Path

import pytest

from kubelet.config import DaemonPlan, NodeConfig, default_state_dir
from schemas.addresses import AddressError, BrokerAddress
from schemas.manifest import MAX_TTL_MS

BROKER = BrokerAddress("127.0.0.1", 1883)


def test_a_manifest_outlives_several_heartbeats_unless_the_operator_says_otherwise() -> None:
    config = NodeConfig(BROKER, "https://relay.example")
    assert 3 * config.heartbeat_s * 1000 <= config.ttl_ms <= MAX_TTL_MS
    assert (config.heartbeat_s, config.ttl_ms) == (60.0, 900_000)


@pytest.mark.parametrize("relay_url", ["https://relay.example", "http://127.0.0.1:8700", "http://localhost"])
def test_a_relay_over_tls_or_on_this_machine_will_do(relay_url: str) -> None:
    assert NodeConfig(BROKER, relay_url).relay_url == relay_url


def test_a_relay_in_the_clear_is_refused_before_anything_starts() -> None:
    with pytest.raises(AddressError, match=r"http://relay\.example is not encrypted"):
        NodeConfig(BROKER, "http://relay.example")


def test_the_state_lies_where_its_owner_may_write() -> None:
    home = Path("/home/ada")
    assert default_state_dir(home, is_root=True) == Path("/var/lib/edge-kubelet")
    assert default_state_dir(home, is_root=False) == Path("/home/ada/.local/state/edge-kubelet")


PLAN = DaemonPlan(
    NodeConfig(BrokerAddress("mqtt.example", 8883, tls=True), "https://relay.example", 30.0, 120_000),
    Path("/state dir"),
    18701,
)


def test_a_plan_survives_the_command_line() -> None:
    assert DaemonPlan.from_json(PLAN.to_json()) == PLAN
