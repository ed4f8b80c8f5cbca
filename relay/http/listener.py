"""Serves on one socket: accepts connections within their limits, and runs the server on them.

Must not know what is served.
"""

import asyncio
import contextlib
import errno
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from attrs import define, field
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.server import Server

from relay.http.connections import CONNECTION_IN_STATE, AcceptedConnection, ConnectionRefusal, Connections
from relay.http.http_protocol import BoundedHttp, PendingAnswer, WholeRequest
from relay.http.proxies import ProxyHeaderError, read_proxy_header
from relay.http.request_meter import TLS_COST
from relay.http.turns import DEFERRED_S, Deferral, Keepalive, TurnEnd, Turns
from relay.http.websocket_protocol import BoundedWebSocket
from schemas.addresses import HostPort
from schemas.files import is_shown_to_group

HANDSHAKE_TIMEOUT_S = 10.0
"""How long a TLS handshake may take."""
WRITE_TIMEOUT_S = 20.0
"""How long a peer may read nothing of what is sent to it."""

_PING_INTERVAL_S = 15
_PING_TIMEOUT_S = 10
_SHUTDOWN_S = 3
_DATE_S = 1.0
"""How old the date in an answer's head may be."""
_BACKLOG = 2048
"""The connections that wait in the kernel to be accepted, if its ``somaxconn`` permits as many."""

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


@define(eq=False, repr=False)
class Acceptor:
    """Accepts from ``listener``, over TLS if there is a context; ``make_protocol`` makes each protocol.

    asyncio's own server accepts every connection and does the handshake; this one knows the limits first.
    """

    _listener: socket.socket
    _connections: Connections
    _make_protocol: Callable[[AcceptedConnection], asyncio.Protocol]
    _tls: ssl.SSLContext | None
    _timeouts: SocketTimeouts
    _opening: set[asyncio.Task[None]] = field(init=False, factory=set)

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
        connection = self._connections.begin(address[0] if address else "")
        if connection is None:
            accepted.close()
            return
        task = asyncio.create_task(self._open(accepted, connection))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)
        connection.begin(task.cancel)

    async def _open(self, accepted: socket.socket, connection: AcceptedConnection) -> None:
        is_open = is_passed_on = False
        try:
            # The kernel knows what the peer reads, also while the transport is closing.
            write_ms = int(self._timeouts.write_s * 1000)
            if accepted.family != socket.AF_UNIX:
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, write_ms)
            with contextlib.suppress(OSError):  # no handshake, or disconnected meanwhile
                if not await self._begins(accepted, connection):
                    return
                is_passed_on = True
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
            if not is_passed_on:
                accepted.close()
            if not is_open:
                connection.end()

    async def _begins(self, accepted: socket.socket, connection: AcceptedConnection) -> bool:
        """Return whether it is served, once its source may begin another one."""
        if connection.source is None:
            try:
                client = await read_proxy_header(accepted)
            except ProxyHeaderError:
                self._connections.refuse(ConnectionRefusal.PROXY)
                return False
            if client is None:
                return True  # each request says whom it is from
            if not connection.come_from(client):
                return False
        if connection.source is not None:
            await connection.meter.entered(connection.source, TLS_COST if self._tls is not None else 1.0)
        return True


class Application(Protocol):
    """What is served: an ASGI application that passes by ASGI where it costs too much."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...

    def begin(self, request: WholeRequest) -> PendingAnswer | None:
        """As ``Begin``."""

    def serve_socket(self, socket: BoundedWebSocket) -> Awaitable[None]:
        """As ``ServeSocket``."""


async def _nothing_to_drain() -> None:
    return


class _Server(Server):
    """uvicorn behind our own acceptor, and without its signal handlers: the caller of ``serve`` ends it."""

    def __init__(
        self,
        config: Config,
        connections: Connections,
        started: Callable[[], None],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        super().__init__(config)
        self.acceptor: Acceptor
        self._connections = connections
        self._started = started
        self._drain = drain
        self._ended = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:  # noqa: ARG002 - the acceptor has its own
        """Begin to serve. uvicorn itself accepts without limits, and waits a minute for a handshake."""
        await super().startup(sockets=[])
        self.acceptor.listen(self.config.backlog)
        self._accepting = asyncio.create_task(self.acceptor.run())
        self._accepting.add_done_callback(self.end)
        self._started()

    async def main_loop(self) -> None:
        """Refresh the date of answers until ``end``: uvicorn would wake ten times a second to see of that."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _DATE_S)

    def end(self, _accepting: "asyncio.Task[None] | None" = None) -> None:
        self.should_exit = True
        self._ended.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, drain, give other requests a few seconds, and close what is left.

        Raises:
            OSError: the listener broke, which ended the server.
        """
        self._accepting.cancel()
        await asyncio.wait([self._accepting])
        # Not the nodes' WebSockets: calls in flight need them.
        for connection in list(self.server_state.connections):
            if isinstance(connection, BoundedHttp):
                connection.shutdown()
        await self._drain()
        await super().shutdown(sockets)
        self._connections.abort()
        if not self._accepting.cancelled():
            self._accepting.result()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def serve(  # noqa: PLR0913 - what comes in from outside
    application: Application,
    listener: socket.socket,
    connections: Connections,
    tls: ssl.SSLContext | None = None,
    *,
    timeouts: SocketTimeouts = SOCKET_TIMEOUTS,
    started: Callable[[], None] = lambda: None,
    drain: Callable[[], Awaitable[None]] = _nothing_to_drain,
    deferred_s: float = DEFERRED_S,
) -> None:
    """Serve ``application`` on ``listener``, which is bound, within ``connections``' bounds, until cancelled.

    ``started`` is called when connections are accepted. ``drain`` is awaited when no more are, and returns
    when the nodes' may be closed. Texts that are not urgent wait for ``deferred_s`` at most.

    Raises:
        OSError: the listener cannot be used.
    """
    config = Config(
        application,
        http=BoundedHttp,
        ws=BoundedWebSocket,  # which BoundedHttp makes; without one, uvicorn serves an upgrade as a request
        backlog=_BACKLOG,
        log_config=None,
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server = _Server(config, connections, started, drain)
    loop = asyncio.get_running_loop()
    turns = Turns(
        TurnEnd(loop), Deferral(loop, deferred_s), Keepalive(loop, _PING_INTERVAL_S, _PING_TIMEOUT_S)
    )

    def make_protocol(connection: AcceptedConnection) -> BoundedHttp:
        return BoundedHttp(
            config=config,
            server_state=server.server_state,
            app_state={**server.lifespan.state, CONNECTION_IN_STATE: connection},
            connection=connection,
            turns=turns,
            begin=application.begin,
            serve_socket=application.serve_socket,
        )

    server.acceptor = Acceptor(listener, connections, make_protocol, tls, timeouts)
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.shield(serving)
    except asyncio.CancelledError:
        server.end()
        await serving
        raise


def bind(listen: HostPort) -> socket.socket:
    """Return a listening socket.

    Raises:
        OSError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in listen.host else socket.AF_INET
    # asyncio sets TCP_NODELAY on sockets that name their protocol; without it a command waits 40 ms for the
    # acknowledgement of what was sent before.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((listen.host, listen.port))
    except OSError as error:
        listener.close()
        # Of a name that is not resolved, the number is none of the system's.
        raise OSError(error.errno, f"cannot listen on {listen}: {error.strerror}") from None
    return listener


def bind_unix(path: Path) -> socket.socket:
    """Return a listening Unix socket for its user; also for its group in a directory that is open to that.

    A socket that a relay has left behind is replaced.

    Raises:
        OSError: another process serves it, or the file cannot be made.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Before it is bound: Linux gives the file this mode, so that it is never another's to use.
        os.fchmod(listener.fileno(), 0o600)
        if path.is_socket() and not _is_served(path):
            path.unlink()
        listener.bind(str(path))
        if is_shown_to_group(path.parent):
            path.chmod(0o660)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {path}: {error.strerror}") from None
    return listener


def _is_served(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.setblocking(False)  # noqa: FBT003 - as the standard library has it
        return client.connect_ex(str(path)) != errno.ECONNREFUSED
