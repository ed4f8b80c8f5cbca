import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from relay.settings.broker import BROKER, NODE_BROKER
from relay.settings.config import AuditKeep, ClusterConfig, ClusterServer, RelayConfig, StateFiles, TlsFiles
from relay.settings.kept import KeptSettings, write_kept
from relay.settings.table import (
    CLUSTER_SETTINGS,
    PUBLIC_URL,
    RELAY,
    LoadedRelaySettings,
    account_name,
    audit_keep,
    cluster_of,
    fleet_name,
    load_settings,
    local_listener,
    parse_server,
)
from schemas.addresses import AddressError, BrokerAddress, HostPort
from schemas.error_roots import ConfigError, OperatorError
from schemas.settings import Form, Given, Settings, Sources, read_sources


def load(
    state: Path, toml: str = "", flags: dict[str, str] | None = None, **variables: str
) -> LoadedRelaySettings:
    file = state / "relay.toml"
    file.write_text(toml)
    file.chmod(0o600)
    return load_settings(read_sources(RELAY, flags or {}, file, variables), state)


def test_the_broker_is_all_that_a_relay_has_to_be_told(tmp_path: Path) -> None:
    config = load(tmp_path, 'broker = "127.0.0.1:1883"').config()
    usual = RelayConfig(
        BrokerAddress("127.0.0.1", 1883),
        "http://127.0.0.1:8700",
        HostPort("127.0.0.1", 8700),
        config.state,
    )
    assert config == usual
    assert config.state.root == tmp_path


TOLD = {
    "broker": "mqtts://mqtt.example",
    "node_broker": "mqtts://nodes.example",
    "public_url": "https://relay.example",
    "listen": "0.0.0.0:8443",
    "tls_certificate": "/tls/relay.pem",
    "tls_key": "/tls/relay.key",
    "broker_root": "/tls/root.pem",
    "broker_directory": "/broker",
    "broker_pid_file": "/run/nats.pid",
    "cluster": "nats://a.example,tls://127.0.0.1:4333",
    "cluster_credentials": "/cluster/relay.pem",
    "cluster_root": "/cluster/root.pem",
    "cluster_fleet": "north",
    "cluster_account": "north_relays",
    "jwks": "https://issuer.example/keys",
    "issuer": "https://issuer.example",
    "agent_rps": "10",
    "agent_concurrency": "2",
    "caller_timeout": "1m30s",
    "audit_keep": "90d,10GiB",
    "audit_sync": "always",
    "envelope": "shadow",
    "default_view": "kinds",
    "kinds": "acme.relay_board",
    "log_level": "error",
    "otlp": "https://collector.example",
    "metrics_listen": "/run/metrics.sock",
    "trusted_proxies": "192.0.2.0/24,::1",
    "sign_in": "false",
    "fetch_client_documents": "false",
    "insecure_plain_transports": "true",
}


def as_toml(texts: Mapping[str, str]) -> str:
    """Return the lines of a file that says the same as these options."""
    forms = {setting.name: setting.form for setting in RELAY.table}

    def value(name: str, text: str) -> str:
        if forms[name] in {Form.NUMBER, Form.FLAG}:
            return text
        return json.dumps(text.split(",") if forms[name] is Form.LIST else text)

    return "".join(f"{name} = {value(name, text)}\n" for name, text in texts.items())


def test_every_setting_of_the_file_reaches_the_configuration(tmp_path: Path) -> None:
    oidc = """
        ["people.oidc"]
        issuer = "https://id.example"
        client_id = "edge-relay"
        secret_file = "/etc/oidc.secret"
        allow = ["groups=hub:operator:*"]
        """
    config = load(tmp_path, as_toml(TOLD | {"state_dir": "/state"}) + oidc).config()
    usual = load(tmp_path, 'broker = "127.0.0.1:1883"').config()
    same = {
        name for name in RelayConfig.__dataclass_fields__ if getattr(config, name) == getattr(usual, name)
    }
    assert same == {"own_root", "own_broker"}
    assert (
        load(tmp_path, 'broker="127.0.0.1:1"\npublic_url="https://a.example"\ntls_own=true').config().own_root
    )
    assert config.tls == TlsFiles(Path("/tls/relay.pem"), Path("/tls/relay.key"))
    assert (config.per_agent.rate, config.per_agent.burst, config.per_agent.concurrency) == (10, 30, 2)
    assert config.caller_timeout_s == 90
    assert config.audit_keep == AuditKeep(90 * 86_400_000, 10 << 30)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not an age"),
        ("90", "is not an age"),
        ("12h", "is not an age"),
        ("-1d", "is not an age"),
        ("10GB", "is not an age"),
        ("10gib,", "is not an age"),
        ("1\u0660d", "is not an age"),
        ("90d\n", "is not an age"),
        ("9" * 20 + "GiB", "is not an age"),
        ("90d,30d", "two ages"),
        ("1GiB,2GiB", "two ages or two sizes"),
        ("15MiB", "is less than 16MiB"),
        ("0GiB", "is less than 16MiB"),
    ],
)
def test_what_the_audit_cannot_keep_is_refused_with_what_to_write(text: str, says: str) -> None:
    with pytest.raises(OperatorError, match=says):
        audit_keep(text)


def test_what_is_kept_counts_least(tmp_path: Path) -> None:
    state = StateFiles(tmp_path)
    kept = KeptSettings("https://kept.example", "127.0.0.1:1", "127.0.0.1:2", "acme")
    write_kept(state.settings, kept)
    loaded = load(tmp_path)
    assert loaded.to_keep(loaded.broker()) == kept
    assert loaded.settings.given["broker"].source == f"kept in {state.settings}"
    newer = load(tmp_path, 'public_url = "https://file.example"', RELAY_BROKER="127.0.0.1:3")
    assert newer.settings[PUBLIC_URL] == "https://file.example"
    # The way of nodes to the kept broker is no way to this one.
    assert (newer.settings.get(BROKER), newer.settings.get(NODE_BROKER)) == (
        BrokerAddress("127.0.0.1", 3),
        None,
    )
    assert newer.to_keep(newer.broker()) == KeptSettings("https://file.example", "127.0.0.1:3", None, "acme")


def start(state: Path, toml: str = "", flags: dict[str, str] | None = None) -> LoadedRelaySettings:
    """Load and keep as `relay run` does; return what a start finds that is told nothing more."""
    loaded = load(state, toml, flags)
    write_kept(loaded.state.settings, loaded.to_keep(loaded.broker()))
    loaded.keep_told(Sources(RELAY.table, flags or {}, None, None, (), ()))
    return load(state, toml)


def test_every_option_that_a_start_was_told_holds_at_a_start_that_is_told_nothing(tmp_path: Path) -> None:
    alternatives = {"state_dir", "tls_own", "no_broker", "broker_listen"}
    assert TOLD.keys() | alternatives == {setting.name for setting in RELAY.options}
    first = load(tmp_path, flags=TOLD).config()
    assert replace(start(tmp_path, flags=TOLD).config(), state=first.state) == first


def test_what_a_later_start_is_told_replaces_what_was_told_and_its_alternatives(tmp_path: Path) -> None:
    start(tmp_path, flags={"listen": "0.0.0.0:8700", "tls_own": "true", "public_url": "https://a.example"})
    again = start(tmp_path)
    assert (again.config().listen, again.config().own_root) == (HostPort("0.0.0.0", 8700), True)  # noqa: S104
    assert again.settings.given["listen"].source == f"kept in {tmp_path / 'run.json'}"
    # The operator's file counts more, and another way of TLS is no contradiction.
    elsewhere = load(
        tmp_path, 'listen = "127.0.0.1:1"\ntls_certificate = "/c.pem"\ntls_key = "/k.pem"'
    ).config()
    assert (elsewhere.listen, elsewhere.own_root) == (HostPort("127.0.0.1", 1), False)
    assert elsewhere.tls == TlsFiles(Path("/c.pem"), Path("/k.pem"))
    other = start(tmp_path, flags={"tls_own": "false"})
    assert (other.settings.given["tls_own"].text, other.settings.given["listen"].text) == (
        "false",
        "0.0.0.0:8700",
    )


def test_that_there_is_no_broker_is_kept_until_one_is_named(tmp_path: Path) -> None:
    start(tmp_path, flags={"broker": "127.0.0.1:1883", "broker_root": "/root.pem"})
    none = start(tmp_path, flags={"no_broker": "true"})
    assert (none.config().broker, none.config().broker_root) == (None, None)
    assert "broker" not in none.settings.given
    again = start(tmp_path, flags={"broker": "127.0.0.1:1884"})
    assert again.config().broker == BrokerAddress("127.0.0.1", 1884)


def test_the_relays_own_broker_is_kept_and_shown_and_gives_way_to_what_is_named(tmp_path: Path) -> None:
    state = StateFiles(tmp_path)
    first = load(tmp_path)
    choice = first.broker(lambda host, port: HostPort(host, port + 1))
    assert first.config(choice).own_broker == BrokerAddress("127.0.0.1", 1884)
    write_kept(state.settings, first.to_keep(choice))
    kept = load(tmp_path)
    assert kept.settings.given["broker_listen"].text == "mqtt://127.0.0.1:1884"
    assert kept.settings.given["broker_listen"].source == f"kept in {state.settings}"
    # Without looking for a port: checking the settings of a relay that runs changes nothing.
    assert kept.config().own_broker == kept.config().broker == BrokerAddress("127.0.0.1", 1884)
    named = load(tmp_path, 'broker = "127.0.0.1:3"')
    assert named.config().own_broker is None
    assert named.to_keep(named.broker()) == KeptSettings("http://127.0.0.1:8700", "127.0.0.1:3")
    without = load(tmp_path, "no_broker = true")
    assert (without.config().broker, without.config().node_broker) == (None, None)
    assert without.to_keep(without.broker()) == kept.to_keep(kept.broker())


def test_options_of_a_broker_that_is_not_named_are_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--broker-pid-file is for a broker of yours"):
        load(tmp_path, 'broker_pid_file = "/run/nats.pid"').config()


def test_a_flag_of_the_command_line_can_take_back_one_of_the_file(tmp_path: Path) -> None:
    toml = 'broker = "127.0.0.1:1883"\npublic_url = "https://relay.example"\ntls_own = true'
    assert load(tmp_path, toml).config().tls == StateFiles(tmp_path).own_tls
    assert load(tmp_path, toml, {"tls_own": "false"}).config().tls is None


def test_settings_that_contradict_each_other_are_one_problem(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--jwks and --issuer go together") as caught:
        load(tmp_path, 'broker = "127.0.0.1:1883"\nissuer = "https://issuer.example"').config()
    assert len(caught.value.problems) == 1


def test_the_table_names_no_secret() -> None:
    words = {word for setting in RELAY.table for word in setting.name.split("_")}
    assert words.isdisjoint({"token", "password", "passphrase", "secret"})


def settings(**texts: str) -> Settings:
    return Settings(CLUSTER_SETTINGS, [{name: Given(text, "a test") for name, text in texts.items()}])


@pytest.mark.parametrize(
    ("text", "server"),
    [
        ("nats://127.0.0.1", ClusterServer("127.0.0.1", 4222, tls=False)),
        ("nats://localhost:4333", ClusterServer("localhost", 4333, tls=False)),
        ("nats://[::1]", ClusterServer("::1", 4222, tls=False)),
        ("tls://127.0.0.1:4222", ClusterServer("127.0.0.1", 4222, tls=True)),
        # Between machines nothing is in the clear.
        ("nats://a.example", ClusterServer("a.example", 4222, tls=True)),
        ("nats://10.0.0.1:1", ClusterServer("10.0.0.1", 1, tls=True)),
    ],
)
def test_a_server_is_a_host_and_a_port(text: str, server: ClusterServer) -> None:
    assert parse_server(text) == server


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a.example",
        "http://a.example",
        "nats://",
        "nats://a:0",
        "nats://a:70000",
        "nats://a:b",
        "nats://user:secret@a.example",
        "nats://a/path",
    ],
)
def test_what_is_no_server_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(AddressError) as refused:
        parse_server(text)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("text", ["", "Main", "a.b", "a*", ">", "-a", "a-", "a" * 33, "a b"])
def test_what_cannot_be_a_part_of_a_subject_names_no_fleet(text: str) -> None:
    with pytest.raises(OperatorError):
        fleet_name(text)


@pytest.mark.parametrize("text", ["", "$G", "$SYS", "a b", "a.b", "a\n", "-a", "é", "a" * 129])
def test_an_account_that_every_server_has_and_what_is_no_name_is_none_of_a_fleet(text: str) -> None:
    with pytest.raises(OperatorError):
        account_name(text)


def test_without_a_server_there_is_no_cluster() -> None:
    assert cluster_of(settings()) is None


def test_the_servers_the_credentials_and_the_fleet_make_a_cluster() -> None:
    given = settings(cluster="nats://127.0.0.1,tls://b:1", cluster_credentials="/seed", cluster_fleet="north")
    servers = (ClusterServer("127.0.0.1", 4222, tls=False), ClusterServer("b", 1, tls=True))
    assert cluster_of(given) == ClusterConfig(servers, Path("/seed"), None, "north", "edge_north")


@pytest.mark.parametrize("alone", [{"cluster": "nats://a"}, {"cluster_credentials": "/seed"}])
def test_servers_and_credentials_go_together(alone: dict[str, str]) -> None:
    with pytest.raises(OperatorError, match="go together"):
        cluster_of(settings(**alone))


@pytest.mark.parametrize(
    ("alone", "named"),
    [
        ({"cluster_root": "/root.pem"}, "--cluster-root"),
        ({"cluster_fleet": "north"}, "--cluster-fleet"),
        ({"cluster_account": "x"}, "--cluster-account"),
    ],
)
def test_what_is_said_of_a_cluster_without_one_is_refused(alone: dict[str, str], named: str) -> None:
    with pytest.raises(OperatorError, match=f"^{named} is of no use without --cluster "):
        cluster_of(settings(**alone))


@pytest.mark.parametrize(
    "text", ["0.0.0.0:8702", "relay.example:8702", "8702", "", "metrics.sock", "/" + "x" * 107]
)
def test_metrics_are_served_to_this_machine_alone(text: str) -> None:
    with pytest.raises(OperatorError):
        local_listener(text)


def test_metrics_have_an_address_of_loopback_or_a_unix_socket() -> None:
    assert local_listener("[::1]:8702") == HostPort("::1", 8702)
    assert local_listener("/run/metrics.sock") == Path("/run/metrics.sock")


def test_the_public_listener_has_metrics_only_where_it_serves_tls_and_no_other_place_is_named(
    tmp_path: Path,
) -> None:
    tls = {"broker": "127.0.0.1:1883", "tls_own": "true", "public_url": "https://relay.example"}
    assert load(tmp_path, flags=tls).config().old_metrics
    assert not load(tmp_path, flags={**tls, "metrics_listen": "127.0.0.1:8702"}).config().old_metrics
    assert not load(tmp_path, flags={**tls, "trusted_proxies": "192.0.2.1"}).config().old_metrics
    assert not load(tmp_path, flags={"broker": "127.0.0.1:1883"}).config().old_metrics


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("proxy.example", "'proxy.example' is not an address or a network"),
        ("192.0.2.1/24", "'192.0.2.1/24' is not an address or a network"),
        ("192.0.2.0/33", "'192.0.2.0/33' is not an address or a network"),
        ("192.0.2.1:8700", "'192.0.2.1:8700' is not an address or a network"),
        ("192.0.2.1,", "'' is not an address or a network"),
        ("192.0.2.1, 192.0.2.1", "names '192.0.2.1' twice"),
        ("0.0.0.0/0", "0.0.0.0/0 has every address"),
        ("::/0", "::/0 has every address"),
        ("\x1b[31m", r"'\x1b[31m' is not an address or a network"),
        ("1" * 1000, "' is not an address or a network"),
    ],
)
def test_what_is_no_proxy_is_an_error_that_says_so(tmp_path: Path, text: str, wrong: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, flags={"broker": "127.0.0.1:1883", "trusted_proxies": text})
    (line,) = caught.value.problems
    assert wrong in line
    assert "trusted_proxies" in line or "--trusted-proxies" in line
    assert len(line) < 200


def test_a_proxy_of_this_machine_is_in_front_where_the_public_url_is_elsewhere(tmp_path: Path) -> None:
    told = {"broker": "127.0.0.1:1883", "public_url": "https://relay.example"}
    assert load(tmp_path, flags=told).config().unnamed_proxy
    assert not load(tmp_path, flags={**told, "trusted_proxies": "127.0.0.1"}).config().unnamed_proxy
    assert not load(tmp_path, flags={"broker": "127.0.0.1:1883"}).config().unnamed_proxy
    listens = {**told, "tls_own": "true", "listen": "0.0.0.0:8700"}
    assert not load(tmp_path, flags=listens).config().unnamed_proxy
