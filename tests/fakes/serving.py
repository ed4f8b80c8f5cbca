"""Applications on a free loopback port, served as the relay serves its own."""

import asyncio
import resource
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from relay.http.connections import REQUEST_TIMEOUT_S, Bounds, Connections
from relay.http.http_protocol import PendingAnswer, WholeRequest
from relay.http.listener import SOCKET_TIMEOUTS, SocketTimeouts, bind, serve
from relay.http.proxies import TrustedProxies
from relay.http.websocket_protocol import BoundedWebSocket
from relay.observability.metrics import Metrics
from schemas.addresses import HostPort
from tests.fakes.hub import counted

_WITHOUT_REQUESTS = Starlette()
_DEFERRED_S = 0.001
"""How long a text that is not urgent waits for others: no test has any on another connection."""


def _nothing(_request: WholeRequest) -> PendingAnswer | None:
    return None


async def _drained() -> None:
    return


async def refuse(socket: BoundedWebSocket) -> None:
    socket.reject()


class Server:
    """A server whose application each test puts there: starting one takes longer than most tests.

    Attributes:
        app: what answers requests; its lifespan is the test's affair.
        begin: what answers some of them without ASGI; nothing by default.
        serve_socket: what serves WebSockets.
        address: where.
        connections: those that it holds.
    """

    def __init__(
        self,
        app: ASGIApp,
        address: HostPort,
        bounds: Bounds | None,
        request_timeout_s: float,
        proxies: TrustedProxies,
    ) -> None:
        self.app = app
        self.begin: Callable[[WholeRequest], PendingAnswer | None] = _nothing
        self.serve_socket: Callable[[BoundedWebSocket], Awaitable[None]] = refuse
        self.address = address
        self._metrics = Metrics()
        bounds = bounds or Bounds.below(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.connections = Connections(
            bounds, self._metrics.connections_refused, request_timeout_s, proxies=proxies
        )

    def refused(self, reason: str) -> float:
        """Return how many connections were refused for ``reason``."""
        return counted(self._metrics, "connections_refused_total", reason=reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application of the moment."""
        # Serving begins when the test has put its application there already.
        app = _WITHOUT_REQUESTS if scope["type"] == "lifespan" else self.app
        await app(scope, receive, send)

    @classmethod
    @asynccontextmanager
    async def running(  # noqa: PLR0913, PLR0917 - as `serve` has it
        cls,
        tls: ssl.SSLContext | None = None,
        timeouts: SocketTimeouts = SOCKET_TIMEOUTS,
        bounds: Bounds | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        started: Callable[[], None] = lambda: None,
        drain: Callable[[], Awaitable[None]] = _drained,
        deferred_s: float = _DEFERRED_S,
        proxies: TrustedProxies | None = None,
    ) -> AsyncIterator["Server"]:
        with bind(HostPort("127.0.0.1", 0)) as listener:
            listener.listen()
            address = HostPort(*listener.getsockname())
            server = cls(Starlette(), address, bounds, request_timeout_s, proxies or TrustedProxies())
            task = asyncio.create_task(
                serve(
                    server,
                    listener,
                    server.connections,
                    tls,
                    timeouts=timeouts,
                    started=started,
                    drain=drain,
                    deferred_s=deferred_s,
                )
            )
            try:
                yield server
            finally:
                server.app, server.begin, server.serve_socket = Starlette(), _nothing, refuse
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
