import json
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from relay.broker.server_config import AccessFiles, nats_config
from schemas.addresses import HostPort
from schemas.error_roots import OperatorError

SHIPPED = Path(__file__).parents[3] / "docs" / "brokers"
ACCESS = AccessFiles(Path("/b/server.pem"), Path("/b/server.key"), Path("/b/roots.pem"), "nats-users.conf")


@pytest.mark.parametrize("host", [str(IPv4Address(0)), "192.0.2.1", "::", "mqtt.example"])
def test_other_machines_never_reach_it_without_certificates(host: str) -> None:
    with pytest.raises(OperatorError, match="must have TLS and client certificates"):
        nats_config(HostPort(host, 8883), Path("/store"), None)
    config = nats_config(HostPort(host, 8883), Path("/store"), ACCESS)
    assert "verify_and_map: true" in config
    assert 'include "nats-users.conf"' in config


def test_on_loopback_it_has_no_tls_and_limits() -> None:
    config = nats_config(HostPort("127.0.0.1", 1883), Path("/store"), None)
    assert "tls" not in config
    for limit in ("max_memory_store: 67108864", "max_file_store: 1073741824", "reject_qos2_publish: true"):
        assert limit in config
    # What ships, for a broker that these programs do not start, has the same limits.
    for shipped in ("nats-server.conf", "nats-server-tls.conf"):
        lines = (SHIPPED / shipped).read_text("utf-8").splitlines()
        limits = [line for line in lines if line.startswith(("max_pending", "max_payload"))]
        assert len(limits) == 2
        assert set(limits) <= set(config.splitlines())
        assert {"  reject_qos2_publish: true", "  max_file_store: 1GB"} <= set(lines)
    # NATS' own protocol is on loopback alone, whatever MQTT is on.
    assert 'listen: "127.0.0.1:-1"' in config


def test_a_path_is_written_as_the_broker_reads_it() -> None:
    store = Path('/tmp/ö "x" \\ y')  # noqa: S108 - a path that is never opened
    config = nats_config(HostPort("127.0.0.1", 1883), store, None)
    written = next(line.partition(": ")[2] for line in config.splitlines() if "store_dir" in line)
    assert "ö" in written
    assert json.loads(written) == str(store)
