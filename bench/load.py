"""A load generator on raw asyncio streams: an HTTP client library would measure itself."""

import asyncio
import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODERN = "2026-07-28"
OLD = "2025-11-25"

_LINE_END = b"\r\n"
_HEADERS_END = _LINE_END * 2
_ARGUMENTS = {"message": "ping"}


_SUCCESS = b'"isError":false'
_AGAIN_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A server of MCP, and the requests to send it in turn: complete HTTP/1.1 requests."""

    port: int
    requests: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """What a server has carried: how many calls in how many seconds."""

    calls: int
    seconds: float


def tool_call(port: int, tool: str, token: str | None, arguments: Mapping[str, Any] = _ARGUMENTS) -> bytes:
    """Return a ``tools/call`` of the new era as the bytes of an HTTP request."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    params = {"name": tool, "arguments": arguments, "_meta": meta}
    headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "tools/call", "Mcp-Name": tool}
    return _request(port, token, headers, _message("tools/call", params))


def request_of(port: int, token: str, method: str, params: Mapping[str, Any], query: str = "") -> bytes:
    """Return a request of the new era, to ``/mcp`` with ``query``, as the bytes of an HTTP request."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": method}
    if "name" in params:
        headers["Mcp-Name"] = params["name"]
    return _request(port, token, headers, _message(method, {**params, "_meta": meta}), query)


def listen(port: int, token: str, uris: Sequence[str]) -> bytes:
    """Return a ``subscriptions/listen`` for resources as the bytes of an HTTP request."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": MODERN,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    headers = {"MCP-Protocol-Version": MODERN, "Mcp-Method": "subscriptions/listen"}
    params = {"notifications": {"resourceSubscriptions": list(uris)}, "_meta": meta}
    return _request(port, token, headers, _message("subscriptions/listen", params))


def old_tool_call(port: int, tool: str, token: str | None, session: str | None) -> bytes:
    """Return a ``tools/call`` of the 2025 era, in a session of ``open_old_session`` or in none."""
    message = _message("tools/call", {"name": tool, "arguments": _ARGUMENTS})
    return _request(port, token, _old_headers(session), message)


async def open_old_session(port: int, token: str | None) -> str:
    """Open a session of the 2025 era and return its id."""
    params = {
        "protocolVersion": OLD,
        "capabilities": {},
        "clientInfo": {"name": "bench", "version": "1"},
    }
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head, _ = await _response(reader, writer, _request(port, token, {}, _message("initialize", params)))
    session = head[b"mcp-session-id"].decode("ascii")
    ready = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    await _response(reader, writer, _request(port, token, _old_headers(session), ready))
    writer.close()
    return session


async def carried(target: Target, connections: int, seconds: float) -> Load:
    """Call over ``connections`` kept-alive connections, each with requests of its own, for ``seconds``."""
    end = time.perf_counter() + seconds
    counts = [0] * connections

    async def worker(index: int) -> None:
        turns = itertools.cycle(target.requests[index::connections] or target.requests)
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        while time.perf_counter() < end:
            await _exchange(reader, writer, next(turns))
            counts[index] += 1
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(worker(index) for index in range(connections)))
    return Load(sum(counts), time.perf_counter() - started)


async def latencies_ms(
    target: Target, count: int, pause_s: float = 0.0, expected: bytes = _SUCCESS
) -> list[float]:
    """Return how long each of ``count`` calls took, one after the other on one connection, with pauses.

    Raises:
        RuntimeError: an answer does not contain ``expected``.
    """
    turns = itertools.cycle(target.requests)
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    took = []
    for _ in range(count):
        started = time.perf_counter()
        await _exchange(reader, writer, next(turns), expected)
        took.append((time.perf_counter() - started) * 1000)
        if pause_s:
            await asyncio.sleep(pause_s)
    writer.close()
    return took


async def latencies_until_ms(target: Target, done: asyncio.Future[Any], pause_s: float) -> list[float]:
    """Return how long each call took, as ``latencies_ms``, until ``done`` is."""
    turns = itertools.cycle(target.requests)
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    took = []
    while not done.done():
        started = time.perf_counter()
        await _exchange(reader, writer, next(turns))
        took.append((time.perf_counter() - started) * 1000)
        await asyncio.sleep(pause_s)
    writer.close()
    return took


class KeptConnection:
    """A connection that is opened when it is first used."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> bytes:
        """Return the body of the answer to one request, whatever it says."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        _, body = await _response(*self._streams, request)
        return body


async def call_once(port: int, request: bytes) -> bytes:
    """Return the body of the answer to one call, whatever it says."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    _, body = await _response(reader, writer, request)
    writer.close()
    return body


async def until_answered(port: int, request: bytes, text: bytes) -> None:
    """Repeat a call until the body of its answer contains ``text``. Has no bound of its own."""
    while text not in await call_once(port, request):  # noqa: ASYNC110 - another process
        await asyncio.sleep(_AGAIN_S)


def _message(method: str, params: Mapping[str, Any]) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}


def _old_headers(session: str | None) -> dict[str, str]:
    return {"MCP-Protocol-Version": OLD, **({} if session is None else {"Mcp-Session-Id": session})}


def _request(
    port: int, token: str | None, more: Mapping[str, str], message: Mapping[str, Any], query: str = ""
) -> bytes:
    body = json.dumps(message).encode("ascii")
    headers = {
        "Host": f"127.0.0.1:{port}",
        "Content-Type": "application/json",
        "Accept": "application/json, text/event-stream",
        **more,
        "Content-Length": str(len(body)),
    }
    if token is not None:
        headers["Authorization"] = f"Bearer {token}"
    lines = [f"POST /mcp{query} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("ascii") + _HEADERS_END + body


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes, expected: bytes = _SUCCESS
) -> None:
    _, body = await _response(reader, writer, request)
    # A refusal is quick: a bench that counted it would praise a server that does nothing.
    if expected not in body:
        raise RuntimeError(f"a call failed: {body[:500]!r}")


async def _response(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes
) -> tuple[dict[bytes, bytes], bytes]:
    writer.write(request)
    _, *lines = (await reader.readuntil(_HEADERS_END)).split(_LINE_END)
    head = {name.lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
    if (length := head.get(b"content-length")) is not None:
        return head, await reader.readexactly(int(length))
    body = b""
    # An event stream comes in chunks (RFC 9112 section 7.1); the last one is empty.
    while size := int(await reader.readuntil(_LINE_END), 16):
        body += await reader.readexactly(size + len(_LINE_END))
    await reader.readexactly(len(_LINE_END))
    return head, body
