"""A thread pool that is started in full at once.

A pool of the standard library starts its threads one by one, on demand. On a machine at its limit of tasks
that start fails long after the program's own, in the middle of a reconnect or of a poll, and would end the
program. Must not be used for calls that may never return.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

from schemas.threads import NoThreadError


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
