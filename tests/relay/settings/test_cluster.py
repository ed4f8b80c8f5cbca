from pathlib import Path

import pytest

from relay.settings.cluster import CLUSTER_SETTINGS, cluster_of, fleet_name, parse_server
from relay.settings.config import ClusterConfig, ClusterServer
from schemas.addresses import AddressError
from schemas.error_roots import OperatorError
from schemas.settings import Given, Settings


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


def test_without_a_server_there_is_no_cluster() -> None:
    assert cluster_of(settings()) is None


def test_the_servers_the_credentials_and_the_fleet_make_a_cluster() -> None:
    given = settings(cluster="nats://127.0.0.1,tls://b:1", cluster_credentials="/seed", cluster_fleet="north")
    servers = (ClusterServer("127.0.0.1", 4222, tls=False), ClusterServer("b", 1, tls=True))
    assert cluster_of(given) == ClusterConfig(servers, Path("/seed"), None, "north")


@pytest.mark.parametrize("alone", [{"cluster": "nats://a"}, {"cluster_credentials": "/seed"}])
def test_servers_and_credentials_go_together(alone: dict[str, str]) -> None:
    with pytest.raises(OperatorError, match="go together"):
        cluster_of(settings(**alone))


@pytest.mark.parametrize(
    ("alone", "named"),
    [({"cluster_root": "/root.pem"}, "--cluster-root"), ({"cluster_fleet": "north"}, "--cluster-fleet")],
)
def test_what_is_said_of_a_cluster_without_one_is_refused(alone: dict[str, str], named: str) -> None:
    with pytest.raises(OperatorError, match=f"^{named} is of no use without --cluster "):
        cluster_of(settings(**alone))
