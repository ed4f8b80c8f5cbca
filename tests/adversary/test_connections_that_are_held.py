"""Attacker: a stranger who wants every descriptor and all memory of a relay, and that it cannot be stopped.
Tried: more connections than there are descriptors, with upgrades that are refused, with half a head, with
nothing; pipelined requests whose answers are not read.

What must happen: others are answered meanwhile, what is not read ends when its time is up and its memory
comes back, and SIGTERM ends the relay with 0 whatever is held.
"""

import asyncio
import gc
import resource
import signal
import socket
import sys
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path

from starlette.types import Receive, Scope, Send

from relay.http.connections import Bounds
from relay.http.http_protocol import MAX_PIPELINED
from relay.http.listener import SocketTimeouts
from schemas.session import CloseCode
from tests.fakes.hub import Hub
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.raw_http import exchange
from tests.fakes.served_relay import ServedRelay, mcp_request
from tests.fakes.serving import Server
from tests.fakes.signer import SimulatedNode

BOUND_S = 60
DESCRIPTORS, HELD = 128, 150
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nConnection: close\r\n\r\n"
MALFORMED = (
    b"GET /devices/connect HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Content-Length: 5\r\n\r\n"
)
HERE = "127.0.0.1"
READERS, ANSWER = 10, 8 * 1024 * 1024


async def relay(*arguments: str) -> asyncio.subprocess.Process:
    """Start a command of the relay with few descriptors."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "relay", *arguments),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS)),
    )


@asynccontextmanager
async def running_relay(state: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """Hold a relay whose broker is not there."""
    making = await relay("ca", "init", "--state-dir", str(state))
    assert await making.wait() == 0
    broker = ["--broker", f"mqtt://127.0.0.1:{unused_port()}"]
    serving = ["--listen", f"127.0.0.1:{port}", "--public-url", f"http://127.0.0.1:{port}"]
    process = await relay("run", "--state-dir", str(state), *broker, *serving)
    try:
        async with asyncio.timeout(BOUND_S):
            while process.returncode is None:
                with suppress(OSError):
                    await exchange(port, HEALTH % port)
                    break
                await asyncio.sleep(0)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def held(address: tuple[str, int], said: bytes) -> socket.socket:
    """Return a connection on which that was said and nothing is read."""
    connection = socket.create_connection(address)
    connection.sendall(said)
    return connection


async def test_held_connections_neither_exclude_others_nor_keep_the_relay_from_ending(tmp_path: Path) -> None:
    port = unused_port()
    async with running_relay(tmp_path / "relay", port) as process:
        with ExitStack() as stack:
            for said in (MALFORMED, b"", b"GET / HT", MALFORMED[:-2]):
                for _ in range(HELD):
                    stack.enter_context(held((HERE, port), said))
                assert (await exchange(port, HEALTH % port)).startswith(b"HTTP/1.1 200 ")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(BOUND_S):
                assert await process.wait() == 0


async def test_an_agent_and_a_node_have_no_more_connections_than_their_share(
    hub: Hub, node: SimulatedNode
) -> None:
    bounds = Bounds(total=64, unauthenticated=32, per_address=32, per_holder=1)
    async with Server.running(bounds=bounds) as server, ServedRelay.open(hub, server) as relay:
        body, headers = mcp_request("tools/list", {})
        lines = [f"{name}: {value}" for name, value in headers]
        lines += [f"Authorization: Bearer {hub.token()}", f"Host: {relay.address}"]
        head = "\r\n".join(["POST /mcp HTTP/1.1", *lines, f"Content-Length: {len(body)}", "", ""])
        with held((HERE, relay.address.port), head.encode() + body):
            await until(lambda: "/mcp" in relay.requests)
            await relay.until_idle()
            refused = await relay.mcp("tools/list", token=hub.token())
            assert (refused.status, refused.json()["error"]) == (429, "connections")
            assert (await relay.mcp("tools/list", token=hub.token(sub="another"))).status == 200
        _, first = await relay.admitted(node)
        async with relay.end(node) as second:
            await second.answer_challenge()
            code, _ = await second.until_closed()
            assert code == CloseCode.OVER_CAPACITY
        assert not first.is_closing()
        first.close()
        assert server.refused("holder") == 2


async def test_answers_that_are_not_read_are_given_up_and_their_memory_comes_back() -> None:
    async def answer(_scope: Scope, _receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(ANSWER)})

    tracemalloc.start()
    try:
        async with Server.running(timeouts=SocketTimeouts(write_s=0.5)) as server:
            server.app = answer
            before, _ = tracemalloc.get_traced_memory()
            with ExitStack() as stack:
                for _ in range(READERS):
                    said = HEALTH.replace(b"close", b"keep-alive") % server.address.port
                    connection = held((server.address.host, server.address.port), said * (MAX_PIPELINED + 1))
                    stack.enter_context(connection)
                await until(lambda: tracemalloc.get_traced_memory()[0] - before > READERS * ANSWER // 8)
                await until(lambda: not len(server.connections))
            gc.collect()
            after, peak = tracemalloc.get_traced_memory()
            assert peak - before < 3 * READERS * ANSWER
            assert after - before < ANSWER
    finally:
        tracemalloc.stop()
