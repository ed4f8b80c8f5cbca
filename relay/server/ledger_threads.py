"""Threads that use the ledgers, apart from all others.

Enrolments and renewals that wait for a ledger must not delay a revocation, nor may connections that use up
the descriptors. Must not know a ledger.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from relay.server.descriptor_reserve import DescriptorReserve
from schemas.process.prestarted_pool import prestarted_pool

_T = TypeVar("_T")


class LedgerThreads:
    """``count`` threads, called ``name``, which run all work with ``reserve``.

    Raises:
        NoThreadError: the system has too few left.
    """

    def __init__(self, reserve: DescriptorReserve, count: int, name: str) -> None:
        self._reserve = reserve
        self._threads = prestarted_pool(count, name)

    def run(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        """Begin ``work``, and return the future of what it returns; it may be run twice."""
        return asyncio.get_running_loop().run_in_executor(self._threads, self._reserve.run, work)
