"""What a node publishes on the broker by, and what stands for it where there is no broker.

Must not know a node's messages.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from schemas.health import Health, Loop


class Publisher(Protocol):
    """A connection to the broker that is kept up from ``start`` to ``stop``.

    Attributes:
        ended: set when its thread has ended, by ``stop`` or by a fault.
        loop: the progress of that thread.
    """

    refused: int
    ended: asyncio.Event
    loop: Loop

    @property
    def health(self) -> Health:
        """The health of the connection."""
        ...

    def when_connected(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the event loop after every connect."""
        ...

    def start(self) -> None:
        """Begin to connect, and go on trying until ``stop``. Returns at once."""
        ...

    async def stop(self) -> None:
        """Disconnect from the broker."""
        ...

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> bool:
        """Publish if connected; return whether it was handed over."""
        ...


class NoPublisher:
    """Stands for a connection where the relay has no broker: nothing is ever published, and nothing ends."""

    def __init__(self) -> None:
        self.refused = 0
        self.ended = asyncio.Event()
        self.loop = Loop()

    @property
    def health(self) -> Health:
        """There is nothing that could fail."""
        return Health.passive(ready=True, state="none: the session alone")

    def when_connected(self, callback: Callable[[], None]) -> None:
        """Do nothing: it never connects."""

    def start(self) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    def publish(self, topic: str, payload: bytes, *, retain: bool) -> bool:  # noqa: ARG002 - as Publisher
        """Return False."""
        return False
