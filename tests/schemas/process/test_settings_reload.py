import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from schemas.process.settings_reload import call_at

BOUND_S = 20


@pytest.fixture(autouse=True)
def handler_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


async def test_a_signal_is_a_call_in_the_loop_each_time() -> None:
    calls: asyncio.Queue[object] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    call_at(signal.SIGUSR1, loop, lambda: calls.put_nowait(asyncio.get_running_loop()))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls.empty()  # not within the code that the signal interrupts
        assert await asyncio.wait_for(calls.get(), BOUND_S) is loop


async def test_a_signal_wakes_a_loop_that_waits() -> None:
    called = asyncio.Event()
    loop = asyncio.get_running_loop()
    call_at(signal.SIGUSR1, loop, called.set)
    killing = loop.run_in_executor(None, os.kill, os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(called.wait(), BOUND_S)
    await killing


def test_a_signal_is_ignored_once_the_loop_is_closed() -> None:
    loop = asyncio.new_event_loop()
    calls: list[None] = []
    call_at(signal.SIGUSR1, loop, lambda: calls.append(None))
    loop.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == []
