"""How the relay serves: the one socket, the server on it, and the limits of both.

Must not know what is served.
"""

import asyncio
import contextlib
import logging
import os
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from relay.http_protocol import BoundedHttp
from relay.websocket_protocol import BoundedWebSocket
from schemas.addresses import HostPort
from schemas.frames import MAX_FRAME_BYTES

HANDSHAKE_TIMEOUT_S = 10.0
"""Who does not get through TLS in this time is let go of."""

_PING_INTERVAL_S = 15
_PING_TIMEOUT_S = 10
_SHUTDOWN_S = 3
_TLS_GOODBYE_S = 2.0


class _Server(uvicorn.Server):
    """uvicorn on one socket, over TLS if there is a context, with an end to its patience with handshakes.

    Without its signal handlers: who runs the relay decides when it ends.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        listener: socket.socket,
        tls: ssl.SSLContext | None,
        handshake_timeout_s: float,
    ) -> None:
        super().__init__(config)
        self._listener = listener
        self._tls = tls
        self._handshake_timeout_s = handshake_timeout_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - ours is known
        """Begin to serve, not as uvicorn does: it would wait a minute for each handshake."""
        await super().startup(sockets=[])
        server = await asyncio.get_running_loop().create_server(
            self._protocol,
            sock=self._listener,
            backlog=self.config.backlog,
            ssl=self._tls,
            # asyncio wants no limits to what there is not.
            ssl_handshake_timeout=self._handshake_timeout_s if self._tls else None,
            ssl_shutdown_timeout=_TLS_GOODBYE_S if self._tls else None,
        )
        self.servers.append(server)

    def _protocol(self) -> asyncio.Protocol:
        return BoundedHttp(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(
    application: ASGIApp,
    listener: socket.socket,
    tls: ssl.SSLContext | None = None,
    handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
) -> None:
    """Serve ``application`` on ``listener``, which is bound, until cancelled."""
    config = uvicorn.Config(
        application,
        http=BoundedHttp,
        ws=BoundedWebSocket,
        ws_max_size=MAX_FRAME_BYTES,
        ws_ping_interval=_PING_INTERVAL_S,
        ws_ping_timeout=_PING_TIMEOUT_S,
        ws_per_message_deflate=False,
        log_config=None,
        log_level=logging.CRITICAL,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config, listener, tls, handshake_timeout_s)
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.should_exit = True
        await serving
        raise


def bind(listen: HostPort) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {listen}: {os.strerror(error.errno or 0)}") from None
    return listener
