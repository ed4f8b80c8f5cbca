"""11. A board is taken out of service for good.

Steps: retire it while it runs · stop it · retire it · call it · start it · retire it again.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.cli.demo.local_system import LocalSystem, kubelet_command
from tests.fakes.broker import BOUND_S
from tests.fakes.demo import local_system

pytestmark = [pytest.mark.long, pytest.mark.timeout(120)]


@pytest.fixture
async def system(tmp_path: Path) -> AsyncIterator[LocalSystem]:
    async with local_system(tmp_path, 0) as started:
        yield started


def retire_command(system: LocalSystem) -> list[str]:
    plan = system.plan
    return [
        *(sys.executable, "-P", "-m", "kubelet", "retire", "--yes"),
        *("--state-dir", str(plan.kubelet_state)),
        *("--broker", plan.broker, "--relay", plan.public_url),
    ]


async def run(command: list[str]) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    async with asyncio.timeout(BOUND_S * 2):
        out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_a_node_that_is_retired_is_gone_for_good(system: LocalSystem) -> None:
    plan = system.plan
    code, out, err = await run(retire_command(system))
    assert (code, out) == (3, "")
    assert "stop it first" in err.splitlines()[-1]

    await system.processes.kill("kubelet")
    caller_ids = plan.kubelet_state / "caller_ids.json"
    caller_ids.write_text("{}")
    code, out, err = await run(retire_command(system))
    assert (code, out) == (0, f"{system.real_node} is retired\n"), err
    assert not (plan.kubelet_state / "node.key").exists()
    assert not caller_ids.exists()

    lines = [json.loads(line) for line in plan.state.audit.read_text("ascii").splitlines()]
    (retired,) = [line for line in lines if line.get("event") == "retired"]
    assert retired["node_id"] == system.real_node
    async with asyncio.timeout(BOUND_S), system.client() as client:
        tool = f"sysecho.{system.real_node}.echo.invoke"
        result = await client.call_tool(tool, {"message": "still there?"})
    assert result.meta is not None
    assert result.meta["edge-kubelet/error"]["code"] in {"E_ATTESTATION_FAILED", "E_MANIFEST_NOT_FOUND"}

    code, _, err = await run(kubelet_command(plan))
    assert code == 3
    assert "edge-kubelet init" in err
    code, _, err = await run(retire_command(system))
    assert code == 3
