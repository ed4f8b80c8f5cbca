"""A daemon of the node in this process, and what its loopback pages show."""

import asyncio
import http.client
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from kubelet.config import DaemonPlan, NodeConfig
from kubelet.daemon.composition import run_daemon
from schemas.addresses import BrokerAddress
from tests.fakes.lines import LogLines
from tests.fakes.polling import before_asking_again

BOUND_S = 30
NO_BROKER = BrokerAddress("127.0.0.1", 9)
NO_RELAY = "http://127.0.0.1:9"


class Daemon:
    """A daemon that runs, and its loopback pages."""

    def __init__(self, task: asyncio.Task[None], port: int, log: LogLines) -> None:
        self.task = task
        self.port = port
        self.log = log

    async def get(self, path: str) -> tuple[int, Any]:
        return await asyncio.to_thread(self._get, path)

    async def until_relay_is(self, state: str) -> tuple[int, Any]:
        """Return the readiness page once it says ``state`` of the relay."""
        async with asyncio.timeout(BOUND_S):
            while True:
                status, page = await self.get("/readyz")
                if page["subsystems"]["relay"]["state"] == state:
                    return status, page
                await before_asking_again()

    async def until_ready(self) -> tuple[int, Any]:
        """Return the readiness page once its status is 200: an answer may just have been sent."""
        async with asyncio.timeout(BOUND_S):
            while (page := await self.get("/readyz"))[0] != 200:
                await before_asking_again()
            return page

    def _get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND_S)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()


@asynccontextmanager
async def daemon(
    state_dir: Path,
    log: LogLines,
    broker: BrokerAddress = NO_BROKER,
    relay_url: str = NO_RELAY,
    socket: Path | None = None,
) -> AsyncIterator[Daemon]:
    task = asyncio.create_task(
        run_daemon(DaemonPlan(NodeConfig(broker, relay_url), state_dir, 0, socket), log)
    )
    try:
        started = await log.until("kubelet started")
        yield Daemon(task, int(started["loopback"].rpartition(":")[2]), log)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
