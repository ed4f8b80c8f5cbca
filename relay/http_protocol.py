"""uvicorn's HTTP protocol with an end to its patience: what a stranger may make this process hold.

uvicorn bounds bodies, but not what comes before them: a head that never ends.
Must not look into what it bounds.
"""

import asyncio
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

REQUEST_TIMEOUT_S = 10.0
MAX_HEAD_BYTES = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """HTTP whose requests end, and come in within a time, or the connection does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._head_bytes = 0
        self._in_head = False
        self._in_body = False
        self._patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """Wait for the first request, but not for ever."""
        super().connection_made(transport)
        self._mind()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._forget()
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
        """Note that the head is over, and whom it is for."""
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

    def _mind(self) -> None:
        """Run out of patience while a request is on its way, and while nothing is; not while it is served."""
        served = bool(self.cycle) and not self.cycle.response_complete  # there is none before the first
        if self.transport.get_protocol() is not self or (served and not (self._in_head or self._in_body)):
            self._forget()
        elif self._patience is None:
            self._patience = self.loop.call_later(REQUEST_TIMEOUT_S, self.transport.abort)

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
