"""A deterministic MCP server with faults on command, over HTTP and stdio, in both protocol eras.

The name of a tool is what happens when it is called. ``times`` in the arguments is how often it happens
before the tool answers; without it, always. As a program it speaks on standard input and output:
``python -m tests.fakes.mcp_server LOG [legacy]`` writes each call that it receives to the file LOG.
"""

import asyncio
import json
import ssl
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODERN = "2026-07-28"
LEGACY = "2025-11-25"
OBJECT = {"type": "object", "properties": {"times": {"type": "integer", "minimum": 0}}}
ECHO_INPUT = {
    "type": "object",
    "properties": {"message": {"type": "string", "maxLength": 64}},
    "required": ["message"],
    "additionalProperties": False,
}
ECHO_OUTPUT = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
ADD_INPUT = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
ADD_OUTPUT = {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}
READ_ONLY = {"readOnlyHint": True, "idempotentHint": True}


class DroppedError(Exception):
    """The server closes the connection: ``after`` that many bytes of the answer; None: before any."""

    def __init__(self, after: int | None) -> None:
        super().__init__(after)
        self.after = after


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """An answer that is more than a JSON-RPC message."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = dict[str, Any] | list[dict[str, Any]] | bytes | HttpAnswer
"""A result or an error, whole messages, bytes, or more than messages."""


def structured(value: dict[str, Any]) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": json.dumps(value)}], "structuredContent": value}


def tool_error(text: str, **meta: Any) -> dict[str, Any]:
    return {"isError": True, "content": [{"type": "text", "text": text}], "_meta": meta}


def jsonrpc_error(code: int, message: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message}}


def notice(name: str, **params: Any) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "method": f"notifications/{name}", "params": params}


ENVELOPE = {
    "code": "E_NODE_OFFLINE",
    "message": "The node is not connected; the command was never sent.",
    "suggested_fix": "Wait until the node is listed again, then call again.",
    "retry_after_ms": 250,
    "correlation_id": "01HZX9K3M4P7Q8R9S0T1V2W3XY",
}
ANSWERS: Mapping[str, Answer] = {
    "garbage": b'{"jsonrpc":"2.0", \x1b[31m this is not JSON; Authorization: Bearer abcdefghijklmnop',
    "wrong_output": structured({"ok": "no"}),
    "unauthorized": HttpAnswer(401, headers={"WWW-Authenticate": "Bearer"}),
    "rate_limited": HttpAnswer(429, headers={"Retry-After": "1"}),
    "unavailable": HttpAnswer(503),
    "redirect": HttpAnswer(307, headers={"Location": "/mcp"}),
    "compressed": HttpAnswer(200, b"\x1f\x8b", {"Content-Encoding": "gzip"}),
    "huge": b'"' + b"x" * (9 * 1024 * 1024) + b'"',
    "rejected": jsonrpc_error(-32602, "no such colour: \x1b[31mred"),
    "asks": {"resultType": "input_required", "inputRequests": {}},
    "mismatch": jsonrpc_error(-32020, "Header mismatch"),
    "unknown": jsonrpc_error(-32602, "Unknown tool: unknown"),
    "failing": tool_error("it failed; Authorization: Bearer abcdefghijklmnop"),
    "envelope": tool_error(json.dumps(ENVELOPE), **{"edge-kubelet/error": ENVELOPE}),
}
KEY = "-----BEGIN PRIVATE KEY-----\nMC4CAQAwBQYDK2VwBCIEIA\n-----END PRIVATE KEY-----"
DROPS: Mapping[str, int | None] = {"drop": None, "disconnect": 40}
FAULTS = ("delay", *DROPS, *ANSWERS)


def tools() -> list[dict[str, Any]]:
    fault_output = {"type": "object", "properties": {"ok": {"const": True}}, "required": ["ok"]}
    return [
        {
            "name": "echo",
            "title": "Echo",
            "description": "Returns the message.",
            "inputSchema": ECHO_INPUT,
            "outputSchema": ECHO_OUTPUT,
            "annotations": READ_ONLY,
        },
        {
            "name": "add",
            "description": "Adds two numbers.",
            "inputSchema": ADD_INPUT,
            "outputSchema": ADD_OUTPUT,
            "annotations": READ_ONLY,
        },
        *(
            {"name": name, "inputSchema": OBJECT, "outputSchema": fault_output, "description": "A fault."}
            for name in FAULTS
        ),
    ]


@dataclass(slots=True)
class FakeMcpServer:
    """The server, without a transport.

    Attributes:
        legacy: whether it speaks the era with ``initialize`` only.
        token: what a client must present over HTTP, if anything.
        challenge: what it states of the credential that is missing.
        refusal: the body of that answer.
        tools: what it lists, which a test may change.
        resources: what it lets read, by URI.
        calls: the parameters of each ``tools/call``, in order.
        heads: the headers of each HTTP request of a call.
        opened, listed: how often a connection was negotiated, and the tools listed.
        list_announces: whether the next list of tools is answered with a notice that they changed.
        followed: how many subscriptions to changes it has accepted; None: it says that it announces none.
        followers: those that are open.
        acknowledges: whether it answers a request for one.
        refuses_followers: how it answers it otherwise.
        ttl_ms: how long it says that a list of tools is good for.
        silent: whether a list of tools is not answered.
        session: the id of the sessions that it opens, whose end it does not answer.
        page_size: how many tools a page has; by default all.
        listing: what is listed instead of the tools.
        results: the structured content of further tools, by name.
        result_meta: the ``_meta`` of its results.
        documents: what it answers a GET with, by path.
        read: how often each resource was read.
        next_answer, next_list: how the next call over HTTP, or list of tools, is answered, if otherwise.
        released, arrived: what a delayed call waits for, and that a call has arrived.
    """

    legacy: bool = False
    token: str | None = None
    challenge: str = "Bearer"
    refusal: bytes = b""
    tools: list[dict[str, Any]] = field(default_factory=tools)
    resources: dict[str, str] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, str]] = field(default_factory=list)
    opened: int = 0
    listed: int = 0
    list_announces: bool = False
    followed: int | None = None
    followers: dict[asyncio.StreamWriter, str] = field(default_factory=dict)
    acknowledges: bool = True
    refuses_followers: HttpAnswer | None = None
    ttl_ms: int = 3_600_000
    next_answer: HttpAnswer | None = None
    next_list: HttpAnswer | None = None
    silent: bool = False
    session: str | None = None
    page_size: int | None = None
    listing: dict[str, Any] | None = None
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    result_meta: dict[str, Any] = field(default_factory=dict)
    documents: dict[str, Any] = field(default_factory=dict)
    read: Counter[str] = field(default_factory=Counter)
    released: asyncio.Event = field(default_factory=asyncio.Event)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: Counter[str] = field(default_factory=Counter)

    def sent(self, name: str) -> int:
        """Return how often a call of ``name`` arrived."""
        return sum(1 for call in self.calls if call["name"] == name)

    async def answer(self, message: Mapping[str, Any]) -> Answer | None:
        """Return the answer to ``message``; None if it wants none.

        Raises:
            DroppedError: there is none.
        """
        if "id" not in message or "method" not in message:
            return None
        result = await self._result(message)
        if not isinstance(result, dict):
            return result
        if "error" not in result:
            result = {"result": result if self.legacy else {"resultType": "complete", **result}}
        return {"jsonrpc": "2.0", "id": message["id"], **result}

    async def _result(self, message: Mapping[str, Any]) -> Answer:
        params = message.get("params") or {}
        match message["method"]:
            case "server/discover" if not self.legacy:
                self.opened += 1
                return {
                    "supportedVersions": [MODERN],
                    "capabilities": {"tools": {"listChanged": self.followed is not None}, "resources": {}},
                    "ttlMs": 0,
                    "cacheScope": "private",
                }
            case "initialize" if self.legacy:
                self.opened += 1
                return {
                    "protocolVersion": LEGACY,
                    "capabilities": {"tools": {"listChanged": True}, "resources": {}},
                    "serverInfo": {"name": "fake", "version": "1"},
                }
            case "tools/list":
                self.listed += 1
                if self.silent:
                    await self.released.wait()
                page = self._page(int(params.get("cursor") or 0))
                announces, self.list_announces = self.list_announces, False
                return _with_notices(message, [notice("tools/list_changed")], page) if announces else page
            case "resources/read" if params["uri"] in self.resources:
                self.read[params["uri"]] += 1
                content = {"uri": params["uri"], "text": self.resources[params["uri"]]}
                return {"contents": [content], "ttlMs": 0, "cacheScope": "private"}
            case "tools/call":
                return await self._called(message)
            case _:
                return {"error": {"code": -32601, "message": "Method not found"}}

    def _page(self, start: int) -> dict[str, Any]:
        end = start + (self.page_size or len(self.tools))
        page: dict[str, Any] = {"tools": self.tools[start:end], "ttlMs": self.ttl_ms, "cacheScope": "private"}
        if end < len(self.tools):
            page["nextCursor"] = str(end)
        return page if self.listing is None else {**page, **self.listing}

    async def _called(self, message: Mapping[str, Any]) -> Answer:
        params = message["params"]
        self.calls.append(dict(params))
        self.arrived.set()
        result = await self._outcome(params["name"], params.get("arguments") or {})
        if self.result_meta and isinstance(result, dict):
            result = {**result, "_meta": self.result_meta}
        token = (params.get("_meta") or {}).get("progressToken")
        if token is None or not isinstance(result, dict):
            return result
        steps = ({"progress": 1, "total": 2}, {"progress": 2, "total": 2, "message": "done"})
        return _with_notices(
            message, [notice("progress", progressToken=token, **step) for step in steps], result
        )

    async def _outcome(self, name: str, arguments: Mapping[str, Any]) -> Answer:
        if name == "echo":
            return structured({"message": arguments["message"]})
        if name == "add":
            return structured({"sum": arguments["a"] + arguments["b"]})
        if name in self.results:
            return structured(self.results[name])
        self._seen[name] += 1
        if self._seen[name] > arguments.get("times", sys.maxsize):
            return structured({"ok": True})
        if name in DROPS:
            raise DroppedError(DROPS[name])
        if name == "delay":
            await self.released.wait()
            return structured({"ok": True})
        return ANSWERS[name]

    @asynccontextmanager
    async def over_http(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
        """Serve on a free loopback port; the value is the URL."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while await self._exchange(reader, writer):
                    pass
            except (OSError, asyncio.IncompleteReadError):
                pass  # the client closed the connection
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        try:
            yield f"{'https' if tls else 'http'}://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
        finally:
            self.released.set()
            server.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        request, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        path = request.split(" ")[1]
        if request.startswith("DELETE") and self.session is not None:
            await self.released.wait()
        if not request.startswith("POST"):
            return _put(writer, self.documents.get(path, HttpAnswer(405)))
        message = json.loads(body)
        if message.get("method") == "tools/call":
            self.heads.append(headers)
        if self.token is not None and headers.get("authorization") != f"Bearer {self.token}":
            return _put(writer, HttpAnswer(401, self.refusal, {"WWW-Authenticate": self.challenge}))
        if (answer := self._taken(message.get("method"))) is not None:
            return _put(writer, answer)
        if message.get("method") == "subscriptions/listen" and self.followed is not None:
            await self._follow(message["id"], reader, writer)
            return False
        try:
            made = await self.answer(message)
        except DroppedError as dropped:
            if dropped.after is not None:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 400\r\n\r\n"
                )
                writer.write(b"{" * dropped.after)
                await writer.drain()
            writer.transport.abort()
            return False
        if message.get("method") == "initialize" and self.session is not None:
            made = HttpAnswer(200, json.dumps(made).encode(), {"Mcp-Session-Id": self.session})
        return _put(writer, made)

    async def _follow(self, id_: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert self.followed is not None
        self.followed += 1
        self.followers[writer] = id_
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        if self.acknowledges:
            self._tell(writer, "subscriptions/acknowledged", notifications={"toolsListChanged": True})
        try:
            await reader.read()
        finally:
            self.followers.pop(writer, None)

    def announce(self) -> None:
        """Tell each subscription that the tools changed."""
        for writer in self.followers:
            self._tell(writer, "tools/list_changed")

    def drop_followers(self) -> None:
        """End the subscriptions without a word."""
        for writer in self.followers:
            writer.transport.abort()

    def _tell(self, writer: asyncio.StreamWriter, name: str, **params: Any) -> None:
        meta = {"io.modelcontextprotocol/subscriptionId": self.followers[writer]}
        writer.write(f"data: {json.dumps(notice(name, _meta=meta, **params))}\n\n".encode())

    def _taken(self, method: str | None) -> HttpAnswer | None:
        answer = None
        if method == "tools/call":
            answer, self.next_answer = self.next_answer, None
        elif method == "tools/list":
            answer, self.next_list = self.next_list, None
        elif method == "subscriptions/listen":
            answer = self.refuses_followers
        return answer


def _with_notices(
    message: Mapping[str, Any], notices: list[dict[str, Any]], result: dict[str, Any]
) -> list[dict[str, Any]]:
    last = {"jsonrpc": "2.0", "id": message["id"], "result": {"resultType": "complete", **result}}
    return [*notices, last]


def _put(writer: asyncio.StreamWriter, answer: Answer | None) -> bool:
    match answer:
        case None:
            answer = HttpAnswer(202)
        case bytes():
            answer = HttpAnswer(200, answer)
        case dict():
            answer = HttpAnswer(200, json.dumps(answer).encode())
        case list():
            events = "".join(f"event: message\ndata: {json.dumps(item)}\n\n" for item in answer)
            answer = HttpAnswer(200, events.encode(), {"Content-Type": "text/event-stream"})
        case HttpAnswer():
            pass
    lines = [f"HTTP/1.1 {answer.status} X", f"Content-Length: {len(answer.body)}"]
    lines += [
        f"{name}: {value}" for name, value in {"Content-Type": "application/json", **answer.headers}.items()
    ]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + answer.body)
    return True


async def main(log: Path, era: str) -> None:
    """Speak on standard input and output until the input ends, or a call drops the connection."""
    fake = FakeMcpServer(legacy=era == "legacy")
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        message = json.loads(line)
        if message.get("method") == "tools/call":
            with log.open("a") as file:
                file.write(json.dumps(message["params"]) + "\n")
            print(f"\x1b[31m{KEY}\nAuthorization: Bearer abcdefghijklmnop", file=sys.stderr, flush=True)
        if message.get("method") == "tools/call" and message["params"]["name"] == "delay":
            continue  # it is answered never, and others are
        try:
            answer = await fake.answer(message)
        except DroppedError as dropped:
            sys.stdout.buffer.write(b"{" * (dropped.after or 0))
            sys.stdout.buffer.flush()
            return
        for item in answer if isinstance(answer, list) else [answer]:
            written = json.dumps(item).encode() if isinstance(item, dict) else item
            if isinstance(written, bytes):
                sys.stdout.buffer.write(written + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""))
