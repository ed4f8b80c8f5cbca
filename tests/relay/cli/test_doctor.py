"""``relay doctor`` of a relay that runs, with its own broker over TLS, as its operator types it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.polling import until
from tests.fakes.small_fleet import SmallFleet, small_fleet

pytestmark = pytest.mark.long


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path, secure=True) as fleet:
        await fleet.start_relay(*fleet.listening)
        await fleet.until_ready()
        yield fleet


async def doctor(fleet: SmallFleet, *options: str) -> tuple[int, Mapping[str, dict[str, Any]]]:
    """Return the exit code, and what each check that is not well has found."""
    command = [sys.executable, "-P", "-m", "relay", "doctor", "--json", "--state-dir", str(fleet.state.root)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
    ended = await asyncio.to_thread(
        subprocess.run,
        [*command, *options],
        env={**plain, "RELAY_CONFIG": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {line["check"]: line for line in map(json.loads, ended.stdout.splitlines())}
    return ended.returncode, {name: line for name, line in found.items() if line["severity"] != "ok"}


def severities(found: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    return {name: line["severity"] for name, line in found.items()}


async def test_a_relay_is_checked_with_the_settings_that_it_runs_with(fleet: SmallFleet) -> None:
    code, found = await doctor(fleet)
    # What is kept needs no option: the public URL, where the broker listens, where and how the relay serves.
    assert (code, severities(found)) == (0, {})
    listen = f"127.0.0.1:{fleet.port}"
    code, found = await doctor(fleet, "--tls-own", "--listen", listen)
    assert (code, severities(found)) == (0, {})
    code, found = await doctor(fleet, "--tls-own", "--listen", listen, "--agent-rps", "7")
    assert found["process"]["found"] == "settings that are not in effect: agent_rps (--agent-rps)"


async def test_a_check_looks_in_the_log_like_neither_a_fault_nor_an_attack(fleet: SmallFleet) -> None:
    await doctor(fleet)
    await until(lambda: fleet.log("the broker refuses what relay doctor tries, as it should"))
    lines = fleet.processes.log("relay").read_text("utf-8").splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert [entry for entry in entries if entry["level"] != "info"] == []


async def test_a_relay_that_has_stopped_is_one_failure(fleet: SmallFleet) -> None:
    await fleet.processes.stop("relay")
    code, found = await doctor(fleet, "--tls-own")
    failed = {name for name, severity in severities(found).items() if severity == "failure"}
    assert (code, failed) == (3, {"process", "relay"})
    skipped = {name: line["found"] for name, line in found.items() if line["severity"] == "skipped"}
    assert set(skipped.values()) == {"not checked: the relay does not run"}
    assert set(skipped) == {"broker", "clock", "sessions", "announces", "echo", "audit", "files", "watchdog"}
