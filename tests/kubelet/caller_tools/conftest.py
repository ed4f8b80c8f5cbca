"""A socket of a node, with a relay that is a list at the other side."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from schemas.registry import SchemaRegistry
from tests.fakes.caller_tools import FakeRelay, SocketClient, connected, served
from tests.fakes.lines import LogLines


@pytest_asyncio.fixture
async def relay(path: Path, registry: SchemaRegistry, log: LogLines) -> AsyncIterator[FakeRelay]:
    async with served(path, registry, log) as relay:
        yield relay


@pytest_asyncio.fixture
async def client(relay: FakeRelay, path: Path) -> AsyncIterator[SocketClient]:  # noqa: ARG001 - it is served
    async with connected(path) as client:
        yield client
