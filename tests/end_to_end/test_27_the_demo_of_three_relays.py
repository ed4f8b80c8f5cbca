"""27. A new user types one command and has three relays that are one fleet.

Steps: run ``relay demo --relays 3`` · each tool was called by way of the first relay · by way of each relay a
node of another is called · what lets relays in at the server that joins them is shown nowhere · Ctrl-C leaves
nothing. Without the kinds whose handlers run programs, so that the processes can be counted.
"""

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from relay.cli.demo.local_system import until_listed
from schemas.addresses import KINDS_PATH, mcp_url
from tests.fakes.demo import Demo, error_of, running_demo
from tests.fakes.polling import before_asking_again

pytestmark = pytest.mark.long

BOUND_S = 60
RELAY = re.compile(r"  relay [23] +(http://[\d.:]+), with node (\w+)\n")
PROGRAMS = {"broker", "cluster", "relay", "kubelet", "relay-2", "fleet-2", "relay-3", "fleet-3"}


async def called(demo: Demo, url: str, node_id: str) -> object:
    """Return what a node's echo has answered by way of the relay at ``url``, once that node is reached."""
    at_relay = replace(demo, facts={**demo.facts, "mcp_url": mcp_url(url, KINDS_PATH)})
    async with asyncio.timeout(BOUND_S), at_relay.client() as client:
        await until_listed(client, {node_id}, lambda: None)
        while True:
            result = await client.call_tool(f"sysecho.{node_id}.echo.invoke", {"message": "hello"})
            if not result.is_error:
                return (result.structured_content or {})["message"]
            assert error_of(result)["code"] == "E_NODE_OFFLINE"
            await before_asking_again()


def descendants(demo: Demo) -> list[psutil.Process]:
    """Return the demo and all that it runs."""
    demo_itself = psutil.Process(demo.pid)
    return [demo_itself, *demo_itself.children(recursive=True)]


async def test_three_relays_are_one_fleet_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    with running_demo(tmp_path, "--relays", "3", "--nodes", "0", "--kinds", "none") as demo:
        output = "".join(demo.printed)
        others = dict(RELAY.findall(output))
        assert len(others) == 2
        assert set(others.values()) == set(demo.mock_nodes)
        for node_id in (demo.real_node, *demo.mock_nodes):
            assert f'  sysecho-invoke {{"node": "{node_id}"' in output
        assert "FAILED" not in output
        assert "  line of a log file       not tried: this machine's node does not have linux.files" in output
        (second, of_second), (third, of_third) = others.items()
        first, of_first = demo.base_url, demo.real_node
        for url, node_id in ((first, of_second), (second, of_third), (third, of_first)):
            assert await called(demo, url, node_id) == "hello"

        running = descendants(demo)
        assert len(running) == 1 + len(PROGRAMS)
        seed_file = demo.directory / "cluster.seed"
        seed = seed_file.read_text("ascii").strip()
        assert seed.startswith("SU")
        assert seed_file.stat().st_mode & 0o777 == 0o600
        for process in running:
            assert seed not in " ".join(process.cmdline())
            assert seed not in " ".join(process.environ().values())
        assert {log.stem for log in demo.directory.glob("*.log")} == PROGRAMS
        holding = [path for path in demo.directory.rglob("*") if path.is_file() and holds(path, seed)]
        assert holding == [seed_file]
    printed = "".join(demo.printed)
    assert seed not in printed
    assert f"claude mcp add --transport http edge {first}/mcp/kinds --header " in printed
    _, alive = psutil.wait_procs(running, timeout=20)
    assert alive == []
    assert list(temporary.iterdir()) == []


def holds(path: Path, text: str) -> bool:
    return text.encode("ascii") in path.read_bytes()
