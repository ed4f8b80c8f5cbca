"""Lets texts that are not urgent wait for those of other connections: one timer for all of them.

An idle process that wakes up for a single text finds neither its code nor its data in the processor's caches.
Handled one after the other, ten heartbeats cost two thirds of what they cost apart
(docs/decisions/0046). Must not decide what is urgent.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from relay.http.faulty_connection import Abortable, end_faulty

DEFERRAL_IN_STATE = "edge.deferral"
"""The key of the server's ``Deferral`` in the ASGI ``state`` of each connection."""

DEFERRED_S = 0.1
_AT_ONCE = 8
"""After as many, the event loop serves other connections: a call must not wait for a hundred heartbeats."""


class Deferred(Abortable, Protocol):
    """A connection that waits."""

    def resume(self) -> None:
        """Handle what has arrived."""


class Deferral:
    """The connections that wait, the first of them for ``wait_s``.

    Attributes:
        waiting: those, in the order in which they came.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, wait_s: float = DEFERRED_S) -> None:
        self._loop = loop
        self._wait_s = wait_s
        self.waiting: dict[Deferred, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, connection: Deferred) -> None:
        """Resume ``connection`` soon, together with the others."""
        self.waiting[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self._turn)

    def remove(self, connection: Deferred) -> None:
        """Do not resume ``connection``: it has been, or it is closed."""
        self.waiting.pop(connection, None)

    def _turn(self) -> None:
        self._timer = None
        for connection in list(self.waiting)[:_AT_ONCE]:
            del self.waiting[connection]
            try:
                connection.resume()
            except Exception as error:  # noqa: BLE001 - a bug of one must not leave the others waiting
                end_faulty(self._loop, connection, error)
        if self.waiting and self._timer is None:
            self._timer = self._loop.call_later(0, self._turn)


def deferral_in(state: Mapping[str, Any]) -> Deferral:
    """Return the server's in an ASGI ``state``."""
    deferral: Deferral = state[DEFERRAL_IN_STATE]
    return deferral
