"""One relay on a real socket, as any client of its port finds it.

All parts are the product's own, on the hub's clock; a node is any client that connects. Requests can be
sent as raw bytes, since a client library would correct what an attacker has malformed.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Final

from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from starlette.types import Receive, Scope, Send

from relay.fleet.change_notifier import ChangeNotifier
from relay.http.websocket_protocol import BoundedWebSocket
from relay.sessions.node_sessions import AUTH_TIMEOUT_S
from schemas.addresses import CONNECT_PATH, mcp_url
from schemas.frames import MAX_FRAME_BYTES, SUBPROTOCOL, Frame, FrameReader
from tests.fakes.hub import Hub
from tests.fakes.node_end import BOOT_ID, NodeEnd, device_token
from tests.fakes.raw_http import exchange, read_ws_frame, ws_frame
from tests.fakes.serving import Server
from tests.fakes.signer import SimulatedNode

BOUND_S: Final = 30
ERA: Final = "2026-07-28"
HERE: Final = "127.0.0.1"
"""The address that every attacker of a test comes from."""

Headers = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """Return the error envelope of a call that failed."""
        envelope: dict[str, Any] = json.loads(self.json()["result"]["content"][0]["text"])
        assert self.json()["result"]["isError"] is True
        return envelope


class ServedRelay:
    """The relay that ``hub`` has the parts of.

    Attributes:
        requests: the path of every HTTP request and WebSocket that the server has passed on, in order.
    """

    def __init__(self, hub: Hub, server: Server, auth_timeout_s: float, notify_interval_s: float) -> None:
        self.hub = hub
        self.address = server.address
        self.requests: list[str] = []
        self._served = 0
        self._idle = asyncio.Event()
        self.notifier = ChangeNotifier(hub.fleet, hub.log, interval_s=notify_interval_s)
        self.sessions = hub.sessions(auth_timeout_s)
        self._reader = FrameReader(hub.registry)
        self._mcp = hub.mcp(hub.gateway(self.sessions), self.notifier)
        hub.serve(self.address)

    @property
    def mcp_url(self) -> str:
        return mcp_url(f"http://{self.address}")

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        hub: Hub,
        server: Server,
        auth_timeout_s: float = AUTH_TIMEOUT_S,
        notify_interval_s: float = 0.02,
    ) -> AsyncIterator["ServedRelay"]:
        """Serve until the end of the block; agents hear of changes after ``notify_interval_s`` at most."""
        relay = cls(hub, server, auth_timeout_s, notify_interval_s)
        ready = asyncio.Event()
        tasks = [asyncio.create_task(relay._run(ready)), asyncio.create_task(relay.notifier.run())]
        await ready.wait()
        server.app, server.begin = relay._serve, hub.application.begin
        server.serve_socket = relay._serve_socket
        yield relay
        assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, ready: asyncio.Event) -> None:
        async with self._mcp.running():
            ready.set()
            await asyncio.Event().wait()

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._counted(scope["path"]):
            await self.hub.application(scope, receive, send)

    async def _serve_socket(self, socket: BoundedWebSocket) -> None:
        with self._counted(socket.path):
            await self.hub.application.serve_socket(socket)

    @contextmanager
    def _counted(self, path: str) -> Iterator[None]:
        self.requests.append(path)
        self._served += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._served -= 1
            if not self._served:
                self._idle.set()

    @property
    def is_idle(self) -> bool:
        """Whether the relay is done with every request and connection that there was."""
        return self._idle.is_set()

    async def until_idle(self) -> None:
        await asyncio.wait_for(self._idle.wait(), BOUND_S)

    # --- nodes

    def end(self, node: SimulatedNode) -> AbstractAsyncContextManager[NodeEnd]:
        """Hold a connection of ``node`` on which nothing has been said yet."""
        return NodeEnd.connected(self.address, node, self._reader)

    @asynccontextmanager
    async def session(
        self, node: SimulatedNode, boot_id: str = BOOT_ID, **members: Any
    ) -> AsyncIterator[NodeEnd]:
        """Hold a session of ``node`` whose manifest, with ``members`` in it, was accepted."""
        async with self.end(node) as end:
            await end.authenticate(boot_id)
            manifest = node.manifest(**{"issued_at_ms": self.hub.clock(), **members})
            await end.send("announce", json.loads(manifest))
            assert (await end.receive("announce_ack")).payload["ok"] is True
            yield end

    # --- agents and unauthenticated clients

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection on which nothing has been said yet."""
        return await asyncio.open_connection(self.address.host, self.address.port)

    async def upgraded(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a WebSocket at the nodes' endpoint, of which nothing but the upgrade has been read."""
        reader, writer = await self.connect()
        lines = [
            f"GET {CONNECT_PATH} HTTP/1.1",
            f"Host: {self.address}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            "Sec-WebSocket-Version: 13",
            f"Sec-WebSocket-Protocol: {SUBPROTOCOL}",
        ]
        writer.write("\r\n".join([*lines, "", ""]).encode("ascii"))
        async with asyncio.timeout(BOUND_S):
            head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        return reader, writer

    async def admitted(self, node: SimulatedNode) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a WebSocket at the nodes' endpoint on which ``node`` has been welcomed."""
        reader, writer = await self.upgraded()
        challenge = self._reader.read(await read_ws_frame(reader), MAX_FRAME_BYTES)
        auth = Frame("auth", challenge.msg_id, auth_for(node, challenge), challenge.msg_id)
        writer.write(ws_frame(auth.encode().encode("ascii")))
        welcome = self._reader.read(await read_ws_frame(reader), MAX_FRAME_BYTES)
        assert welcome.type == "welcome"
        return reader, writer

    async def exchange(self, raw: bytes) -> bytes:
        """Send ``raw`` and return all that comes until the relay closes."""
        return await exchange(self.address.port, raw)

    async def ask(
        self, request_line: str, headers: Headers = (), body: bytes = b"", *, host: str | None = None
    ) -> Reply:
        """Send one request, with headers unchanged, to the relay's own name or to ``host``."""
        lines = [f"{request_line} HTTP/1.1", f"Host: {host or self.address}", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in headers]
        lines += [f"Content-Length: {len(body)}"] if body else []
        return parsed(await self.exchange("\r\n".join([*lines, "", ""]).encode("latin-1") + body))

    async def mcp(
        self,
        method: str,
        params: Mapping[str, Any] | None = None,
        *,
        token: str | None = None,
        headers: Headers = (),
        path: str = "/mcp",
    ) -> Reply:
        """Ask ``/mcp`` as an agent with ``token`` does; with ``headers`` besides."""
        body, own = mcp_request(method, params or {})
        if token is not None:
            own.append(("Authorization", f"Bearer {token}"))
        return await self.ask(f"POST {path}", [*own, *headers], body)

    async def call(self, tool: str, token: str | None = None, **arguments: Any) -> Reply:
        params = {"name": tool, "arguments": arguments or {"message": "ping"}}
        return await self.mcp("tools/call", params, token=token or self.hub.token())

    # --- afterwards

    def refusals(self) -> list[tuple[str, str, str, int]]:
        """Write what was counted and return the audit's lines of it: event, source, reason and count."""
        self.hub.refusals.write()
        return [
            (line["event"], line["source"], line["reason"], line["count"])
            for line in self.hub.audited()
            if "event" in line
        ]

    def calls(self) -> list[tuple[str, str, str | None]]:
        """Return the audit's lines of calls: the decision or outcome, the code and the node."""
        return [
            (line.get("decision") or line["outcome"], line["code"], line["node_id"])
            for line in self.hub.audited()
            if "decision" in line or "outcome" in line
        ]


def auth_for(node: SimulatedNode, challenge: Frame, **members: Any) -> dict[str, Any]:
    """Return the answer of ``node`` to ``challenge``, with ``members`` in place of its own."""
    good = {
        "node_id": node.node_id,
        "certificate": node.leaf_pem,
        "token": device_token(node, challenge.payload),
        "boot_id": BOOT_ID,
    }
    return good | members


def mcp_request(method: str, params: Mapping[str, Any]) -> tuple[bytes, list[tuple[str, str]]]:
    """Return the body of a request of the new era, and the headers that go with it."""
    meta = {PROTOCOL_VERSION_META_KEY: ERA, CLIENT_CAPABILITIES_META_KEY: {}}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {**params, "_meta": meta}}
    headers = [
        ("Content-Type", "application/json"),
        ("Accept", "application/json, text/event-stream"),
        ("MCP-Protocol-Version", ERA),
        ("Mcp-Method", method),
    ]
    name = params.get("name", params.get("uri"))
    if isinstance(name, str):
        headers.append(("Mcp-Name", name))
    return json.dumps(message).encode("ascii"), headers


def parsed(raw: bytes) -> Reply:
    """Return the one answer that ``raw`` holds."""
    head, _, body = raw.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Reply(int(status_line.split(" ")[1]), headers, body)
