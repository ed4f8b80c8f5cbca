"""A small HTTP server that sends whatever bytes a test wants, and knows what it was asked."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from schemas.files import PRIVATE, write_atomic
from schemas.keys import private_key_to_pem
from schemas.tls import load_chain
from tests.fakes.server_ca import issue_old_server
from tests.fakes.signer import SimulatedCa, key_named

BOUND_S = 30


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it came."""

    head: str
    body: bytes

    @property
    def method(self) -> str:
        return self.head.split(" ", 1)[0]


Responder = Callable[[Asked, asyncio.StreamWriter], Awaitable[None]]


@dataclass(slots=True)
class RawServer:
    """A server on a free loopback port.

    Attributes:
        url: where.
        asked: the requests, in order.
    """

    url: str
    asked: list[Asked] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def running(
        cls, respond: Responder | bytes, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator["RawServer"]:
        """Hold a server that answers with ``respond``, or with the same bytes, and closes the connection."""
        this = cls("")
        serving: set[asyncio.Task[None]] = set()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                async with asyncio.timeout(BOUND_S):
                    asked = await _read(reader)
                    this.asked.append(asked)
                    if isinstance(respond, bytes):
                        writer.write(respond)
                        await writer.drain()
                    else:
                        await respond(asked, writer)
            finally:
                writer.close()
                await writer.wait_closed()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            serving.add(asyncio.ensure_future(serve(reader, writer)))

        server = await asyncio.start_server(begin, "127.0.0.1", 0, ssl=tls)
        port = server.sockets[0].getsockname()[1]
        this.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
        async with server:
            yield this
        # A client that closed is no failure of the server's.
        for ended in await asyncio.gather(*serving, return_exceptions=True):
            assert ended is None or isinstance(ended, OSError | asyncio.IncompleteReadError), ended


def http_answer(status: int, body: bytes, **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} Whatever", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("ascii") + body


def json_answer(value: object, status: int = 200, /, **headers: str) -> bytes:
    """Return an answer of JSON: ``value``, or these bytes."""
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return http_answer(status, body, **{"Content-Type": "application/json", **headers})


def server_context(
    ca: SimulatedCa, directory: Path, now_ms: int, *, host: str = "127.0.0.1", valid_days: int = 30
) -> ssl.SSLContext:
    """Return the context of a server under ``host``, with a certificate of ``ca``."""
    key = key_named(f"server {host}")
    pem = issue_old_server(
        ca.root_pem,
        ca.key,
        name="server",
        hosts=[host],
        public_key=bytes(key.verify_key),
        now_ms=now_ms,
        valid_days=valid_days,
        serial=now_ms,
    )
    certificate, key_file = directory / "server.pem", directory / "server.key"
    write_atomic(certificate, pem)
    write_atomic(key_file, private_key_to_pem(key), PRIVATE)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    load_chain(context, certificate, key_file)
    return context


async def _read(reader: asyncio.StreamReader) -> Asked:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = 0
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            length = int(value)
    return Asked(head, await reader.readexactly(length))
