"""The HTTP+SSE transport of protocol 2024-11-05, as a client.

The events of one GET are the server's messages; each message to it is a POST. The SDK's own client of it is
not used: it accepts events of 1 MiB, waits for the first one without limit, and a POST that fails ends it
without a word to the caller. Must not send to another origin.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError, JSONRPCRequest, jsonrpc_message_adapter
from pydantic import ValidationError

from relay.client.remote_tools.http_client import MAX_ANSWER_BYTES, origin_of
from schemas.error_roots import PeerError

ENDPOINT_WITHIN_S = 10.0

_OK = 200
_FIRST_NOT_OK = 300
_ENDED = (httpx2.HTTPError, httpx2.StreamError, anyio.BrokenResourceError, anyio.ClosedResourceError)
_log = logging.getLogger(__name__)


class NotOlderHttpError(PeerError):
    """The server does not speak this transport."""


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

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass
