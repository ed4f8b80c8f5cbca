"""The log is not read any more, and its pipes stay open: the program goes on, and says later what is missing.

The programs run as operators run them, with standard output and error in small pipes that are not read.
"""

import asyncio
import fcntl
import json
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from kubelet.config import DaemonPlan, NodeConfig
from relay.auth.agent_tokens import TokenIssuer
from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.settings.environment import now_ms
from relay.state.key_files import load_or_create_key
from schemas.addresses import BrokerAddress, mcp_url
from schemas.frames import FrameReader
from schemas.lines import MAX_WAITING_BYTES
from schemas.projection import META_STEP_ID, META_TASK_ID
from schemas.registry import SchemaRegistry
from tests.fakes.metrics_client import metrics_client
from tests.fakes.node import write_identity
from tests.fakes.played_relay import PlayedRelay
from tests.fakes.served_relay import mcp_request
from tests.fakes.signer import NODE_ID, SimulatedCa

BOUND_S: Final = 100  # it takes a megabyte of lines, which is a thousand calls
F_SETPIPE_SZ: Final = 1031  # fcntl.F_SETPIPE_SZ, which not every build of Python has
PIPE_BYTES: Final = 4096
NO_BROKER: Final = BrokerAddress("127.0.0.1", 9)
WORKERS: Final = 4
MOST_CALLS: Final = 8000


class Unread:
    """A program, and the pipes that it writes to."""

    def __init__(self, process: Process, ends: Sequence[int]) -> None:
        self.process = process
        self._ends = ends

    async def read_on(self) -> list[dict[str, Any]]:
        """Stop the program, read both pipes to their end, and return the lines that came."""
        readers = [asyncio.to_thread(_read, end) for end in self._ends]
        texts = asyncio.gather(*readers)
        self.process.send_signal(signal.SIGTERM)
        text = "".join(await texts)
        return [json.loads(line) for line in text.splitlines()]

    async def stop(self) -> int:
        """Stop the program, without reading, and return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


def _read(end: int) -> str:
    with os.fdopen(os.dup(end)) as reader:
        return reader.read()


@asynccontextmanager
async def unread(*command: object) -> AsyncIterator[Unread]:
    pipes = [os.pipe(), os.pipe()]
    for _, end in pipes:
        fcntl.fcntl(end, F_SETPIPE_SZ, PIPE_BYTES)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", *map(str, command)),
        stdin=DEVNULL,
        stdout=pipes[0][1],
        stderr=pipes[1][1],
    )
    for _, end in pipes:
        os.close(end)
    try:
        yield Unread(process, [end for end, _ in pipes])
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        for end, _ in pipes:
            os.close(end)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def a_call() -> tuple[bytes, list[tuple[str, str]]]:
    """Return a call of a tool that there is not, whose line in the log is as long as can be."""
    body, headers = mcp_request("tools/call", {"name": f"sysecho.{NODE_ID}.echo.invoke", "arguments": {}})
    message = json.loads(body)
    message["params"]["_meta"] |= {META_TASK_ID: "t" * 250, META_STEP_ID: "s" * 250}
    return json.dumps(message).encode("ascii"), headers


def lost(metrics: str) -> float:
    families = {family.name: family for family in text_string_to_metric_families(metrics)}
    return families["edge_relay_log_lines_lost"].samples[0].value


async def ready(http: httpx2.AsyncClient, program: Unread) -> None:
    """Wait until the relay answers."""
    while program.process.returncode is None:
        try:
            await http.get("/healthz")
        except httpx2.ConnectError:
            await asyncio.sleep(0.05)  # it begins to listen; there is no event to wait for from outside
        else:
            return
    raise AssertionError("the relay has ended")


async def test_a_relay_whose_log_is_not_read_goes_on_and_says_what_was_lost(tmp_path: Path) -> None:
    CertificateAuthority(tmp_path / "ca", now_ms, os.urandom).create()
    url = f"http://127.0.0.1:{free_port()}"
    issuer = TokenIssuer(
        load_or_create_key(StateFiles(tmp_path).token_key, os.urandom), url, mcp_url(url), SchemaRegistry()
    )
    token = issuer.issue(
        sub="agent",
        tenant="default",
        scopes=["tools:call:read_only"],
        now_s=now_ms() // 1000,
        ttl_s=3600,
        jti="j" * 22,
    )
    body, headers = a_call()
    headers.append(("Authorization", f"Bearer {token}"))
    relay = unread(
        *(
            "relay",
            "run",
            "--broker",
            NO_BROKER,
            "--public-url",
            url,
            "--listen",
            url.removeprefix("http://"),
        ),
        *("--agent-rps", 100_000, "--agent-concurrency", 100, "--state-dir", tmp_path),
        *("--metrics-listen", tmp_path / "metrics.sock"),
    )
    async with (
        asyncio.timeout(BOUND_S),
        relay as program,
        httpx2.AsyncClient(base_url=url, trust_env=False) as http,
        metrics_client(tmp_path / "metrics.sock") as metrics,
    ):
        await ready(http, program)
        calls = 0

        async def count() -> float:
            return lost((await metrics.get("/metrics")).text)

        async def work() -> None:
            nonlocal calls
            while calls < MOST_CALLS and not (calls % 100 == 0 and await count()):
                calls += 1
                answer = await http.post("/mcp", content=body, headers=headers)
                assert answer.status_code == 200

        await asyncio.gather(*(work() for _ in range(WORKERS)))
        counted = await count()
        assert counted > 0
        lines = await program.read_on()
        assert await program.process.wait() == 0
    said = [line["count"] for line in lines if line.get("event") == "log lines lost"]
    assert sum(said) >= counted
    assert len([line for line in lines if "route" in line]) + sum(said) >= calls
    assert lines[-1].get("event") == "log lines lost" or "relay ended" in {
        line.get("event") for line in lines
    }
    assert sum(len(json.dumps(line)) for line in lines) > MAX_WAITING_BYTES


async def test_a_node_whose_log_is_not_read_goes_on_and_ends_when_told(tmp_path: Path) -> None:
    node = SimulatedCa("root of today", now_ms()).issue(now_ms=now_ms())
    write_identity(tmp_path, node)
    async with asyncio.timeout(BOUND_S), PlayedRelay(FrameReader(SchemaRegistry())).running() as relay:
        plan = DaemonPlan(NodeConfig(NO_BROKER, relay.url), tmp_path, free_port()).to_json()
        async with unread("kubelet.daemon", plan) as program:
            end = await relay.next()
            await end.admit(server_time_ms=now_ms())
            await end.accept()
            for number in range(100):
                answer = await end.command(
                    tool=f"sysecho.{node.node_id}.echo.invoke",
                    arguments={"message": str(number)},
                    sent_at_ms=now_ms(),
                    traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
                )
                assert answer.payload["result"]["message"] == str(number)
            assert await program.stop() == 0
