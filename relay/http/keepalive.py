"""Pings each WebSocket in turn, and ends those that do not answer: one timer for all of them.

With two timers for each of ten thousand connections, an idle relay would do little else. All of them wait
equally long, so each of the two waits is a queue. Must not read or write: the connections do.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from relay.http.faulty_connection import Abortable, end_faulty

KEEPALIVE_IN_STATE = "edge.keepalive"
"""The key of the server's ``Keepalive`` in the ASGI ``state`` of each connection."""

_TURNS_PER_INTERVAL = 64


class Pinged(Abortable, Protocol):
    """A connection that is kept alive."""

    def ping(self) -> bool:
        """Send a ping; return False if the connection is closing."""

    def keepalive_timeout(self) -> None:
        """End the connection: its ping was not answered in time."""


class Keepalive:
    """Pings a connection ``interval_s`` after its last answer, which must follow within ``timeout_s``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, interval_s: float, timeout_s: float) -> None:
        self._loop = loop
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        # In the order of their times. A few connections in each turn, so that a turn does not take long.
        self._resting: dict[Pinged, float] = {}
        self._unanswered: dict[Pinged, float] = {}
        self._turn_s = interval_s / _TURNS_PER_INTERVAL
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, connection: Pinged) -> None:
        """Ping ``connection`` from now on."""
        self._resting[connection] = self._loop.time() + self._interval_s
        self._schedule()

    def answered(self, connection: Pinged) -> bool:
        """Record a pong; return False, without effect, if no ping of this connection waits for one."""
        if self._unanswered.pop(connection, None) is None:
            return False
        self._resting[connection] = self._loop.time() + self._interval_s
        return True

    def forget(self, connection: Pinged) -> None:
        """Ping ``connection`` no more."""
        self._resting.pop(connection, None)
        self._unanswered.pop(connection, None)

    def _schedule(self) -> None:
        if self._timer is None and (self._resting or self._unanswered):
            # The first of each is due first, and what is answered until then rests for the whole interval.
            due_s = min(next(iter(queue.values())) for queue in (self._resting, self._unanswered) if queue)
            wait_s = min(due_s - self._loop.time(), self._interval_s)
            self._timer = self._loop.call_later(max(self._turn_s, wait_s), self._turn)

    def _turn(self) -> None:
        self._timer = None
        now = self._loop.time()
        for connection in _due(self._unanswered, now):
            del self._unanswered[connection]
            try:
                connection.keepalive_timeout()
            except Exception as error:  # noqa: BLE001 - a bug of one must not stop the pings of the others
                end_faulty(self._loop, connection, error)
        for connection in _due(self._resting, now):
            del self._resting[connection]
            try:
                is_pinged = connection.ping()
            except Exception as error:  # noqa: BLE001 - as above
                end_faulty(self._loop, connection, error)
            else:
                if is_pinged:
                    self._unanswered[connection] = now + self._timeout_s
        self._schedule()


def _due(queue: dict[Pinged, float], now: float) -> list[Pinged]:
    due = []
    for connection, due_s in queue.items():
        if due_s > now:
            break
        due.append(connection)
    return due


def keepalive_in(state: Mapping[str, Any]) -> Keepalive:
    """Return the server's in an ASGI ``state``."""
    keepalive: Keepalive = state[KEEPALIVE_IN_STATE]
    return keepalive
