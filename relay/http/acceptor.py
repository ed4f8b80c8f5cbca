"""Accepts connections: within their bounds, before anything is spent on them, TLS included.

asyncio's own server takes whatever comes, and shakes hands with it. Must not know what is spoken.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from relay.http.connections import Connection, Connections

HANDSHAKE_TIMEOUT_S = 10.0
"""How long a TLS handshake may take."""
WRITE_TIMEOUT_S = 20.0
"""How long a peer may take nothing of what is sent to it."""

_TLS_GOODBYE_S = 2.0
_AT_ONCE = 16
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_PAUSE_S = 0.2
_UNUSABLE = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})


@dataclass(frozen=True, slots=True)
class SocketTimeouts:
    """How long a peer may take: for its handshake, and with nothing taken of what is sent to it."""

    handshake_s: float = HANDSHAKE_TIMEOUT_S
    write_s: float = WRITE_TIMEOUT_S


SOCKET_TIMEOUTS = SocketTimeouts()


class Acceptor:
    """Accepts from ``listener``, over TLS if there is a context; ``speak`` makes the protocol of each."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        speak: Callable[[Connection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        timeouts: SocketTimeouts,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._speak = speak
        self._tls = tls
        self._timeouts = timeouts
        self._opening: set[asyncio.Task[None]] = set()

    async def run(self, backlog: int) -> None:
        """Accept until cancelled, and then no more: the listener is closed.

        Raises:
            OSError: the listener is of no use.
        """
        self._listener.setblocking(False)  # noqa: FBT003 - as the standard library has it
        self._listener.listen(backlog)
        try:
            while True:
                for _ in range(_AT_ONCE):
                    await self._accept()
                # An accept that need not wait does not yield: in a flood, nothing else would have its turn.
                await asyncio.sleep(0)
        finally:
            self._listener.close()
            for task in self._opening:
                task.cancel()

    async def _accept(self) -> None:
        try:
            accepted, address = await asyncio.get_running_loop().sock_accept(self._listener)
        except OSError as error:
            if error.errno in _UNUSABLE:
                raise
            if error.errno in _EXHAUSTED:
                self._connections.refuse("descriptors")
                await asyncio.sleep(_EXHAUSTED_PAUSE_S)
            return  # else the peer left before it was accepted
        connection = self._connections.begin(address[0])
        if connection is None:
            accepted.close()
            return
        task = asyncio.create_task(self._open(accepted, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        connection.begin(task.cancel)

    async def _open(self, accepted: socket.socket, connection: Connection) -> None:
        is_open = False
        try:
            # The kernel sees what the peer takes, also when the transport is only waiting to be closed.
            write_ms = int(self._timeouts.write_s * 1000)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, write_ms)
            with contextlib.suppress(OSError):  # no handshake, or gone meanwhile
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._speak(connection),
                    accepted,
                    ssl=self._tls,
                    # asyncio wants no limits to what there is not.
                    ssl_handshake_timeout=self._timeouts.handshake_s if self._tls else None,
                    ssl_shutdown_timeout=_TLS_GOODBYE_S if self._tls else None,
                )
                is_open = True
        finally:
            if not is_open:
                connection.end()
