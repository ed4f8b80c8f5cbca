"""The connection to one server: the SDK's client in a task of its own, reopened when it was lost.

The task isolates callers: an exception of the SDK's task groups ends the connection, not a caller. Must not
repeat a call: what was in flight on a lost connection fails.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx2
from mcp.client import Client
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, Implementation, ToolListChangedNotification
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS

from relay.remote_tools.http_client import (
    ATTEMPT,
    MAX_ANSWER_BYTES,
    BearerAuth,
    GuardedHttpClient,
    WireAttempt,
    origin_of,
)
from relay.remote_tools.oauth import provider
from relay.remote_tools.redaction import Redaction
from relay.remote_tools.server_output import redacted_errors, redacted_log
from relay.remote_tools.servers import BearerToken, HttpServer, Server, StdioServer
from schemas.error_roots import PeerError
from schemas.faults import first_of
from schemas.tls import client_context, read_root

Streams = tuple[Any, Any]

_BAD_REQUEST = 400
_NOT_FOUND = 404
# An error of the server's own, and what the SDK makes of an answer without one.
_NOT_OF_A_REQUEST = (-32000, INTERNAL_ERROR)
_log = logging.getLogger(__name__)


class NotConnectedError(PeerError):
    """The server could not be reached, or does not speak MCP.

    Attributes:
        wire: what became of the requests.
        cause: the exception of the SDK.
    """

    def __init__(self, wire: WireAttempt, cause: BaseException) -> None:
        super().__init__(f"not connected: {type(cause).__name__}")
        self.wire = wire
        self.cause = cause


@dataclass(slots=True)
class _Live:
    """An open connection."""

    client: Client
    task: asyncio.Task[None]
    stop: asyncio.Event
    lost: bool = False


@dataclass(slots=True)
class ServerConnection:
    """The connection to ``server``; ``on_change`` is called when it announces that its tools changed.

    What the server makes this process print is redacted by ``redaction``.
    """

    server: Server
    on_change: Callable[[], None]
    redaction: Redaction
    mode: str = "auto"
    _live: _Live | None = None
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def session(self) -> ClientSession:
        """Return the session, connected.

        Raises:
            NotConnectedError: it cannot be.
        """
        live = self._live
        if live is None or live.lost:
            async with self._lock:
                if self._live is None or self._live.lost:
                    await self._close()
                    self._live = await self._connected()
                live = self._live
        return live.client.session

    def has_ended(self, wire: WireAttempt, error: MCPError) -> bool:
        """Return whether the answer shows that the session ended; then it is opened again when next needed.

        The specification has 404 for a session that the server does not know. Servers made from the example
        of the TypeScript SDK, and older ones of the Python SDK, answer 400 with an error of their own.
        """
        live = self._live
        if live is None or wire.fault is not None:
            return False
        ended = wire.status == _NOT_FOUND or (wire.status == _BAD_REQUEST and error.code in _NOT_OF_A_REQUEST)
        if not ended or live.client.protocol_version not in HANDSHAKE_PROTOCOL_VERSIONS:
            return False
        live.lost = True
        return True

    async def close(self) -> None:
        """Close the connection."""
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop.set()
            await asyncio.wait([live.task])

    async def _connected(self) -> _Live:
        wire = WireAttempt()
        ready: asyncio.Future[_Live] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(wire, ready))
        try:
            live = await ready
        except Exception as error:
            raise NotConnectedError(wire, first_of(error)) from error
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise
        live.task = task
        return live

    async def _run(self, wire: WireAttempt, ready: "asyncio.Future[_Live]") -> None:
        with redacted_log(self.redaction):
            await self._serve(wire, ready)

    async def _serve(self, wire: WireAttempt, ready: "asyncio.Future[_Live]") -> None:
        ATTEMPT.set(wire)
        live: _Live | None = None

        def lose() -> None:
            if live is not None:
                live.lost = True

        async def observe(message: object) -> None:
            if isinstance(message, ToolListChangedNotification):
                self.on_change()

        current = asyncio.current_task()
        assert current is not None  # noqa: S101 - this is a task
        try:
            client = Client(
                _open(self.server, lose, self.redaction),
                mode=self.mode,
                cache=None,
                message_handler=observe,
                client_info=Implementation(name="edge-kubelet-remote-tools", version="1"),
            )
            async with client:
                live = _Live(client, current, asyncio.Event())
                ready.set_result(live)
                await live.stop.wait()
        except Exception as error:  # noqa: BLE001 - whatever ends the SDK's tasks; raised or logged
            if not ready.done():
                ready.set_exception(error)
            else:
                # Without its text, which can be the server's.
                _log.warning("the connection to an MCP server has ended: %s", type(first_of(error)).__name__)
        finally:
            lose()
            if not ready.done():
                ready.cancel()


@asynccontextmanager
async def _open(server: Server, lose: Callable[[], None], redaction: Redaction) -> AsyncIterator[Streams]:
    """Open the streams that the SDK's client runs on; ``lose`` is called when the server ends them."""
    if isinstance(server, StdioServer):
        parameters = StdioServerParameters(
            command=server.command,
            args=list(server.arguments),
            env=dict(server.environment),
            cwd=server.directory,
        )
        async with redacted_errors(redaction) as errors, stdio_client(parameters, errors) as (read, write):
            errors.close()
            yield _WatchedStream(read, lose), write
        return
    async with (
        await _http_client(server) as http,
        streamable_http_client(server.url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES) as streams,
    ):
        yield streams


async def _http_client(server: HttpServer) -> GuardedHttpClient:
    roots = read_root(server.root) if server.root is not None else None
    tls = client_context(roots, server.client_certificate)
    credential = server.credential
    auth: httpx2.Auth | None
    if credential is None:
        auth = None
    elif isinstance(credential, BearerToken):
        auth = BearerAuth(origin_of(httpx2.URL(server.url)), credential)
    else:
        auth = await provider(server.url, credential)
    return GuardedHttpClient(server.url, auth, tls, server.root)


class _WatchedStream:
    """A read stream that reports its end: the SDK does not."""

    def __init__(self, inner: Any, ended: Callable[[], None]) -> None:
        self._inner = inner
        self._ended = ended

    async def receive(self) -> Any:
        return await self._inner.receive()

    async def aclose(self) -> None:
        await self._inner.aclose()

    def __aiter__(self) -> "_WatchedStream":
        return self

    async def __anext__(self) -> Any:
        try:
            return await self._inner.__anext__()
        except StopAsyncIteration:
            self._ended()
            raise

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        ended: bool | None = await self._inner.__aexit__(kind, error, trace)
        return ended
