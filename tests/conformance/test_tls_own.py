"""Clients that others wrote, unchanged, against a relay that serves with a certificate of its own CA.

Their TLS is BoringSSL in Claude Code and OpenSSL in Node.js. Codex has no command that connects; programs of
Electron and Go do not come from npm.
"""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.cli.demo.processes import Processes
from schemas.addresses import TOOLS_PATH, mcp_url
from tests.compatibility.site import Programs, Site
from tests.fakes.broker import Broker
from tests.fakes.npm import NpmPrograms

pytestmark = [pytest.mark.long, pytest.mark.asyncio(loop_scope="module")]

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class TlsRelay:
    """A relay with one node, and what a client is told of it."""

    url: str
    root: Path
    token: str
    echo: str

    @property
    def trusted(self) -> dict[str, str]:
        """The variable by which Node.js and Claude Code trust one more root."""
        return {"NODE_EXTRA_CA_CERTS": str(self.root)}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """One kind: no client sees it."""
    broker = Broker("nats-server", tmp_path_factory.mktemp("broker"))
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tls_relay(tmp_path_factory: pytest.TempPathFactory, broker: Broker) -> AsyncIterator[TlsRelay]:
    programs, directory = Programs(ROOT, metadata.version("edge-kubelet")), tmp_path_factory.mktemp("relay")
    async with Processes.running(directory) as processes:
        site = Site(directory, broker.address, processes)
        await site.relay(programs, "ca", "init")
        await site.start_relay(programs)
        node_id = await site.enroll(programs, programs)
        await site.start_node(programs)
        async with site.agent(programs) as agent:
            await agent.until_listed(node_id)
        yield TlsRelay(
            url=mcp_url(site.url, TOOLS_PATH),
            root=site.relay_state / "ca" / "server-root.pem",
            token=await site.token(programs),
            echo=f"sysecho-{node_id}-echo-invoke",
        )


async def test_claude_code_connects(tls_relay: TlsRelay, npm: NpmPrograms) -> None:
    entry = {
        "type": "http",
        "url": tls_relay.url,
        "headers": {"Authorization": f"Bearer {tls_relay.token}"},
    }
    (npm.home / ".claude.json").write_text(json.dumps({"mcpServers": {"edge": entry}}))
    checked = await asyncio.to_thread(claude_code, npm, tls_relay.trusted)
    assert "Connected" in checked, checked
    assert "Connected" not in await asyncio.to_thread(claude_code, npm, {})


def claude_code(npm: NpmPrograms, environment: dict[str, str]) -> str:
    """Return what its health check prints."""
    done = subprocess.run(
        [npm.claude_code(), "mcp", "list"],
        env={**npm.environment(), **environment},
        cwd=npm.home,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        timeout=90,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(("sdk", "era"), [("sdk", "legacy"), ("client", "legacy"), ("client", "2026-07-28")])
async def test_the_typescript_sdks_call_a_tool(
    tls_relay: TlsRelay, npm: NpmPrograms, sdk: str, era: str
) -> None:
    call = [{"name": tls_relay.echo, "arguments": {"message": "hello"}}]
    done = await asyncio.to_thread(
        npm.run,
        *("call_tools.mjs", sdk, tls_relay.url, era),
        stdin=json.dumps(call),
        environment={"EDGE_TOKEN": tls_relay.token, **tls_relay.trusted},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"][0]["result"]["structuredContent"]["message"] == "hello"


async def test_the_inspector_lists_the_tools(tls_relay: TlsRelay, npm: NpmPrograms) -> None:
    done = await asyncio.to_thread(
        npm.run,
        *("mcp-inspector", "--cli", tls_relay.url, "--transport", "http", "--format", "json"),
        *("--header", f"Authorization: Bearer {tls_relay.token}", "--method", "tools/list"),
        environment=tls_relay.trusted,
    )
    assert done.returncode == 0, done.stderr
    listed: dict[str, Any] = json.loads(done.stdout)["result"]
    assert tls_relay.echo in {tool["name"] for tool in listed["tools"]}


async def test_mcp_remote_bridges_to_it(tls_relay: TlsRelay, npm: NpmPrograms) -> None:
    bridge = npm.command("mcp-remote", tls_relay.url, "--header", "Authorization:${EDGE_AUTHORIZATION}")
    done = await asyncio.to_thread(
        npm.run,
        *("call_tools.mjs", "client", "http://unused", "legacy"),
        stdin=json.dumps([{"name": tls_relay.echo, "arguments": {"message": "hello"}}]),
        environment={
            "EDGE_STDIO": json.dumps(["env", *passed(tls_relay), *bridge]),
            "EDGE_TOKEN": tls_relay.token,
        },
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["outcomes"][0]["result"]["structuredContent"]["message"] == "hello"


def passed(relay: TlsRelay) -> list[str]:
    """Return the variables of the bridge, for a client that starts it with next to none."""
    authorization = f"EDGE_AUTHORIZATION=Bearer {relay.token}"
    return [authorization, *(f"{name}={value}" for name, value in relay.trusted.items())]
