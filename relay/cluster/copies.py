"""How many copies JetStream keeps of what the relays share: three, and one where there is a single server.

Of a cluster that has lost a server nothing is made with fewer: that would be lost with the next one.
Must not know what is kept.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import APIError

COPIES = 3
_SINGLE_SERVER = 10074
"""The error code of JetStream for copies that are asked of a server without others."""

MadeT = TypeVar("MadeT")


async def in_copies(make: Callable[[int], Awaitable[MadeT]]) -> MadeT:
    """Return what ``make`` makes with that many copies.

    Raises:
        APIError: it is not made, as while fewer than three servers of a cluster run.
    """
    try:
        return await make(COPIES)
    except APIError as error:
        if error.err_code != _SINGLE_SERVER:
            raise
        return await make(1)


async def grow(context: JetStreamContext, info: StreamInfo) -> None:
    """Have a stream that was made on a single server copied, now that the servers are a cluster.

    What cannot be done now, since too few of them run, or they do not permit it, is tried again with the next
    connection.
    """
    copies = info.config.num_replicas or 1
    if info.cluster is None or copies >= COPIES:
        return
    try:
        await context.update_stream(info.config, num_replicas=COPIES)
    except (APIError, TimeoutError):
        return
