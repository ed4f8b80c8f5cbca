"""A thread pool that is started in full at once: for name resolution, and for joining threads at the end.

The event loop's own pool starts its threads one by one on demand. On a board at its limit of tasks that start
fails long after the daemon's own, in the middle of a reconnect, and would end the daemon. Must not be
used for calls that may never return.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

COUNT = 4


def prestarted_pool(count: int = COUNT) -> ThreadPoolExecutor:
    """Return a pool of ``count`` threads, all of which run.

    Raises:
        RuntimeError: the system has too few left.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix="helper")
    # None of them is free for the next job before the last one runs, so that each job starts a thread.
    all_run = threading.Barrier(count + 1)
    try:
        for _ in range(count):
            pool.submit(all_run.wait)
        all_run.wait()
    except RuntimeError:
        all_run.abort()
        pool.shutdown(wait=False)
        raise
    return pool
