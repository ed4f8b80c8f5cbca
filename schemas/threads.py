"""Starting a thread where the system may have none left: the limits of tasks of a service, or of a user.

A pool is started in full at once, so that it cannot fail later, in the middle of a reconnect. Must not decide
what a program does without a thread.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

from schemas.error_roots import StateError


class NoThreadError(StateError):
    """The system has no thread left for this process."""

    def __init__(self) -> None:
        super().__init__("no thread can be started: raise TasksMax= of the service, or the user's limit")


def started(thread: threading.Thread) -> threading.Thread:
    """Start ``thread`` and return it.

    Raises:
        NoThreadError: the system has none left.
    """
    try:
        thread.start()
    except RuntimeError:
        # That of threading, and nothing else is raised by a thread that is new.
        raise NoThreadError from None
    return thread


def prestarted_pool(count: int, name: str = "helper") -> ThreadPoolExecutor:
    """Return a pool of ``count`` threads, all of which run.

    Raises:
        NoThreadError: the system has too few left.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix=name)
    # None of them is free for the next job before the last one runs, so that each job starts a thread.
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_run.wait)
        all_run.wait()
    except RuntimeError:
        all_run.abort()
        pool.shutdown(wait=False)
        raise NoThreadError from None
    return pool
