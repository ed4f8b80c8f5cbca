from dataclasses import replace
from pathlib import Path

import pytest

from kubelet.config import NodeConfig, store
from kubelet.settings import BY_ENROLMENT, KUBELET, LOOPBACK_PORT, SOCKET, LoadedNodeSettings, load_settings
from schemas.addresses import BrokerAddress
from schemas.error_roots import ConfigError
from schemas.settings import RunOptionsError, Sources, forget_run_options, read_sources

ENROLLED = NodeConfig(
    BrokerAddress("mqtt.example", 1883), "http://relay.example", plain_allowed=True, own_root=True
)


def load(
    state: Path, toml: str = "", flags: dict[str, str] | None = None, **variables: str
) -> LoadedNodeSettings:
    file = state / "kubelet.toml"
    file.write_text(toml)
    file.chmod(0o600)
    return load_settings(read_sources(KUBELET, flags or {}, file, variables), state)


def test_a_node_that_is_enrolled_needs_no_settings(tmp_path: Path) -> None:
    store(ENROLLED, tmp_path)
    loaded = load(tmp_path)
    assert loaded.config() == ENROLLED
    assert loaded.settings.given["relay"].source == f"enrolled, in {tmp_path}/kubelet.json"


@pytest.mark.parametrize(
    "relays",
    [
        'relay = ["https://relay.example", "https://192.0.2.2", "wss://relay.example:443/"]',
        'relay = "https://relay.example,https://192.0.2.2"',
    ],
)
def test_the_first_relay_is_the_audience_and_each_is_reached_once(tmp_path: Path, relays: str) -> None:
    config = load(tmp_path, f"{relays}\nno_broker = true").config()
    assert (config.relay_url, config.other_relays) == ("https://relay.example", ("https://192.0.2.2",))


def test_other_relays_are_enrolled(tmp_path: Path) -> None:
    several = NodeConfig(None, "https://relay.example", other_relays=("https://192.0.2.2",))
    store(several, tmp_path)
    assert load(tmp_path).config() == several


def test_that_a_relay_has_no_broker_is_enrolled_and_overridden_as_a_broker_is(tmp_path: Path) -> None:
    without = NodeConfig(None, "https://relay.example")
    broker = BrokerAddress("127.0.0.1", 1)
    assert load(tmp_path, 'relay = "https://relay.example"\nno_broker = true').config() == without
    store(without, tmp_path)
    assert load(tmp_path).config() == without
    assert load(tmp_path, 'broker = "127.0.0.1:1"').config().broker == broker
    store(ENROLLED, tmp_path)
    assert load(tmp_path, flags={"no_broker": "true"}).config().broker is None


def test_every_setting_of_the_file_reaches_the_daemon(tmp_path: Path) -> None:
    store(ENROLLED, tmp_path)
    loaded = load(
        tmp_path,
        """
        state_dir = "STATE"
        relay = "https://other.example"
        broker = "mqtts://other.example"
        loopback_port = 0
        heartbeat = "30s"
        ttl = "1h30m"
        socket = "/run/a.sock"
        insecure_plain_transports = false
        """.replace("STATE", str(tmp_path)),
    )
    assert loaded.config() == NodeConfig(
        BrokerAddress("other.example", 8883, tls=True),
        "https://other.example",
        heartbeat_s=30.0,
        ttl_ms=5_400_000,
        own_root=True,
    )
    assert (loaded.settings[LOOPBACK_PORT], loaded.settings.get(SOCKET)) == (0, Path("/run/a.sock"))


def test_the_environment_and_then_the_flags_come_before_the_file(tmp_path: Path) -> None:
    store(ENROLLED, tmp_path)
    loaded = load(tmp_path, 'ttl = "1h"\nheartbeat = "2m"', {"ttl": "3h"}, KUBELET_TTL="2h")
    assert (loaded.config().ttl_ms, loaded.config().heartbeat_s) == (3 * 3_600_000, 120.0)


@pytest.mark.parametrize(
    ("toml", "problem"),
    [
        ("", "enrol first"),
        ("relay = []", "enrol first"),
        (
            'relay = ["https://relay.example", "http://127.0.0.1:1"]\nno_broker = true',
            "all https, or all http",
        ),
        (
            f"relay = {[f'https://relay-{number}.example' for number in range(65)]}\nno_broker = true",
            "^65 relays are named, and a node takes 64 at most: ",
        ),
        ('relay = "https://relay.example"', "--broker or --no-broker"),
        ('relay = "https://relay.example"\nbroker = "127.0.0.1:1"\nno_broker = true', "exclude each other"),
        ('relay = "http://relay.example"\nbroker = "127.0.0.1:1"', "is not encrypted"),
        ('relay = "https://relay.example"\nbroker = "127.0.0.1:1"\nttl = "1m"', "two heartbeats"),
    ],
)
def test_settings_of_which_no_node_can_be_made_are_one_problem(
    tmp_path: Path, toml: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        load(tmp_path, toml).config()


def test_what_a_start_was_told_holds_until_another_start_or_an_enrolment_says_otherwise(
    tmp_path: Path,
) -> None:
    store(ENROLLED, tmp_path)
    flags = {
        "relay": "https://other.example",
        "no_broker": "true",
        "kinds": "acme.uptime",
        "loopback_port": "0",
        "socket": "/run/agents.sock",
        "heartbeat": "30s",
        "ttl": "20m",
        "log_level": "error",
        "otlp": "https://collector.example",
        "insecure_plain_transports": "false",
    }
    assert flags.keys() | {"broker", "state_dir"} == {setting.name for setting in KUBELET.options}
    first = load(tmp_path, flags=flags)
    assert first.keep_told(sources_of(flags)) == []
    again = load(tmp_path)
    assert (again.config(), again.settings.get(SOCKET)) == (first.config(), first.settings.get(SOCKET))
    assert again.settings[LOOPBACK_PORT] == 0
    named = {"broker": "mqtts://mqtt.example", "ttl": "15m"}
    assert load(tmp_path, flags=named).keep_told(sources_of(named)) == [
        "--no-broker was true",
        "--ttl was 20m",
    ]
    assert load(tmp_path).config().broker == BrokerAddress("mqtt.example", 8883, tls=True)
    forget_run_options(tmp_path, BY_ENROLMENT)
    enrolled = load(tmp_path).config()
    assert (enrolled.broker, enrolled.relay_url) == (ENROLLED.broker, ENROLLED.relay_url)
    assert enrolled.kinds == ("acme.uptime",)


def test_a_start_without_the_file_that_an_earlier_one_was_told_is_refused(tmp_path: Path) -> None:
    store(ENROLLED, tmp_path)
    file = tmp_path / "named.toml"
    assert load(tmp_path).keep_told(sources_of({}, file)) == []
    told = load(tmp_path).told
    assert told is not None
    with pytest.raises(ConfigError, match=r"told --config .*named\.toml, and this one reads no file"):
        told.check_file(sources_of({}))
    for read in (sources_of({}, file), replace(sources_of({}), file=file)):
        told.check_file(read)
    replaced = load(tmp_path).keep_told(sources_of({}, tmp_path / "other.toml"))
    assert replaced == [f"--config was {file}"]


def test_a_damaged_file_of_what_was_told_is_named(tmp_path: Path) -> None:
    for text in ("[", '{"ttl": 1}', '{"teapot": "1"}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(RunOptionsError, match=r"run\.json is damaged: remove it"):
            load(tmp_path)
    forget_run_options(tmp_path, BY_ENROLMENT)


def sources_of(flags: dict[str, str], file: Path | None = None) -> Sources:
    return Sources(KUBELET.table, flags, file, file, (), ())
