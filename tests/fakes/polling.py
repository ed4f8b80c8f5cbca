"""Waiting, with a bound, for what has no event and no callback."""

import asyncio
import time
from collections.abc import Callable

BOUND_S = 30
_POLL_S, _LONGEST_POLL_S = 0.001, 0.005
"""The first pause and the longest, each twice the one before: to ask all the time would keep a core busy that
another test or process needs."""
_SYNC_POLL_S = 0.05
_ASK_S = 0.05


async def until(condition: Callable[[], object], bound_s: float = BOUND_S) -> None:
    """Return when ``condition`` holds."""
    pause_s = _POLL_S
    async with asyncio.timeout(bound_s):
        while not condition():
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)


async def before_asking_again() -> None:
    """Leave the core for a moment to the process that is asked, which has to become what is waited for."""
    await asyncio.sleep(_ASK_S)


def wait_until(condition: Callable[[], object], bound_s: float = BOUND_S) -> None:
    """Return when ``condition`` holds, in a test without an event loop.

    Raises:
        TimeoutError: it does not within ``bound_s``.
    """
    give_up = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() > give_up:
            raise TimeoutError
        time.sleep(_SYNC_POLL_S)
