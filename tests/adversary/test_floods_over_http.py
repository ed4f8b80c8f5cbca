"""Attacker: a stranger with many connections of one address, or an agent that may only read. Tried: heads of
12 000 fields, each on a new connection as soon as the last is cut off; 400 connections with 8 pipelined
``GET /healthz`` each; 200 connections with 8 pipelined requests each, of a method that reaches no node, or of
calls that are refused.

What must happen: the relay serves no more of it than the rate of its source, however much is sent; another
agent is answered meanwhile, and so is a load balancer of the same address, which opens a connection for each
check.
"""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.http.request_meter import HEALTH_PER_S, OVER_AGENT_RPS, PER_MACHINE
from relay.limits.rate_limits import PER_AGENT
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.raw_http import exchange
from tests.fakes.served_relay import mcp_request

pytestmark = [pytest.mark.integration, pytest.mark.asyncio(loop_scope="module")]

BOUND_S = 60
CALLS = 10
HERE = "127.0.0.1"
PIPELINED = 8
HEAD_END = b"\r\n\r\n"


@dataclass(frozen=True)
class RunningRelay:
    """A process of ``relay run`` without a broker."""

    port: int
    state: Path

    def token(self, sub: str) -> str:
        issuing = ["token", "issue", "--sub", sub, "--state-dir", str(self.state)]
        return subprocess.run(command(*issuing), check=True, capture_output=True, text=True).stdout.strip()

    def get(self, path: str, connection: str = "keep-alive") -> bytes:
        return b"GET %b HTTP/1.1\r\nHost: %b:%d\r\nConnection: %b\r\n\r\n" % (
            path.encode(),
            HERE.encode(),
            self.port,
            connection.encode(),
        )

    def post(self, token: str, method: str, **params: object) -> bytes:
        body, headers = mcp_request(method, params)
        lines = [f"{name}: {value}" for name, value in headers]
        lines += [
            f"Authorization: Bearer {token}",
            f"Host: {HERE}:{self.port}",
            f"Content-Length: {len(body)}",
        ]
        return "\r\n".join(["POST /mcp HTTP/1.1", *lines, "", ""]).encode() + body


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "relay", *arguments]


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRelay]:
    relay = RunningRelay(unused_port(), tmp_path_factory.mktemp("relay"))
    subprocess.run(command("ca", "init", "--state-dir", str(relay.state)), check=True, capture_output=True)
    address = f"{HERE}:{relay.port}"
    serving = ["--no-broker", "--listen", address, "--public-url", f"http://{address}"]
    process = subprocess.Popen(
        command("run", "--state-dir", str(relay.state), *serving),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        asyncio.run(until_served(relay))
        yield relay
    finally:
        process.terminate()
        process.wait(BOUND_S)


async def until_served(relay: RunningRelay) -> None:
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(OSError):
                await exchange(relay.port, relay.get("/healthz", "close"))
                return
            await asyncio.sleep(0.02)  # a process that does not listen yet has no other sign


class Agent:
    """Another agent, on a connection that it holds already."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
        self._reader, self._writer, self._request = reader, writer, request

    async def call(self) -> None:
        self._writer.write(self._request)
        head = await self._reader.readuntil(HEAD_END)
        assert head.startswith(b"HTTP/1.1 200 ")
        (length,) = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        await self._reader.readexactly(int(length.partition(b":")[2]))


@asynccontextmanager
async def other_agent(relay: RunningRelay) -> AsyncIterator[Agent]:
    reader, writer = await asyncio.open_connection(HERE, relay.port)
    agent = Agent(reader, writer, relay.post(relay.token("another"), "tools/list"))
    await agent.call()
    yield agent
    writer.close()


class Flood:
    """Connections that send ``said`` again when it is answered, or on a new one when they are cut off."""

    def __init__(self, relay: RunningRelay, connections: int, said: bytes, answers: int) -> None:
        self._relay, self._said, self._answers = relay, said, answers
        self._connections = connections
        self.served = 0

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator["Flood"]:
        tasks = [asyncio.create_task(self._flood()) for _ in range(self._connections)]
        try:
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _flood(self) -> None:
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                reader, writer = await asyncio.open_connection(HERE, self._relay.port)
                try:
                    while True:
                        writer.write(self._said)
                        for _ in range(self._answers):
                            await reader.readuntil(b"HTTP/1.1 ")
                            self.served += 1
                finally:
                    writer.transport.abort()


async def served_beside(relay: RunningRelay, flood: Flood, at_most: Callable[[float], float]) -> None:
    """Have an agent and checks answered beside ``flood``, of which ``at_most`` of the seconds is served."""
    async with other_agent(relay) as agent, asyncio.timeout(BOUND_S):
        started = time.monotonic()
        async with flood.going_on():
            for _ in range(CALLS):
                await agent.call()
                check = await exchange(relay.port, relay.get("/healthz", "close"))
                assert check.startswith(b"HTTP/1.1 200 ")
            await until(lambda: flood.served > 0)
            assert flood.served <= at_most(time.monotonic() - started)


async def test_heads_of_thousands_of_fields(relay: RunningRelay) -> None:
    head = relay.get("/")[:-2] + b"X: y\r\n" * 12_000 + b"\r\n"
    await served_beside(relay, Flood(relay, 128, head, 1), lambda seconds: PER_MACHINE / 4 * (1 + seconds))


async def test_pipelined_requests_of_health(relay: RunningRelay) -> None:
    flood = Flood(relay, 400, relay.get("/healthz") * PIPELINED, PIPELINED)
    await served_beside(relay, flood, lambda seconds: HEALTH_PER_S * (1 + seconds))


async def test_an_agents_requests_that_are_no_calls(relay: RunningRelay) -> None:
    said = relay.post(relay.token("discovers"), "server/discover") * PIPELINED
    await served_beside(relay, Flood(relay, 200, said, PIPELINED), of_an_agent)


async def test_an_agents_calls_that_are_refused(relay: RunningRelay) -> None:
    call = relay.post(relay.token("refused"), "tools/call", name="nothing.at.all.here", arguments={})
    await served_beside(relay, Flood(relay, 200, call * PIPELINED, PIPELINED), of_an_agent)


def of_an_agent(seconds: float) -> float:
    # The first request of each connection is its address's.
    return PER_AGENT.burst + (PER_MACHINE + OVER_AGENT_RPS * PER_AGENT.rate) * seconds + PER_MACHINE
