"""Accepts connections within their limits, before the TLS handshake.

asyncio's own server accepts every connection and does the handshake. Must not know the protocol.
"""

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from relay.http.connections import AcceptedConnection, ConnectionRefusal, Connections

HANDSHAKE_TIMEOUT_S = 10.0
"""How long a TLS handshake may take."""
WRITE_TIMEOUT_S = 20.0
"""How long a peer may read nothing of what is sent to it."""

_TLS_SHUTDOWN_S = 2.0
_AT_ONCE = 16
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_EXHAUSTED_PAUSE_S = 0.2
_UNUSABLE = frozenset({errno.EBADF, errno.EINVAL, errno.ENOTSOCK})


@dataclass(frozen=True, slots=True)
class SocketTimeouts:
    """Timeouts of a peer: of its handshake, and of reading what is sent to it."""

    handshake_s: float = HANDSHAKE_TIMEOUT_S
    write_s: float = WRITE_TIMEOUT_S


SOCKET_TIMEOUTS = SocketTimeouts()


class Acceptor:
    """Accepts from ``listener``, over TLS if there is a context; ``make_protocol`` makes each protocol."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        make_protocol: Callable[[AcceptedConnection], asyncio.Protocol],
        tls: ssl.SSLContext | None,
        timeouts: SocketTimeouts,
    ) -> None:
        self._listener = listener
        self._connections = connections
        self._make_protocol = make_protocol
        self._tls = tls
        self._timeouts = timeouts
        self._opening: set[asyncio.Task[None]] = set()

    def listen(self, backlog: int) -> None:
        """Let connections wait to be accepted, ``backlog`` at most.

        Raises:
            OSError: the listener is broken.
        """
        self._listener.setblocking(False)  # noqa: FBT003 - as the standard library has it
        self._listener.listen(backlog)

    async def run(self) -> None:
        """Accept until cancelled, and then close the listener.

        Raises:
            OSError: the listener is broken.
        """
        try:
            while True:
                for _ in range(_AT_ONCE):
                    await self._accept()
                # An accept that need not wait does not yield: in a flood, no other task would run.
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
                self._connections.refuse(ConnectionRefusal.DESCRIPTORS)
                await asyncio.sleep(_EXHAUSTED_PAUSE_S)
            return  # else the peer disconnected before it was accepted
        connection = self._connections.begin(address[0])
        if connection is None:
            accepted.close()
            return
        task = asyncio.create_task(self._open(accepted, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        connection.begin(task.cancel)

    async def _open(self, accepted: socket.socket, connection: AcceptedConnection) -> None:
        is_open = False
        try:
            # The kernel knows what the peer reads, also while the transport is closing.
            write_ms = int(self._timeouts.write_s * 1000)
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, write_ms)
            with contextlib.suppress(OSError):  # no handshake, or disconnected meanwhile
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: self._make_protocol(connection),
                    accepted,
                    ssl=self._tls,
                    # asyncio allows these timeouts with TLS only.
                    ssl_handshake_timeout=self._timeouts.handshake_s if self._tls else None,
                    ssl_shutdown_timeout=_TLS_SHUTDOWN_S if self._tls else None,
                )
                is_open = True
        finally:
            if not is_open:
                connection.end()
