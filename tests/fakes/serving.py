"""Applications on a free loopback port, served as the relay serves its own."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from relay.serving import HANDSHAKE_TIMEOUT_S, bind, serve
from schemas.addresses import HostPort


class Server:
    """A server whose application each test puts there: starting one takes longer than most tests.

    Attributes:
        app: what answers; its lifespan is the test's affair.
        address: where.
    """

    def __init__(self, app: ASGIApp, address: HostPort) -> None:
        self.app = app
        self.address = address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on to the application of the moment."""
        await self.app(scope, receive, send)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, tls: ssl.SSLContext | None = None, handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> AsyncIterator["Server"]:
        """Hold a server."""
        with bind(HostPort("127.0.0.1", 0)) as listener:
            listener.listen()
            server = cls(Starlette(), HostPort(*listener.getsockname()))
            task = asyncio.create_task(serve(server, listener, tls, handshake_timeout_s))
            try:
                yield server
            finally:
                server.app = Starlette()
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
