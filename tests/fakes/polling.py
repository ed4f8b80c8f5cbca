"""Waiting, with a bound, for what tells nobody that it has happened."""

import asyncio
from collections.abc import Callable

BOUND_S = 10


async def until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - there is no event for it, which is what this is for
            await asyncio.sleep(0)
