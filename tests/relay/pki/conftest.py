from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.fakes.enrolling import Stage
from tests.fakes.hub import Hub


@pytest_asyncio.fixture(loop_scope="module")
async def stage(hub: Hub, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(hub, tmp_path)
    async with stage.http:
        yield stage
