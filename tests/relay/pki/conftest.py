from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.fakes.enrolling import Office
from tests.fakes.hub import Hub


@pytest_asyncio.fixture(loop_scope="module")
async def office(hub: Hub, tmp_path: Path) -> AsyncIterator[Office]:
    office = Office(hub, tmp_path)
    async with office.http:
        yield office
