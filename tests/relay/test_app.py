import asyncio
import io
import os
import time
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest

from relay.app import bind, now_ms, run_relay
from relay.ca import AuthorityError, CertificateAuthority
from relay.config import RelayConfig, StateFiles
from schemas.addresses import BrokerAddress, HostPort
from tests.fakes.lines import LogLines

BOUND_S = 30


def config(state: Path, listen: HostPort, broker: BrokerAddress) -> RelayConfig:
    return RelayConfig(broker, f"http://{listen}", listen, StateFiles(state))


def test_the_time_is_the_systems_in_milliseconds() -> None:
    before = time.time_ns() // 1_000_000
    assert before <= now_ms() <= time.time_ns() // 1_000_000


def test_a_port_that_is_taken_is_said_by_its_address() -> None:
    with bind(HostPort("127.0.0.1", 0)) as taken:
        taken.listen()
        address = HostPort(*taken.getsockname())
        with pytest.raises(OSError, match=f"cannot listen on {address}"):
            bind(address)


async def test_a_relay_without_a_ca_does_not_start(tmp_path: Path) -> None:
    with bind(HostPort("127.0.0.1", 0)) as listener:
        address = HostPort(*listener.getsockname())
        wanted = config(tmp_path, address, BrokerAddress("127.0.0.1", 1))
        with pytest.raises(AuthorityError, match="relay ca init"):
            await run_relay(wanted, listener, io.StringIO())


async def test_the_parts_together_are_ready_when_the_broker_is_there_and_stop_when_told(
    tmp_path: Path, broker: BrokerAddress
) -> None:
    CertificateAuthority(tmp_path / "ca", now_ms, os.urandom).create()
    lines = LogLines()
    with bind(HostPort("127.0.0.1", 0)) as listener:
        listener.listen()
        address = HostPort(*listener.getsockname())
        running = asyncio.create_task(run_relay(config(tmp_path, address, broker), listener, lines))
        async with asyncio.timeout(BOUND_S), httpx2.AsyncClient(trust_env=False) as http:
            await lines.until("broker connected")
            ready = await http.get(f"http://{address}/readyz")
            foreign = await http.get(f"http://{address}/healthz", headers={"Host": "evil.example"})
            refused = await http.post(f"http://{address}/mcp")
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
    assert ready.status_code == 200
    assert all(ready.json()["subsystems"].values())
    assert foreign.status_code == 421
    assert refused.status_code == 401
    assert f"http://{address}/.well-known/" in refused.headers["www-authenticate"]
    assert lines.entries("relay started")[0]["url"] == f"http://{address}"
