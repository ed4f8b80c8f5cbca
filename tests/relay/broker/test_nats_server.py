"""nats-server as a program: where it is found, its ports, and its configuration."""

import json
import os
import socket
import subprocess
import sys
from ipaddress import IPv4Address
from pathlib import Path

import pytest

from relay.broker.nats_server import (
    AccessFiles,
    NoBrokerPortError,
    ProgramError,
    find_nats_server,
    first_free,
    is_free,
    listening,
    nats_config,
)
from schemas.addresses import HostPort
from schemas.error_roots import OperatorError
from tests.fakes.ports import unused_port


def on_path(monkeypatch: pytest.MonkeyPatch, directory: Path, script: str | None) -> Path:
    """Put a program called nats-server onto a PATH that has nothing else; None: an empty PATH."""
    program = directory / "nats-server"
    if script is not None:
        program.write_text(f"#!/bin/sh\n{script}\n", "ascii")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory))
    return program


@pytest.mark.integration
def test_the_program_on_path_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = on_path(monkeypatch, tmp_path, "echo nats-server: v2.15.1")
    assert find_nats_server() == program


@pytest.mark.integration
def test_without_one_on_path_the_extras_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, None)
    found = find_nats_server()
    assert found.is_absolute()
    assert os.access(found, os.X_OK)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("echo hello", "does not say that it is nats-server", id="another program"),
        pytest.param("echo 'not nats-server: v2.15.1'", "does not say", id="the name elsewhere"),
        pytest.param("exit 0", "does not say", id="no answer"),
        pytest.param(
            "echo 'fatal error: out of memory' >&2; exit 2", "status 2: fatal error: out", id="failed"
        ),
        pytest.param("kill -9 $$", "ended by signal 9: no output. Check .* memory", id="killed"),
        pytest.param(
            "echo nats-server: v2.15.0", r"is nats-server 2\.15\.0, older than 2\.15\.1", id="too old"
        ),
        pytest.param("/usr/bin/head -c 100000 /dev/zero", "does not say", id="no text"),
    ],
)
@pytest.mark.integration
def test_another_program_of_that_name_is_refused_and_nothing_else_is_taken_instead(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, reason: str
) -> None:
    program = on_path(monkeypatch, tmp_path, script)
    with pytest.raises(ProgramError, match=reason) as error:
        find_nats_server()
    assert str(error.value).startswith(str(program))
    assert "\n" not in str(error.value)


@pytest.mark.integration
def test_a_program_that_cannot_be_run_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = on_path(monkeypatch, tmp_path, "")
    program.write_bytes(b"\x7fELF")
    with pytest.raises(ProgramError, match="cannot be run"):
        find_nats_server()


@pytest.mark.integration
def test_a_program_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    on_path(monkeypatch, tmp_path, "exec /bin/sleep 60")
    monkeypatch.setattr("relay.broker.nats_server._TIMEOUT_S", 0.05)
    with pytest.raises(ProgramError, match="does not say"):
        find_nats_server()


@pytest.mark.integration
def test_a_port_that_is_free_is_taken() -> None:
    port = unused_port()
    assert is_free(HostPort("127.0.0.1", port))
    assert first_free("127.0.0.1", port) == HostPort("127.0.0.1", port)


@pytest.mark.integration
def test_of_a_port_that_is_in_use_the_next_free_one_is_taken() -> None:
    with socket.create_server(("127.0.0.1", unused_port())) as server:
        port = int(server.getsockname()[1])
        assert not is_free(HostPort("127.0.0.1", port))
        assert first_free("127.0.0.1", port).port > port


@pytest.mark.integration
def test_an_address_of_another_machine_is_an_error_that_names_the_option() -> None:
    with pytest.raises(NoBrokerPortError, match="--broker-listen"):
        first_free("192.0.2.1", 1883)


@pytest.mark.integration
def test_only_the_process_that_listens_does() -> None:
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1])"
    command = [sys.executable, "-P", "-u", "-c", f"{code}; sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        assert port in listening(other.pid)
        assert port not in listening(os.getpid())
        # The number of a connection's own end is no port that it listens on.
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert client.getsockname()[1] not in listening(os.getpid())
        other.communicate(b"", 10)
    assert port not in listening(other.pid)


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
