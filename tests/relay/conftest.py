from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from schemas.frames import FrameReader
from schemas.registry import SchemaRegistry
from tests.fakes.cluster_server import NatsServer
from tests.fakes.hub import Hub
from tests.fakes.routers import ScriptedRouter
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server


@pytest.fixture(scope="session")
def registry() -> SchemaRegistry:
    return SchemaRegistry()


@pytest.fixture(scope="session")
def reader(registry: SchemaRegistry) -> FrameReader:
    return FrameReader(registry)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Server]:
    """A real server for the tests of one file, which must run on the file's own loop to use it."""
    async with Server.running() as server:
        yield server


@pytest.fixture
def hub(tmp_path: Path, registry: SchemaRegistry) -> Iterator[Hub]:
    hub = Hub(tmp_path, registry)
    yield hub
    hub.close()


@pytest_asyncio.fixture(loop_scope="module")
async def relay(hub: Hub, server: Server) -> AsyncIterator[ServedRelay]:
    """The parts of ``hub``, served."""
    async with ServedRelay.open(hub, server) as relay:
        yield relay


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server of this test's own."""
    with NatsServer.running(tmp_path) as server:
        yield server
