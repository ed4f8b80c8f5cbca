"""Leaves a server of NATS that is cut off from most of its cluster, once another server is not.

Such a server answers, and passes messages between its own clients, but it has no leader: what relays share is
neither written nor read there. While no other server has one, as when most of them are gone, the relay stays,
since it can still reach the relays that have this server too. Must not read or write what is shared.
"""

import asyncio
from collections.abc import Awaitable, Callable

from nats.aio.client import Client

from relay.cluster.connection import Work
from relay.cluster.presence import Presence

CHECK_INTERVAL_S = 2.5
FIRST_PATIENCE_S, LONGEST_PATIENCE_S = 5.0, 60.0
"""How long presence may be not current before other servers are tried. It doubles with each try."""
_TIMEOUT_S = 2.0
_REASON = "it has no leader of the presence bucket: it may be cut off from the other servers"

Move = Callable[[Work, str], Awaitable[bool]]
"""Has the next connection made to another server that passes a check, for a reason; False if none does."""


class Quorum:
    """Watches whether ``presence`` is read at the server; its bucket is kept in ``stream``."""

    def __init__(
        self,
        presence: Presence,
        move: Move,
        *,
        stream: str,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._presence = presence
        self._move = move
        self._stream = stream
        self._sleep = sleep
        self._patience_s = FIRST_PATIENCE_S

    async def serve(self, _client: Client) -> None:
        """Return, which ends the connection, once another server is to be used instead."""
        unread_s = 0.0
        while True:
            await self._sleep(CHECK_INTERVAL_S)
            if self._presence.is_current:
                unread_s, self._patience_s = 0.0, FIRST_PATIENCE_S
                continue
            unread_s += CHECK_INTERVAL_S
            if unread_s < self._patience_s:
                continue
            unread_s, self._patience_s = 0.0, min(2 * self._patience_s, LONGEST_PATIENCE_S)
            if await self._move(self._has_leader, _REASON):
                return

    async def _has_leader(self, client: Client) -> None:
        """Return if the leader of the stream answers at the server of ``client``.

        Raises:
            NatsError, TimeoutError: it does not, or there is no such stream.
        """
        await client.jetstream(timeout=_TIMEOUT_S).stream_info(self._stream)
