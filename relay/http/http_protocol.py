"""uvicorn's HTTP protocol with limits: what a stranger may make this process hold.

uvicorn bounds bodies, but neither a head that never ends nor the requests that wait behind another, and for a
request it waits without an end. Must not look into what it bounds.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from relay.http.connections import connection_in

MAX_HEAD_BYTES = 64 * 1024
MAX_PIPELINED = 8
"""How many requests may wait on a connection while another is served."""


class PipelineError(Exception):
    """More requests wait on one connection than may: thrown to end the parsing of what came with them."""


class JoinedHead:
    """The transport of one response, which sends its head in one write with what follows at once.

    uvicorn writes them apart, and each write wakes the client. Holds back no body, so that what bounds a
    stream's buffer works as before. ``is_started`` returns whether the response has begun: before that comes
    only the interim ``100 Continue``.
    """

    __slots__ = ("_head", "_is_started", "_transport")

    def __init__(self, transport: asyncio.Transport, is_started: Callable[[], bool]) -> None:
        self._transport = transport
        self._is_started = is_started
        self._head: bytes | None = None

    def write(self, data: bytes) -> None:
        """Send ``data``, after the head if that has not been sent."""
        if self._head is None and self._is_started():
            self._head = data
            # What follows may take a while: a stream begins with silence.
            asyncio.get_running_loop().call_soon(self._flush)
        elif self._head:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


class BoundedHttp(HttpToolsProtocol):
    """HTTP whose requests end, come in within a time, and do not pile up, or the connection ends."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._connection = connection_in(self.app_state)
        self._head_bytes = 0
        self._in_head = False
        self._in_body = False
        self._served: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Begin; the time for the first request runs since the connection was accepted."""
        super().connection_made(transport)
        self._connection.begin(transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """End, and tell so what is served: uvicorn tells the request that came last, which may only wait."""
        self._connection.end()
        if self._served is not None and not self._served.response_complete:
            self._served.disconnected = True
            self._served.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, and give up on a head that does not end."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.transport.abort()
        self._mind()

    def on_message_begin(self) -> None:
        """Note that a head begins."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note that the head is over, and whom it is for; end the connection if too many requests wait."""
        if len(self.pipeline) >= MAX_PIPELINED:
            self.transport.abort()
            raise PipelineError
        self._in_head, self._in_body = False, True
        if not self.url.startswith(b"/"):
            self._take_host_from_target()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Note that the request is over."""
        self._in_body = False
        super().on_message_complete()

    def _take_host_from_target(self) -> None:
        """Let no request be for two hosts: a name in the target counts too (RFC 9112 section 3.2.2)."""
        try:
            target = httptools.parse_url(self.url)
        except httptools.HttpParserInvalidURLError:
            return  # uvicorn answers 400
        if target.host:
            name = target.host + (b":%d" % target.port if target.port else b"")
            hosts = {value.strip(b" \t").lower() for header, value in self.headers if header == b"host"}
            if hosts != {name.lower()}:
                self.headers.append((b"host", name))  # which is one too many, unless there was none

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._served = cycle
        cycle.transport = JoinedHead(self.transport, lambda: cycle.response_started)  # type: ignore[assignment]  # as a cycle uses it
        super()._start_asgi_task(cycle, app)

    def _mind(self) -> None:
        """Let the time run while a request is on its way, and while none is; not while one is served."""
        served = self._served is not None and not self._served.response_complete
        if self.transport.get_protocol() is not self:
            self._connection.upgrade()
        elif served and not (self._in_head or self._in_body):
            self._connection.rest()
        else:
            self._connection.expect()
