"""A load generator on raw asyncio streams: an HTTP client library would measure itself."""

import asyncio
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

_HEADERS_END = b"\r\n\r\n"
_LENGTH = b"content-length:"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A server of MCP, and the requests to send it in turn: complete HTTP/1.1 requests."""

    port: int
    requests: Sequence[bytes]


def tool_call(port: int, tool: str, token: str | None) -> bytes:
    """Return a ``tools/call`` of the new era as the bytes of an HTTP request."""
    body = json.dumps(
        {
            "jsonrpc": "2.0",
            "id": 1,
            "method": "tools/call",
            "params": {
                "name": tool,
                "arguments": {"message": "ping"},
                "_meta": {
                    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                    "io.modelcontextprotocol/clientCapabilities": {},
                },
            },
        }
    ).encode("ascii")
    headers = [
        "POST /mcp HTTP/1.1",
        f"Host: 127.0.0.1:{port}",
        "Content-Type: application/json",
        "Accept: application/json, text/event-stream",
        "MCP-Protocol-Version: 2026-07-28",
        "Mcp-Method: tools/call",
        f"Mcp-Name: {tool}",
        f"Content-Length: {len(body)}",
    ]
    if token is not None:
        headers.append(f"Authorization: Bearer {token}")
    return "\r\n".join(headers).encode("ascii") + _HEADERS_END + body


async def calls_per_second(target: Target, connections: int, seconds: float) -> float:
    """Return how many calls a second succeed over ``connections`` kept-alive connections."""
    turns = itertools.cycle(target.requests)
    end = time.perf_counter() + seconds
    counts = [0] * connections

    async def worker(index: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        while time.perf_counter() < end:
            await _exchange(reader, writer, next(turns))
            counts[index] += 1
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(worker(index) for index in range(connections)))
    return sum(counts) / (time.perf_counter() - started)


async def latencies_ms(target: Target, count: int, pause_s: float = 0.0) -> list[float]:
    """Return how long each of ``count`` calls took, one after the other on one connection, with pauses."""
    turns = itertools.cycle(target.requests)
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    took = []
    for _ in range(count):
        started = time.perf_counter()
        await _exchange(reader, writer, next(turns))
        took.append((time.perf_counter() - started) * 1000)
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
    return took


async def call_once(port: int, request: bytes) -> bytes:
    """Return the body of the answer to one call, whatever it says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = await _answer(reader, writer, request)
    writer.close()
    return body


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    body = await _answer(reader, writer, request)
    # A refusal is quick: a bench that counted it would praise a server that does nothing.
    if b'"isError":false' not in body:
        raise RuntimeError(f"a call failed: {body[:500]!r}")


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> bytes:
    writer.write(request)
    head = await reader.readuntil(_HEADERS_END)
    length = next(
        int(line[len(_LENGTH) :]) for line in head.lower().split(b"\r\n") if line.startswith(_LENGTH)
    )
    return await reader.readexactly(length)
