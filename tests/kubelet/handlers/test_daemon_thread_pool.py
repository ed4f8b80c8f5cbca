import asyncio
import threading
from collections.abc import Callable

import pytest

from kubelet.handlers.daemon_thread_pool import DaemonThreadPool, start_daemon_thread

BOUND_S = 10


async def test_what_is_asked_is_answered_in_a_thread_that_ends() -> None:
    threads = DaemonThreadPool()
    asked = threads.submit(threading.current_thread)
    threads.start_missing()
    thread = await asyncio.wait_for(asked, BOUND_S)
    assert thread is not threading.main_thread()
    assert thread.daemon
    thread.join(BOUND_S)
    assert not thread.is_alive()


async def test_what_is_raised_is_raised_to_those_who_asked() -> None:
    threads = DaemonThreadPool()

    def broken() -> None:
        raise OSError("input/output error")

    asked = threads.submit(broken)
    threads.start_missing()
    with pytest.raises(OSError, match="input/output"):
        await asyncio.wait_for(asked, BOUND_S)


async def test_there_are_never_more_threads_than_the_limit_and_what_waits_is_done_later() -> None:
    release, begun = threading.Event(), asyncio.Queue[threading.Thread]()
    loop = asyncio.get_running_loop()

    def hang() -> threading.Thread:
        loop.call_soon_threadsafe(begun.put_nowait, threading.current_thread())
        assert release.wait(BOUND_S)
        return threading.current_thread()

    threads = DaemonThreadPool(limit=2)
    asked = [threads.submit(hang) for _ in range(5)]
    for _ in range(3):
        threads.start_missing()
    both = {await asyncio.wait_for(begun.get(), BOUND_S) for _ in range(2)}
    assert begun.empty()
    release.set()
    assert set(await asyncio.wait_for(asyncio.gather(*asked), BOUND_S)) == both


async def test_a_thread_that_cannot_be_started_is_tried_again() -> None:
    refused = 0

    def start(work: Callable[[], None]) -> None:
        nonlocal refused
        if refused < 2:
            refused += 1
            raise RuntimeError("can't start new thread")
        start_daemon_thread(work)

    threads = DaemonThreadPool(start, limit=1)
    asked = threads.submit(lambda: "space")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="can't start"):
            threads.start_missing()
    threads.start_missing()
    assert await asyncio.wait_for(asked, BOUND_S) == "space"
    threads.start_missing()  # there is nothing to start for
