"""A small pool of daemon threads, for calls that may never return.

A call that hangs keeps its thread, since nothing ends a thread that waits for a dead disk; as long as others
are left, no other call waits for it. Not a standard pool, which is joined at exit: a dead disk would keep the
daemon from ending. Must not know what is called.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

T = TypeVar("T")

MAX_THREADS = 16


def start_daemon_thread(work: Callable[[], None]) -> None:
    """Start a thread that does not keep the process from ending.

    Raises:
        RuntimeError: the system has none left.
    """
    threading.Thread(target=work, name="disk", daemon=True).start()


class DaemonThreadPool:
    """At most ``limit`` threads, which ``start`` starts; each ends when no call is queued."""

    def __init__(
        self, start: Callable[[Callable[[], None]], None] = start_daemon_thread, limit: int = MAX_THREADS
    ) -> None:
        self._start = start
        self._limit = limit
        self._lock = threading.Lock()
        self._jobs: deque[Callable[[], None]] = deque()
        self._running = 0

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Return what ``call`` will return or raise once a thread takes it, which ``start_missing`` starts.

        Dropped when the loop has closed meanwhile.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def work() -> None:
            try:
                settle = partial(_resolve, future, call())
            except Exception as error:  # noqa: BLE001 - whatever it is, it is the awaiting side's
                settle = partial(_reject, future, error)
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle)

        self._jobs.append(work)
        return future

    def start_missing(self) -> None:
        """Start a thread for every queued call, up to the limit.

        Raises:
            RuntimeError: the system has none left. Queued calls wait for threads that run, or the next time.
        """
        for _ in range(min(len(self._jobs), self._limit)):
            with self._lock:
                if self._running == self._limit:
                    return
                self._running += 1
            try:
                self._start(self._work)
            except RuntimeError:
                with self._lock:
                    self._running -= 1
                raise

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._running -= 1
                    return
                job = self._jobs.popleft()
            job()


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
