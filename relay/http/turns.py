"""What serves many connections in one callback: pings, texts that may wait, and the sends of a turn.

asyncio ends a connection whose protocol raises, and logs and counts the error. It cannot where one callback
serves many: ``_in_turn`` ends the one that raised, and the others have their turn. Must not read or write:
the connections do.
"""

import asyncio
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import NamedTuple, Protocol, TypeVar

from attrs import define, field

LARGE_BYTES = 16 * 1024
"""What is longer is sent at once: so much takes longer to write than to wake its reader."""

MOST_HELD = 64
"""How many frames a connection holds at most. More of them are sent at once."""
DEFERRED_S = 0.1
_AT_ONCE = 8
"""After as many, the event loop serves other connections: a call must not wait for a hundred heartbeats."""
_TURNS_PER_INTERVAL = 64


class Abortable(Protocol):
    """A connection that can be aborted: by ``transport``, which it sends by."""

    @property
    def transport(self) -> asyncio.Transport: ...


_ConnectionT = TypeVar("_ConnectionT", bound=Abortable)


def _in_turn(
    loop: asyncio.AbstractEventLoop,
    connections: Iterable[_ConnectionT],
    act: Callable[[_ConnectionT], object],
) -> None:
    """Call ``act`` with each of ``connections``. One that it raises for is aborted, and the error a fault."""
    for connection in connections:
        try:
            act(connection)
        except Exception as error:  # noqa: BLE001 - a bug of one must not hold up the others
            loop.call_exception_handler({"message": "a connection failed in its turn", "exception": error})
            connection.transport.abort()


class Holding(Abortable, Protocol):
    """A connection that holds what it has to send."""

    def send_held(self) -> None:
        """Send it, unless that was done meanwhile, or the connection is closing."""


@define(eq=False, repr=False)
class TurnEnd:
    """The connections that hold something to send."""

    _loop: asyncio.AbstractEventLoop
    _holding: list[Holding] = field(init=False, factory=list)
    _is_busy: bool = field(init=False, default=False)

    def add(self, connection: Holding, *, is_whole: bool = False) -> None:
        """Have ``connection`` send what it holds, when what is ready to run now has run.

        What ``is_whole``, because this turn adds nothing to it, is sent at once if it is the first of its
        turn, and the turn before had no more than one.
        """
        self._holding.append(connection)
        if len(self._holding) == 1:
            self._loop.call_soon(self._send)
            if is_whole and not self._is_busy:
                connection.send_held()

    def _send(self) -> None:
        holding, self._holding = self._holding, []
        self._is_busy = len(holding) > 1
        _in_turn(self._loop, holding, lambda connection: connection.send_held())


class Deferred(Abortable, Protocol):
    """A connection that waits; ``resume`` handles what has arrived."""

    def resume(self) -> None: ...


@define(eq=False, repr=False)
class Deferral:
    """The connections that wait, the first of them for ``wait_s``.

    Attributes:
        waiting: those, in the order in which they came.
    """

    _loop: asyncio.AbstractEventLoop
    _wait_s: float = DEFERRED_S
    waiting: dict[Deferred, None] = field(init=False, factory=dict)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def add(self, connection: Deferred) -> None:
        self.waiting[connection] = None
        if self._timer is None:
            self._timer = self._loop.call_later(self._wait_s, self._turn)

    def remove(self, connection: Deferred) -> None:
        """Do not resume ``connection``: it has been, or it is closed."""
        self.waiting.pop(connection, None)

    def _turn(self) -> None:
        self._timer = None
        _in_turn(self._loop, list(self.waiting)[:_AT_ONCE], self._resume)
        if self.waiting and self._timer is None:
            self._timer = self._loop.call_later(0, self._turn)

    def _resume(self, connection: Deferred) -> None:
        if connection in self.waiting:
            del self.waiting[connection]
            connection.resume()


class Pinged(Abortable, Protocol):
    """A connection that is kept alive."""

    def ping(self) -> bool:
        """Send a ping; return False if the connection is closing."""

    def keepalive_timeout(self) -> None:
        """End the connection: its ping was not answered in time."""


@define(eq=False, repr=False)
class Keepalive:
    """Pings a connection ``interval_s`` after its last answer, which must follow within ``timeout_s``."""

    _loop: asyncio.AbstractEventLoop
    _interval_s: float
    _timeout_s: float
    # In the order of their times. A few connections in each turn, so that a turn does not take long.
    _resting: dict[Pinged, float] = field(init=False, factory=dict)
    _unanswered: dict[Pinged, float] = field(init=False, factory=dict)
    _timer: asyncio.TimerHandle | None = field(init=False, default=None)

    def watch(self, connection: Pinged) -> None:
        self._resting[connection] = self._loop.time() + self._interval_s
        self._schedule()

    def answered(self, connection: Pinged) -> bool:
        """Record a pong; return False, without effect, if no ping of this connection waits for one."""
        if self._unanswered.pop(connection, None) is None:
            return False
        self._resting[connection] = self._loop.time() + self._interval_s
        return True

    def forget(self, connection: Pinged) -> None:
        self._resting.pop(connection, None)
        self._unanswered.pop(connection, None)

    def _schedule(self) -> None:
        if self._timer is None and (self._resting or self._unanswered):
            # The first of each is due first, and what is answered until then rests for the whole interval.
            due_s = min(next(iter(queue.values())) for queue in (self._resting, self._unanswered) if queue)
            wait_s = min(due_s - self._loop.time(), self._interval_s)
            self._timer = self._loop.call_later(
                max(self._interval_s / _TURNS_PER_INTERVAL, wait_s), self._turn
            )

    def _turn(self) -> None:
        self._timer = None
        now = self._loop.time()
        _in_turn(self._loop, _due(self._unanswered, now), self._time_out)
        _in_turn(self._loop, _due(self._resting, now), self._ping)
        self._schedule()

    def _time_out(self, connection: Pinged) -> None:
        del self._unanswered[connection]
        connection.keepalive_timeout()

    def _ping(self, connection: Pinged) -> None:
        del self._resting[connection]
        if connection.ping():
            self._unanswered[connection] = self._loop.time() + self._timeout_s


def _due(queue: dict[Pinged, float], now: float) -> list[Pinged]:
    return list(takewhile(lambda connection: queue[connection] <= now, queue))


class Turns(NamedTuple):
    """Those of one server."""

    turn_end: TurnEnd
    deferral: Deferral
    keepalive: Keepalive
