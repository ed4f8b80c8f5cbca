"""Attacker: who reads the relay's memory: a core dump, a swap file. Tried: to find bearer tokens there, of
requests that were answered, and of sessions, streams and calls that are still open.

What must happen: once a token has been checked, nothing in the process holds it, whatever it opened.
"""

import asyncio
import gc
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes.refusals import echo_of
from tests.fakes.served_relay import BOUND_S, ServedRelay, mcp_request
from tests.fakes.signer import SimulatedNode

OLD = "2025-11-25"
INITIALIZE = {"protocolVersion": OLD, "capabilities": {}, "clientInfo": {"name": "c", "version": "0"}}
HIDDEN_CHARACTERS = 40
"""So much of a token's signature finds it, and every piece of a request that it is in."""


def hidden(token: str) -> str:
    """Return the end of ``token`` backwards: a test that held it as it is would find itself."""
    return token[: -HIDDEN_CHARACTERS - 1 : -1]


def holders(backwards: str) -> list[str]:
    """Return the names of what holds the token of ``hidden``: tasks' locals, containers, other objects."""
    text = backwards[::-1]
    data = text.encode()
    gc.collect()
    owners = [owner for owner in gc.get_objects() if _holds(owner, text, data)]
    return [getattr(owner, "__qualname__", type(owner).__qualname__) for owner in owners]


def _holds(owner: object, text: str, data: bytes) -> bool:
    for value in gc.get_referents(owner):
        if isinstance(value, str):
            if text in value and value is not text:
                return True
        elif isinstance(value, bytes | bytearray):
            if data in value and value is not data:
                return True
        # The collector lists no containers that cannot be in a cycle: they are found by what holds them.
        elif isinstance(value, dict | tuple) and not gc.is_tracked(value) and _holds(value, text, data):
            return True
    return False


class Agent:
    """Requests of one agent as bytes, so that no client library holds its token."""

    def __init__(self, relay: ServedRelay) -> None:
        self.relay = relay
        token = relay.hub.token()
        self.hidden = hidden(token)
        self.jti = relay.hub.authenticator.identify(token).jti
        self._token = bytearray(token.encode())
        self._writers: list[asyncio.StreamWriter] = []

    def close(self) -> None:
        for writer in self._writers:
            writer.close()

    def forget(self) -> None:
        """Keep the token no more."""
        self._token.clear()

    async def send(self, verb: str, headers: list[tuple[str, str]], body: bytes = b"") -> bytes:
        """Send one request on a connection of its own, and return the head of its answer."""
        return await self.send_on(await self.connect(), verb, headers, body)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open a connection."""
        reader, writer = await self.relay.connect()
        self._writers.append(writer)
        return reader, writer

    async def send_on(
        self,
        connection: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        verb: str,
        headers: list[tuple[str, str]],
        body: bytes,
    ) -> bytes:
        """Send one request on ``connection`` and return the head of its answer."""
        reader, writer = connection
        lines = [f"{verb} /mcp HTTP/1.1", f"Host: {self.relay.address}", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        writer.write("\r\n".join(lines).encode() + b"\r\nAuthorization: Bearer " + self._token)
        writer.write(b"\r\n\r\n" + body)
        async with asyncio.timeout(BOUND_S):
            return await reader.readuntil(b"\r\n\r\n")

    async def send_old(self, method: str, params: dict[str, Any], **more: str) -> bytes:
        """Post a message of the old era and return the head of its answer."""
        message: dict[str, Any] = {"jsonrpc": "2.0", "method": method, "params": params}
        if not method.startswith("notifications/"):
            message["id"] = 1
        return await self.send("POST", old_headers(**more), json.dumps(message).encode())


def old_headers(**more: str) -> list[tuple[str, str]]:
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    return [*headers.items(), *((name.replace("_", "-"), value) for name, value in more.items())]


async def begin_call_without_asgi(
    agent: Agent, headers: list[tuple[str, str]], body: bytes
) -> asyncio.Task[bytes]:
    """Begin a call as the second request of a connection: the first is always served by ASGI."""
    connection = await agent.connect()
    listing, list_headers = mcp_request("tools/list", {})
    head = await agent.send_on(connection, "POST", list_headers, listing)
    _, _, length = head.lower().partition(b"content-length: ")
    await connection[0].readexactly(int(length.partition(b"\r\n")[0]))
    return asyncio.create_task(agent.send_on(connection, "POST", headers, body))


@asynccontextmanager
async def everything_open(relay: ServedRelay, node: SimulatedNode) -> AsyncIterator[Agent]:
    """Hold a session of the old era with its stream, a subscription, and a call that waits in its node."""
    agent = Agent(relay)
    async with relay.session(node) as end:
        head = await agent.send_old("initialize", INITIALIZE)
        (session_id,) = (
            line.partition(b": ")[2].decode()
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"mcp-session-id:")
        )
        version = {"mcp_session_id": session_id, "mcp_protocol_version": OLD}
        await agent.send_old("notifications/initialized", {}, **version)
        stream = await agent.send("GET", old_headers(**version))
        assert stream.startswith(b"HTTP/1.1 200 ")
        body, headers = mcp_request("subscriptions/listen", {"notifications": {"toolsListChanged": True}})
        listening = await agent.send("POST", headers, body)
        assert listening.startswith(b"HTTP/1.1 200 ")
        body, headers = mcp_request("tools/call", {"name": echo_of(node), "arguments": {"message": "ping"}})
        calling = asyncio.create_task(agent.send("POST", headers, body))
        await end.receive("cmd")
        directly = await begin_call_without_asgi(agent, headers, body)
        served = len(relay.requests)
        await end.receive("cmd")
        assert len(relay.requests) == served
        agent.forget()
        try:
            yield agent
        finally:
            calling.cancel()
            directly.cancel()
            agent.close()


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_that_is_open_holds_the_token_that_opened_it(
    relay: ServedRelay, node: SimulatedNode
) -> None:
    async with everything_open(relay, node) as agent:
        assert holders(agent.hidden) == []
    await relay.until_idle()


def test_the_walk_finds_a_token_that_is_held() -> None:
    token = "".join(chr(ord("a") + number % 26) for number in range(HIDDEN_CHARACTERS))
    backwards = hidden("header.claims." + token)
    held: list[object] = [({"authorization": f"Bearer {token}"},)]
    assert len(holders(backwards)) == 1
    held[0] = bytearray(f"GET / {token}".encode())
    assert len(holders(backwards)) == 1
    held.clear()
    assert holders(backwards) == []
