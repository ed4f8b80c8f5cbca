import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubelet.config import (
    DaemonPlan,
    NodeConfig,
    StoredConfigError,
    default_socket,
    own_state_dir,
    read_stored,
    store,
)
from schemas.addresses import MOST_RELAYS, AddressError, BrokerAddress
from schemas.manifest import MAX_TTL_MS

BROKER = BrokerAddress("127.0.0.1", 1883)
FLEET = ("https://relay.example", "https://192.0.2.2", "https://relay.example:8700")


def test_a_manifest_outlives_several_heartbeats_unless_the_operator_says_otherwise() -> None:
    config = NodeConfig(BROKER, "https://relay.example")
    assert 3 * config.heartbeat_s * 1000 <= config.ttl_ms <= MAX_TTL_MS
    assert (config.heartbeat_s, config.ttl_ms) == (60.0, 900_000)


def test_a_relay_in_the_clear_is_refused_before_anything_starts() -> None:
    with pytest.raises(AddressError, match=r"http://relay\.example is not encrypted"):
        NodeConfig(BROKER, "http://relay.example")


def test_a_users_own_state_lies_in_the_home() -> None:
    assert own_state_dir(Path("/home/ada")) == Path("/home/ada/.local/state/edge-kubelet")
    assert own_state_dir(None) is None


PLAN = DaemonPlan(
    NodeConfig(BrokerAddress("mqtt.example", 8883, tls=True), "https://relay.example", 30.0, 120_000),
    Path("/state dir"),
    18701,
    Path("/run/socket dir/relay.sock"),
    998,
)


@pytest.mark.parametrize(
    "plan",
    [PLAN, replace(PLAN, socket_group=None), replace(PLAN, socket=None)],
    ids=["a group", "no group", "no socket"],
)
def test_a_plan_survives_the_command_line(plan: DaemonPlan) -> None:
    assert DaemonPlan.from_json(plan.to_json()) == plan


def test_local_agents_find_the_service_in_its_runtime_directory_and_others_beside_their_state() -> None:
    assert default_socket(Path("/var/lib/edge-kubelet")) == Path("/run/edge-kubelet/relay.sock")
    assert default_socket(Path("/home/ada/state")) == Path("/home/ada/state/relay.sock")


STORED: dict[str, Any] = {
    "relay": "https://relay.example",
    "broker": "mqtts://mqtt.example:8883",
    "own_root": True,
    "insecure_plain_transports": False,
}


@pytest.mark.parametrize(
    "config",
    [
        NodeConfig(BrokerAddress("mqtt.example", 8883, tls=True), "https://relay.example", own_root=True),
        NodeConfig(BROKER, "http://127.0.0.1:8700"),
        NodeConfig(None, "https://relay.example", own_root=True),
        NodeConfig(BrokerAddress("::1", 1883), "http://[::1]:8700"),
        NodeConfig(BrokerAddress("mqtt.example", 1883), "http://relay.example", plain_allowed=True),
        NodeConfig(BROKER, FLEET[0], other_relays=FLEET[1:]),
    ],
)
def test_what_enrolment_stores_is_read_again(tmp_path: Path, config: NodeConfig) -> None:
    store(config, tmp_path)
    assert read_stored(tmp_path) == config
    assert [path.name for path in tmp_path.iterdir()] == ["kubelet.json"]


def test_where_nothing_was_stored_there_is_nothing(tmp_path: Path) -> None:
    assert read_stored(tmp_path) is None
    assert read_stored(tmp_path / "not there") is None


def test_as_many_relays_as_a_node_takes_are_read_again_however_long_their_names_are(tmp_path: Path) -> None:
    names = [f"{number:02}" + "a" * 61 + 3 * ("." + "b" * 62) for number in range(MOST_RELAYS)]
    first, *others = [f"https://{name}:65535" for name in names]
    config = NodeConfig(BROKER, first, other_relays=tuple(others))
    store(config, tmp_path)
    assert read_stored(tmp_path) == config
    with pytest.raises(AddressError, match=f"^{MOST_RELAYS + 1} relays are named"):
        replace(config, other_relays=(*others, "https://one-more.example"))


@pytest.mark.parametrize("other", ["http://127.0.0.1:8700", "http://relay.example"])
def test_all_relays_of_a_fleet_are_over_tls_or_none(other: str) -> None:
    with pytest.raises(AddressError):
        NodeConfig(BROKER, "https://relay.example", other_relays=(other,))


def test_no_other_relay_is_reached_in_the_clear() -> None:
    with pytest.raises(AddressError, match="not encrypted"):
        NodeConfig(BROKER, "http://127.0.0.1:8700", other_relays=("http://192.0.2.2:8700",))


def test_a_person_can_read_and_edit_what_is_stored(tmp_path: Path) -> None:
    (tmp_path / "kubelet.json").write_text(json.dumps(STORED))
    stored = read_stored(tmp_path)
    assert stored is not None
    # A version that knows more kinds enables none of them.
    assert stored.kinds == ()
    store(stored, tmp_path)
    assert json.loads((tmp_path / "kubelet.json").read_text()) == STORED


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"relay": "http://relay.example"}, id="a relay in the clear"),
        pytest.param({"broker": "mqtt.example:1883"}, id="a broker in the clear"),
        pytest.param({"relay": "relay.example"}, id="no relay"),
        pytest.param({"relay": 1}, id="a number for a relay"),
        pytest.param({"other_relays": "https://relay.example"}, id="a text for other relays"),
        pytest.param({"other_relays": [1]}, id="a number for another relay"),
        pytest.param({"other_relays": ["http://192.0.2.2"]}, id="another relay in the clear"),
        pytest.param({"broker": 1}, id="a number for a broker"),
        pytest.param({"insecure_plain_transports": "false"}, id="a word for a flag"),
        pytest.param({"own_root": 0}, id="a number for a flag"),
    ],
)
def test_what_was_edited_into_what_may_not_be_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    (tmp_path / "kubelet.json").write_text(json.dumps({**STORED, **change}))
    with pytest.raises(StoredConfigError, match=r"kubelet\.json"):
        read_stored(tmp_path)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'"text"', b"{}", b"\xff", b" " * 5000, json.dumps(STORED).encode() + b"{}"],
    ids=["empty", "torn", "a list", "a word", "no member", "no text", "endless", "two"],
)
def test_a_stored_config_that_is_damaged_says_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "kubelet.json").write_bytes(content)
    with pytest.raises(StoredConfigError, match="is damaged: remove it, and say --broker and --relay"):
        read_stored(tmp_path)


@pytest.mark.parametrize("name", sorted(STORED))
def test_a_stored_config_that_lacks_a_member_is_damaged(tmp_path: Path, name: str) -> None:
    lacking = {member: value for member, value in STORED.items() if member != name}
    (tmp_path / "kubelet.json").write_text(json.dumps(lacking))
    with pytest.raises(StoredConfigError, match="is damaged"):
        read_stored(tmp_path)
