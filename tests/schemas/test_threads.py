import asyncio
import threading

import pytest

from schemas.threads import NoThreadError, prestarted_pool, started


def test_a_thread_that_can_be_started_runs() -> None:
    ran = threading.Event()
    started(threading.Thread(target=ran.set)).join(10)
    assert ran.is_set()


def no_thread_left(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_system_without_a_thread_left_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread_left)
    with pytest.raises(NoThreadError, match="raise TasksMax="):
        started(threading.Thread(target=print))


async def test_names_are_looked_up_when_no_thread_can_be_started_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    pool = prestarted_pool(2)
    loop.set_default_executor(pool)
    with monkeypatch.context() as context:
        context.setattr(threading.Thread, "start", no_thread_left)
        looked_up = await asyncio.gather(*(loop.getaddrinfo("localhost", 80 + n) for n in range(3)))
    assert all(looked_up)
    pool.shutdown()


def test_a_system_without_so_many_threads_says_so_and_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def only_one(thread: threading.Thread) -> None:
        if started:
            no_thread_left(thread)
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", only_one)
    with pytest.raises(NoThreadError, match="no thread can be started"):
        prestarted_pool(3)
    started[0].join(10)
    assert not started[0].is_alive()
