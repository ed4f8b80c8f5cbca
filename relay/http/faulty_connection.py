"""Ends a connection whose turn has failed, so that the others have theirs.

asyncio ends a connection whose protocol raises, and logs and counts the error. It cannot where one callback
of the event loop serves many connections: what serves them calls this for the one that raised.
"""

import asyncio
from typing import Protocol


class Abortable(Protocol):
    """A connection that can be aborted."""

    @property
    def transport(self) -> asyncio.Transport:
        """What it sends by."""


def end_faulty(loop: asyncio.AbstractEventLoop, connection: Abortable, error: Exception) -> None:
    """Abort ``connection``, and report ``error`` as a fault. Raises nothing."""
    loop.call_exception_handler({"message": "a connection failed in its turn", "exception": error})
    connection.transport.abort()
