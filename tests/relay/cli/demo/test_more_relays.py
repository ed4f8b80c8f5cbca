import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from relay.cli.demo.local_system import Plan
from relay.cli.demo.more_relays import SERVER, relay_permissions, start_cluster_server
from relay.cli.demo.processes import Processes
from schemas.files import make_private_directory
from tests.fakes.cluster_server import SHIPPED
from tests.fakes.demo import plan_below

pytestmark = pytest.mark.integration

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


def test_the_permissions_are_those_that_ship() -> None:
    shipped = SHIPPED.read_text("utf-8").split("RELAY = {")[1].split("\n}\n")[0]
    permissions = relay_permissions("main")
    subjects = [*permissions["publish"]["allow"], *permissions["subscribe"]["allow"]]
    assert re.findall(r'"([^"]+)"', shipped) == subjects
