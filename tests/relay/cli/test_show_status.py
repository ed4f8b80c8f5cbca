"""The lines of ``relay status``, by what a relay tells of itself."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from schemas.process.status_socket import served

pytestmark = pytest.mark.integration

BOUND_S = 30
GOOD = {"started": True, "live": True, "ready": True}
STATUS: dict[str, Any] = {
    "program": "relay",
    "version": "0",
    "now_ms": 1,
    "pid": 1,
    "uptime_s": 1,
    "watchdog_s": None,
    "resident_bytes": 1,
    "open_files": 1,
    "max_open_files": 2,
    "tasks": 3,
    "ready": True,
    "subsystems": {"calls": {**GOOD, "state": "no node is connected"}},
    "public_url": "https://relay.example",
    "listen": "127.0.0.1:8700",
    "broker": {"url": "none", "missing": 0},
    "nodes": {"known": 0, "connected": 0, "silent": {}},
    "calls": {"outcomes": []},
    "certificates": {},
    "audit_head": "0" * 64,
}


async def shown(state: Path, told: dict[str, Any]) -> list[str]:
    """Return what ``relay status`` prints of a relay that tells ``told``."""
    async with served(state, lambda: told):
        command = (sys.executable, "-P", "-m", "relay", "status", "--state-dir", str(state))
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        out, _ = await asyncio.wait_for(process.communicate(), BOUND_S)
    assert process.returncode == 0
    return out.decode().splitlines()


async def test_a_relay_without_a_broker_says_so(tmp_path: Path) -> None:
    lines = await shown(tmp_path, STATUS)
    assert "broker         sessions alone; 0 manifests missing" in lines
    assert not [line for line in lines if line.startswith("cluster")]


async def test_a_relay_of_a_cluster_names_it(tmp_path: Path) -> None:
    cluster = {**GOOD, "state": "connected to nats://127.0.0.1:4222: 3 relays, 2 nodes at others"}
    told = {**STATUS, "subsystems": {**STATUS["subsystems"], "cluster": cluster}}
    lines = await shown(tmp_path, told)
    assert f"cluster        {cluster['state']}" in lines
    assert not [line for line in lines if line.startswith(("relay's id", "other relays", "CA"))]


async def test_a_relay_of_a_cluster_tells_of_the_others_and_where_the_cas_key_is(tmp_path: Path) -> None:
    cluster = {**GOOD, "state": "connected to nats://127.0.0.1:4222: 2 relays, 2 nodes at others"}
    others = [
        {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XA", "nodes": 2, "seen_s": 1.4},
        {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XB", "nodes": 1, "seen_s": 0.2},
    ]
    told = {**STATUS, "subsystems": {**STATUS["subsystems"], "cluster": cluster}}
    lines = await shown(
        tmp_path,
        told | {"ca": "elsewhere", "cluster": {"relay": "01HZX9K3M4P7Q8R9S0T1V2W3XD", "others": others}},
    )
    assert "relay's id     01HZX9K3M4P7Q8R9S0T1V2W3XD" in lines
    first, second = "XA - 2 nodes, seen 1 s ago", "XB - 1 node, seen 0 s ago"
    others_shown = f"01HZX9K3M4P7Q8R9S0T1V2W3{first}; 01HZX9K3M4P7Q8R9S0T1V2W3{second}"
    assert f"other relays   {others_shown}" in lines
    assert [line for line in lines if line.startswith("CA ")]
