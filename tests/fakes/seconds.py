"""Clocks that a test sets: a monotonic one, and that of the event loop."""

import asyncio

import pytest


class Seconds:
    """Stands for the time in seconds wherever a ``monotonic`` callable is asked for."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class LoopSeconds:
    """The clock of the running event loop, which a test stops and puts on: what bounds a wait goes by it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self.now = loop.time()
        monkeypatch.setattr(loop, "time", lambda: self.now)

    async def pass_by(self, seconds: float) -> None:
        """Let ``seconds`` pass at once; what was due by then has run."""
        self.now += seconds
        for _ in range(5):
            await asyncio.sleep(0)
