"""A subscription whose messages are handled as they are read.

The library gives messages to a callback through a queue and a task, and each waits one more turn of the event
loop for it. A future gets its message in the turn in which it was read: the one here takes every message, and
is never done. Must not know what a message says.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from nats.aio.client import Client
from nats.aio.msg import Msg
from structlog.typing import FilteringBoundLogger

if TYPE_CHECKING:
    from nats.aio.subscription import Subscription

Handle = Callable[[Msg], None]
"""Handles one message. Must not block: the next is not read before it returns."""


class EveryMessage(asyncio.Future[Msg]):
    """Gives every message to ``handle``."""

    def __init__(self, handle: Handle, log: FilteringBoundLogger) -> None:
        super().__init__()
        self._handle = handle
        self._log = log

    def set_result(self, message: Msg, /) -> None:
        """Handle ``message``, which was read."""
        try:
            self._handle(message)
        except Exception as error:  # noqa: BLE001 - a bug must lose one message; the library would read no more
            self._log.error("message of another relay not handled", exc_info=error)


async def subscribe(
    client: Client, subject: str, handle: Handle, log: FilteringBoundLogger, queue: str = ""
) -> "Subscription":
    """Call ``handle`` with each message on ``subject``; one of all that are in ``queue`` gets a message."""
    return await client.subscribe(subject, queue, future=EveryMessage(handle, log))
