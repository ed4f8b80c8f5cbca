from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Machine, Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.routers import HeldRouter


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    """The relay with the CA's key, as far as its ledgers are shared."""
    return Machine.made(tmp_path / "one", issues=True)


@pytest_asyncio.fixture
async def owner(nats: NatsServer, tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Member]:
    """A relay whose nodes wait until the test answers."""
    async with Member.joined(nats.config, tmp_path / "owner", registry, HeldRouter()) as member:
        yield member


@pytest_asyncio.fixture
async def asker(nats: NatsServer, tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Member]:
    """Another relay of the same fleet."""
    async with Member.joined(nats.config, tmp_path / "asker", registry) as member:
        yield member
