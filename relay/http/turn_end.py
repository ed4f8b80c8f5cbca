"""Lets the connections of one event loop send together, at the end of its turn.

Each write wakes the process that reads it. Where processors are few, that process often displaces this one,
which then finds neither its code nor its data in the caches (docs/decisions/0032). Must not know what is
sent.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from relay.http.faulty_connection import Abortable, end_faulty

TURN_END_IN_STATE = "edge.turn_end"
"""The key of the server's ``TurnEnd`` in the ASGI ``state`` of each connection."""

LARGE_BYTES = 16 * 1024
"""What is longer is sent at once: so much takes longer to write than to wake its reader."""

MOST_HELD = 64
"""How many frames a connection holds at most. More of them are sent at once."""


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


def turn_end_in(state: Mapping[str, Any]) -> TurnEnd:
    """Return the server's in an ASGI ``state``."""
    turn_end: TurnEnd = state[TURN_END_IN_STATE]
    return turn_end
