"""How a demo waits for its nodes."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from relay.cli.demo.local_system import (
    SERVER,
    Plan,
    issue_mock_nodes,
    start_cluster_server,
    until_listed,
)
from relay.cli.demo.processes import Processes
from relay.fleet.node_record import Where
from relay.limits.rate_limits import Allowance
from relay.pki.authority import CertificateAuthority
from relay.settings.environment import now_ms
from schemas.files import make_private_directory
from tests.fakes.demo import plan_below
from tests.fakes.hub import Hub
from tests.fakes.mcp_stage import NEW, Stage
from tests.fakes.refusals import audited_refusals
from tests.fakes.routers import ScriptedRouter
from tests.fakes.serving import Server

pytestmark = pytest.mark.integration

NODES = [f"01hzx9k3m4p7q8r9s0t1v2w3x{number}" for number in range(8)]


@pytest.mark.asyncio(loop_scope="module")
async def test_nodes_are_awaited_page_by_page_within_the_rate_of_the_agent_that_reads(
    hub: Hub, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each refusal for the rate ended the demo of thousands of nodes."""
    monkeypatch.setattr("relay.mcp_api.resources.NODES_PER_PAGE", 3)
    late = hub.ca.issue(NODES[4])
    for node_id in NODES:
        if node_id != late.node_id:
            hub.connect(hub.ca.issue(node_id))
    hub.announce(late)
    attempts = 0

    def check() -> None:
        nonlocal attempts
        attempts += 1
        if attempts == 3:
            hub.fleet.connection_changed(late.node_id, Where.HERE)

    narrow = Allowance(10, 2, 9)
    async with Stage(hub, ScriptedRouter(), server, narrow).running() as stage, stage.client(NEW) as client:
        tools = await until_listed(client, set(NODES), check)
    assert len(tools) == 2 * len(NODES)
    assert attempts == 5  # three pages, one of them a second time, and the tools
    assert {each["reason"] for each in audited_refusals(hub)} == {"E_RATE_LIMITED"}


BOUND_S = 30


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with Processes.running(tmp_path) as processes:
        yield processes


async def started(directory: Path, processes: Processes) -> tuple[str, str]:
    """Start a server for the relays of one demo, and return where it listens and the seed that it admits."""
    make_private_directory(directory)
    plan = await start_cluster_server(plan_below(directory), processes)
    options = dict(zip(plan.relay_options[::2], plan.relay_options[1::2], strict=True))
    return options["--cluster"], seed_of(plan)


def seed_of(plan: Plan) -> str:
    file = plan.directory / "cluster.seed"
    assert file.stat().st_mode & 0o777 == 0o600
    return file.read_text("ascii").strip()


async def connected(url: str, seed: str | None) -> bool:
    client = Client()

    async def refused(_error: Exception) -> None:
        """Say nothing: ``connect`` raises."""

    try:
        await client.connect(url, nkeys_seed_str=seed, allow_reconnect=False, error_cb=refused)
    except NatsError:
        return False
    finally:
        await client.close()
    return True


async def test_each_start_has_credentials_of_its_own_and_is_reached_from_this_machine_alone(
    processes: Processes, tmp_path: Path
) -> None:
    async with asyncio.timeout(BOUND_S):
        former, former_seed = await started(tmp_path / "former", processes)
        assert await connected(former, former_seed)
        await processes.stop(SERVER)
        url, seed = await started(tmp_path / "now", processes)
        assert seed != former_seed
        assert await connected(url, seed)
        assert not await connected(url, former_seed)
        assert not await connected(url, None)
        program = psutil.Process(processes.pid(SERVER))
        assert seed not in " ".join(program.cmdline())
        connections = program.net_connections("inet")
        listening = {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}
        assert listening == {"127.0.0.1"}
    assert seed not in processes.log(SERVER).read_text("utf-8")


async def test_identities_are_made_in_parts_and_a_cancellation_waits_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cli.demo.local_system._ISSUED_AT_ONCE", 2)
    ca = CertificateAuthority(tmp_path / "ca", now_ms, os.urandom)
    ca.create()
    made = await issue_mock_nodes(ca, 5, tmp_path / "mocks")
    assert sorted(made) == sorted(path.name for path in (tmp_path / "mocks").iterdir())
    assert len(made) == 5
    loop, begun, goes_on = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def slow(*_: object) -> list[str]:
        loop.call_soon_threadsafe(begun.set)
        assert goes_on.wait(BOUND_S)
        made.append("a part")
        return ["1", "2"]

    monkeypatch.setattr(ca, "issue_mock", slow)
    issuing = asyncio.create_task(issue_mock_nodes(ca, 5, tmp_path / "mocks"))
    await begun.wait()
    issuing.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await issuing
    assert made[5:] == ["a part"]
