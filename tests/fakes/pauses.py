"""Pauses that last until the test ends them."""

import asyncio
from dataclasses import dataclass

BOUND_S = 30


@dataclass(frozen=True, slots=True)
class Pause:
    """One pause that a task is in, and how long it was to be."""

    seconds: float
    over: asyncio.Event

    def end(self) -> None:
        self.over.set()


class Pauses:
    """Stands for ``asyncio.sleep`` wherever a ``sleep`` callable is asked for."""

    def __init__(self) -> None:
        self._begun: asyncio.Queue[Pause] = asyncio.Queue()

    async def sleep(self, seconds: float) -> None:
        pause = Pause(seconds, asyncio.Event())
        await self._begun.put(pause)
        await pause.over.wait()

    async def next(self) -> Pause:
        """Return the next pause once a task is in it."""
        return await asyncio.wait_for(self._begun.get(), BOUND_S)
