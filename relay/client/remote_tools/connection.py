"""The connection to one server: the SDK's client in a task of its own, reopened when it was lost.

The task isolates callers: an exception of the SDK's task groups ends the connection, not a caller. Must not
repeat a call: what was in flight on a lost connection fails.

The transport of protocol 2024-11-05, HTTP+SSE, is spoken here: the events of one GET are the server's
messages, each message to it is a POST. The SDK's own client of it accepts events of 1 MiB, waits for the
first one without limit, and a POST that fails ends it without a word to the caller.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from attrs import define
from mcp.client import Client
from mcp.client.session import ClientSession
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    INTERNAL_ERROR,
    ErrorData,
    Implementation,
    JSONRPCError,
    JSONRPCRequest,
    ToolListChangedNotification,
    jsonrpc_message_adapter,
)
from mcp_types.version import MODERN_PROTOCOL_VERSIONS
from pydantic import ValidationError

from relay.client.http import tls_by
from relay.client.remote_tools.redaction import Redaction, redacted_errors, redacted_log
from relay.client.remote_tools.servers import (
    ATTEMPT,
    MAX_ANSWER_BYTES,
    BearerAuth,
    BearerToken,
    ConfiguredProvider,
    GuardedHttpClient,
    HttpServer,
    Server,
    StdioServer,
    WireAttempt,
    origin_of,
    read_secret,
)
from schemas.error_roots import PeerError
from schemas.faults import first_of
from schemas.pacing import Backoff

LONGEST_S = 3600.0
"""How long a list of tools is used at most, even of a server that would announce a change."""
UNSTATED_S = 60.0
"""How long the list of a server is used that states nothing: one of the old era."""

ENDPOINT_WITHIN_S = 10.0
_CLOSED_WITHIN_S = 2.0
_OK = 200
_FIRST_NOT_OK = 300
_ENDED = (httpx2.HTTPError, httpx2.StreamError, anyio.BrokenResourceError, anyio.ClosedResourceError)
_SUBSCRIBED_WITHIN_S = 10.0
# So long the first list waits for the subscription, which spares a second one. A proxy may hold it back.
_AWAITED_S = 1.0
_MODES_OF_THE_OLD_ERA = ("auto", "legacy")
# By these the specification has a client recognise that a server may speak the older transport.
_NO_STREAMABLE_HTTP = (400, 404, 405)
_BAD_REQUEST = 400
_NOT_FOUND = 404
# An error of the server's own, and what the SDK makes of an answer without one.
_NOT_OF_A_REQUEST = (-32000, INTERNAL_ERROR)
_log = logging.getLogger("relay.remote_tools.connection")


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


class NotOlderHttpError(PeerError):
    """The server does not speak this transport."""


@dataclass(slots=True)
class _Live:
    """An open connection."""

    client: Client
    task: asyncio.Task[None]
    stop: asyncio.Event
    lost: bool = False
    followed: bool = False

    @property
    def is_modern(self) -> bool:
        return self.client.protocol_version in MODERN_PROTOCOL_VERSIONS


@dataclass(slots=True)
class ServerConnection:
    """The connection to one server.

    Attributes:
        server: which.
        on_change: called when its tools changed, or may have while it could not say so.
        redaction: for what it makes this process print.
        follow_again: how long to wait before a subscription is made again.
        sleep: waits.
        mode: the protocol era, as ``mcp.Client`` has it.
    """

    server: Server
    on_change: Callable[[], None]
    redaction: Redaction
    follow_again: Backoff
    sleep: Callable[[float], Awaitable[None]]
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
        if live is None or live.is_modern or wire.fault is not None:
            return False
        ended = wire.status == _NOT_FOUND or (wire.status == _BAD_REQUEST and error.code in _NOT_OF_A_REQUEST)
        if ended:
            self._lose(live)
        return ended

    def list_is_good_for_s(self, ttl_ms: int) -> float:
        """Return how long a list of tools may be used that the server says is good for ``ttl_ms``."""
        live = self._live
        if live is None or live.lost:
            return 0
        if live.followed:
            return LONGEST_S
        return min(ttl_ms / 1000, LONGEST_S) if live.is_modern else UNSTATED_S

    @property
    def is_modern(self) -> bool:
        """Whether the server that is connected speaks the new era."""
        return self._live is not None and self._live.is_modern

    async def close(self) -> None:
        async with self._lock:
            await self._close()

    async def _close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop.set()
            # A server's program is ended by the SDK, within bounds, and must not be left in the middle of it.
            bound_s = _CLOSED_WITHIN_S if isinstance(self.server, HttpServer) else None
            _, open_still = await asyncio.wait([live.task], timeout=bound_s)
            if open_still:
                # The server does not answer that the session is over.
                live.task.cancel()
                await asyncio.wait(open_still)

    async def _connected(self) -> _Live:
        try:
            return await self._connected_over(older=False)
        except NotConnectedError as error:
            may_be_older = (
                isinstance(self.server, HttpServer)
                and self.mode in _MODES_OF_THE_OLD_ERA
                and error.wire.fault is None
                and error.wire.status in _NO_STREAMABLE_HTTP
            )
            if not may_be_older:
                raise
            with suppress(NotConnectedError):
                return await self._connected_over(older=True)
            raise

    async def _connected_over(self, *, older: bool) -> _Live:
        wire = WireAttempt()
        ready: asyncio.Future[_Live] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(wire, ready, older=older))
        try:
            return await ready
        except Exception as error:
            raise NotConnectedError(wire, first_of(error)) from error
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait([task])
            raise

    async def _run(self, wire: WireAttempt, ready: "asyncio.Future[_Live]", *, older: bool) -> None:
        ATTEMPT.set(wire)
        live: _Live | None = None

        def lose() -> None:
            if live is not None:
                self._lose(live)

        async def observe(message: object) -> None:
            if isinstance(message, ToolListChangedNotification):
                self.on_change()

        current = asyncio.current_task()
        assert current is not None  # noqa: S101 - this is a task
        try:
            client = Client(
                _open(self.server, lose, self.redaction, older=older),
                mode="legacy" if older else self.mode,
                cache=None,
                message_handler=observe,
                client_info=Implementation(name="edge-kubelet-remote-tools", version="1"),
            )
            with redacted_log(self.redaction):
                async with client:
                    live = _Live(client, current, asyncio.Event())
                    async with self._followed(live):
                        ready.set_result(live)
                        await live.stop.wait()
        except Exception as error:  # noqa: BLE001 - whatever ends the SDK's tasks; raised or logged
            first = first_of(error)
            # The SDK may find its own streams closed as it ends what was told to.
            is_wanted = live is not None and live.stop.is_set() and isinstance(first, _ENDED)
            if not ready.done():
                ready.set_exception(error)
            elif not is_wanted:
                # Without its text, which can be the server's.
                _log.warning("the connection to an MCP server has ended: %s", type(first).__name__)
        finally:
            lose()
            if not ready.done():
                ready.cancel()

    def _lose(self, live: _Live) -> None:
        live.lost = True
        # It may be another program by the time that it is there again.
        self.on_change()

    @asynccontextmanager
    async def _followed(self, live: _Live) -> AsyncIterator[None]:
        """Follow the changes that a server of the new era announces, if it says that it does."""
        tools = live.client.server_capabilities.tools
        if not (live.is_modern and tools is not None and tools.list_changed):
            yield
            return
        answered = asyncio.Event()
        following = asyncio.create_task(self._follow(live, answered))
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(answered.wait(), _AWAITED_S)
            yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _follow(self, live: _Live, answered: asyncio.Event) -> None:
        self.follow_again.reset()
        while True:
            # The requests of a subscription are none of the operation that has opened the connection.
            ATTEMPT.set(WireAttempt())
            try:
                async with (
                    asyncio.timeout(_SUBSCRIBED_WITHIN_S) as bound,
                    live.client.listen(tools_list_changed=True) as changes,
                ):
                    bound.reschedule(None)
                    live.followed = bool(changes.honored.tools_list_changed)
                    self.follow_again.reset()
                    self.on_change()
                    answered.set()
                    # The events themselves are handled where those of the old era are.
                    async for _ in changes:
                        pass
            except Exception as error:  # noqa: BLE001 - whatever ends it, it is made again
                _log.info("no subscription to the changes of an MCP server: %s", type(error).__name__)
            if live.followed:
                live.followed = False
                self.on_change()
            answered.set()
            await self.sleep(self.follow_again.next_s())


@asynccontextmanager
async def _open(
    server: Server, lose: Callable[[], None], redaction: Redaction, *, older: bool
) -> AsyncIterator[tuple[Any, Any]]:
    """Open the streams that the SDK's client runs on; ``lose`` is called when the server ends them.

    ``older``: over HTTP, by the transport that was before Streamable HTTP.
    """
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
    async with await _http_client(server) as http:
        if older:
            async with older_http_streams(server.url, http) as (messages, posts):
                yield _WatchedStream(messages, lose), posts
        else:
            async with streamable_http_client(
                server.url, http_client=http, max_sse_event_size=MAX_ANSWER_BYTES
            ) as streams:
                yield streams


async def _http_client(server: HttpServer) -> GuardedHttpClient:
    credential = server.credential
    auth: httpx2.Auth | None = None
    if isinstance(credential, BearerToken):
        auth = BearerAuth(origin_of(httpx2.URL(server.url)), credential)
    elif credential is not None:
        secret = await read_secret(credential.client_secret)
        auth = ConfiguredProvider(server.url, credential, secret)
    tls = tls_by(server.root, server.client_certificate)
    return GuardedHttpClient(server.url, auth, tls, server.root)


@define(eq=False, repr=False)
class _WatchedStream:
    """A read stream that reports its end: the SDK does not."""

    _inner: Any
    _ended: Callable[[], None]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def __aiter__(self) -> AsyncIterator[Any]:
        async for item in self._inner:
            yield item
        self._ended()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._inner.__aexit__(*error)


@asynccontextmanager
async def older_http_streams(
    url: str, http: httpx2.AsyncClient
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Any], "_Posts"]]:
    """Open the streams that the SDK's client runs on; the first ends when the server's does.

    Raises:
        NotOlderHttpError: there is no stream of events at ``url``, or none that begins as it has to.
    """
    async with http.sse(url, max_event_size=MAX_ANSWER_BYTES) as source:
        if source.response.status_code != _OK:
            raise NotOlderHttpError(f"HTTP {source.response.status_code}")
        events = aiter(source)
        endpoint = await _endpoint(url, events)
        incoming, messages = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        with incoming, messages:
            reading = asyncio.create_task(_read(events, incoming))
            try:
                yield messages, _Posts(endpoint, http, incoming)
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)


async def _endpoint(url: str, events: AsyncIterator[httpx2.ServerSentEvent]) -> httpx2.URL:
    try:
        async with asyncio.timeout(ENDPOINT_WITHIN_S):
            first = await anext(events)
        endpoint = httpx2.URL(url).join(first.data)
    except (*_ENDED, StopAsyncIteration, TimeoutError, httpx2.InvalidURL) as error:
        raise NotOlderHttpError(type(error).__name__) from None
    if first.event != "endpoint" or origin_of(endpoint) != origin_of(httpx2.URL(url)):
        raise NotOlderHttpError("the first event is not an endpoint of the same origin")
    return endpoint


async def _read(
    events: AsyncIterator[httpx2.ServerSentEvent],
    incoming: MemoryObjectSendStream[SessionMessage | Exception],
) -> None:
    with incoming, suppress(*_ENDED):
        async for event in events:
            if event.event != "message":
                continue
            try:
                message = jsonrpc_message_adapter.validate_json(event.data, by_name=False)
            except ValidationError:
                _log.warning("an event of an MCP server is not a message")
            else:
                await incoming.send(SessionMessage(message))


@dataclass(frozen=True, slots=True)
class _Posts:
    """The stream that the SDK's client writes to. A request whose POST fails is answered with an error."""

    endpoint: httpx2.URL
    http: httpx2.AsyncClient
    incoming: MemoryObjectSendStream[SessionMessage | Exception]

    async def send(self, item: SessionMessage) -> None:
        message = item.message
        body = message.model_dump(by_alias=True, mode="json", exclude_unset=True)
        response = await self.http.post(self.endpoint, json=body)
        if response.status_code >= _FIRST_NOT_OK and isinstance(message, JSONRPCRequest):
            # As the SDK has it for the newer transport.
            error = ErrorData(code=INTERNAL_ERROR, message="Server returned an error response")
            await self.incoming.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=message.id, error=error)))

    async def aclose(self) -> None:
        pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        pass
