"""What serves many connections in one callback: pings, texts that may wait, and the sends of a turn.

asyncio ends a connection whose protocol raises, and logs and counts the error. It cannot where one callback
serves many: ``end_faulty`` ends the one that raised, and the others have their turn. Must not read or write:
the connections do.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

TURNS_IN_STATE = "edge.turns"
"""The key of the server's ``Turns`` in the ASGI ``state`` of each connection."""

LARGE_BYTES = 16 * 1024
"""What is longer is sent at once: so much takes longer to write than to wake its reader."""

MOST_HELD = 64
"""How many frames a connection holds at most. More of them are sent at once."""
DEFERRED_S = 0.1
_AT_ONCE = 8
"""After as many, the event loop serves other connections: a call must not wait for a hundred heartbeats."""
_TURNS_PER_INTERVAL = 64


class Abortable(Protocol):
    """A connection that can be aborted."""

    @property
    def transport(self) -> asyncio.Transport:
        """What it sends by."""


def end_faulty(loop: asyncio.AbstractEventLoop, connection: Abortable, error: Exception) -> None:
    """Abort ``connection``, and report ``error`` as a fault. Raises nothing."""
    loop.call_exception_handler({"message": "a connection failed in its turn", "exception": error})
    connection.transport.abort()


class Holding(Abortable, Protocol):
    """A connection that holds what it has to send."""

    def send_held(self) -> None:
        """Send it, unless that was done meanwhile, or the connection is closing."""


class TurnEnd:
    """The connections that hold something to send."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._holding: list[Holding] = []

    def add(self, connection: Holding) -> None:
        """Have ``connection`` send what it holds, when what is ready to run now has run."""
        if not self._holding:
            self._loop.call_soon(self._send)
        self._holding.append(connection)

    def _send(self) -> None:
        holding, self._holding = self._holding, []
        for connection in holding:
            try:
                connection.send_held()
            except Exception as error:  # noqa: BLE001 - a bug of one must not hold back what the others send
                end_faulty(self._loop, connection, error)


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


class Turns(NamedTuple):
    """Those of one server."""

    turn_end: TurnEnd
    deferral: Deferral
    keepalive: Keepalive


def turns_in(state: Mapping[str, Any]) -> Turns:
    """Return the server's in an ASGI ``state``."""
    turns: Turns = state[TURNS_IN_STATE]
    return turns
