"""Waiting, with a bound, for what has no event and no callback."""

import asyncio
from collections.abc import Callable

BOUND_S = 10
_POLL_S = 0.001
"""Not 0, which would keep a core busy that another test or process needs."""


async def until(condition: Callable[[], object]) -> None:
    """Return when ``condition`` holds."""
    async with asyncio.timeout(BOUND_S):
        while not condition():  # noqa: ASYNC110 - there is no event for it, which is what this is for
            await asyncio.sleep(_POLL_S)
