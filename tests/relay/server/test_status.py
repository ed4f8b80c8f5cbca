"""What the relay's status holds, from the real parts of a relay that does not serve."""

import os
from pathlib import Path

from relay.pki.authority import CertificateAuthority
from relay.server.app import Relay
from relay.server.status import RelayStatus
from schemas.registry import SchemaRegistry
from tests.fakes.environment import config, fake_environment


async def test_the_status_has_every_member_that_the_commands_read(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    fake = fake_environment(config(tmp_path), registry)
    CertificateAuthority(tmp_path / "ca", fake.clock, os.urandom).create()
    relay = Relay(fake.environment)
    status = RelayStatus(
        environment=fake.environment,
        audit=relay.audit,
        broker=relay.broker,
        pki=relay.pki,
        fleet=relay.fleet,
        calls=relay.calls,
        cluster=relay.cluster,
        health=relay.health,
        settings=None,
    )()
    await relay.close()
    assert status.keys() == {
        *("program", "version", "now_ms", "pid", "uptime_s", "watchdog_s"),
        *("resident_bytes", "open_files", "max_open_files", "tasks"),
        *("ready", "subsystems", "public_url", "listen", "broker", "nodes", "ca", "cluster", "calls"),
        *("certificates", "audit_head"),
    }
    assert status["nodes"].keys() == {"known", "connected", "wrong_clocks", "silent"}
    assert status["broker"].keys() == {"url", "missing", "probe_node"}
    assert status["subsystems"].keys() >= {"audit", "broker", "clock", "calls", "revocations"}
