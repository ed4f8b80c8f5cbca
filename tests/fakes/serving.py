"""Applications on a free loopback port, served as the relay serves its own."""

import asyncio
import resource
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from relay.http.connections import REQUEST_TIMEOUT_S, Bounds, Connections
from relay.http.http_protocol import PendingAnswer, WholeRequest
from relay.http.listener import SOCKET_TIMEOUTS, Hooks, SocketTimeouts, bind, serve
from relay.observability.metrics import Metrics
from schemas.addresses import HostPort
from tests.fakes.hub import counted

_WITHOUT_REQUESTS = Starlette()
_DEFERRED_S = 0.001
"""How long a text that is not urgent waits for others: no test has any on another connection."""


def _nothing(_request: WholeRequest) -> PendingAnswer | None:
    return None


class Server:
    """A server whose application each test puts there: starting one takes longer than most tests.

    Attributes:
        app: what answers requests; its lifespan is the test's affair.
        begin: what answers some of them without ASGI; nothing by default.
        address: where.
        connections: those that it holds.
    """

    def __init__(
        self, app: ASGIApp, address: HostPort, bounds: Bounds | None, request_timeout_s: float
    ) -> None:
        self.app = app
        self.begin: Callable[[WholeRequest], PendingAnswer | None] = _nothing
        self.address = address
        self._metrics = Metrics()
        bounds = bounds or Bounds.below(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self.connections = Connections(bounds, self._metrics.connections_refused, request_timeout_s)

    def refused(self, reason: str) -> float:
        """Return how many connections were refused for ``reason``."""
        return counted(self._metrics, "connections_refused_total", reason=reason)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application of the moment."""
        # Serving begins when the test has put its application there already.
        app = _WITHOUT_REQUESTS if scope["type"] == "lifespan" else self.app
        await app(scope, receive, send)

    def begin_now(self, request: WholeRequest) -> PendingAnswer | None:
        """Return what ``begin`` of the moment returns."""
        return self.begin(request)

    @classmethod
    @asynccontextmanager
    async def running(  # noqa: PLR0913, PLR0917 - as `serve` has it
        cls,
        tls: ssl.SSLContext | None = None,
        timeouts: SocketTimeouts = SOCKET_TIMEOUTS,
        bounds: Bounds | None = None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        hooks: Hooks | None = None,
        deferred_s: float = _DEFERRED_S,
    ) -> AsyncIterator["Server"]:
        """Hold a server."""
        with bind(HostPort("127.0.0.1", 0)) as listener:
            listener.listen()
            server = cls(Starlette(), HostPort(*listener.getsockname()), bounds, request_timeout_s)
            task = asyncio.create_task(
                serve(
                    server, listener, server.connections, tls, timeouts, server.begin_now, hooks, deferred_s
                )
            )
            try:
                yield server
            finally:
                server.app, server.begin = Starlette(), _nothing
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
