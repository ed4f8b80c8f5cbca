"""25. Of two relays of one fleet, one has the CA's key, and nodes enrol at the other.

Steps: make a backup without the CA's key, and restore it as a second relay · enrol a node there, and call
it · the relay with the key is gone: the node is called all the same, and another is told when to try again ·
it is back: that one enrols · replace the key of agents' tokens: the second relay accepts tokens by it, and by
the old one.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from relay.cli.demo.local_system import Plan, start_broker, start_cluster_server, until_listed
from relay.cli.demo.processes import Processes
from relay.settings.config import StateFiles
from schemas.addresses import mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.process.status_socket import read_status
from schemas.tls import client_context
from tests.end_to_end.test_07_a_node_enrols_in_two_commands import Ran, run
from tests.fakes.demo import error_of, plan_below
from tests.fakes.polling import until
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.long

BOUND_S = 60


@dataclass(frozen=True)
class OneRelay:
    """A relay of the fleet, its process called ``name``; ``fleet_url`` is the public URL of both."""

    name: str
    plan: Plan
    processes: Processes
    fleet_url: str

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.plan.relay_port}"

    async def command(self, *arguments: str | Path) -> Ran:
        ran = await run("relay", *arguments, "--state-dir", self.plan.state.root)
        assert ran.code == 0, ran.err
        return ran

    async def start(self) -> None:
        listen = f"127.0.0.1:{self.plan.relay_port}"
        serving = ["--public-url", self.fleet_url, "--listen", listen, "--tls-own"]
        state = ["--state-dir", str(self.plan.state.root), "--broker", self.plan.broker]
        command = [sys.executable, "-P", "-m", "relay", "run", *serving, *state, *self.plan.relay_options]
        await self.processes.start(self.name, command)
        await self.processes.until_listening(self.plan.relay_port)
        await until(lambda: read_status(self.plan.state.root)["subsystems"]["cluster"]["ready"])

    async def enroll(self, name: str, token: str) -> Ran:
        """Enrol the node called ``name`` at this relay."""
        file, state = self.plan.directory / f"{name}.token", self.plan.directory / name
        write_atomic(file, token, PRIVATE)
        return await run("kubelet", "enroll", self.url, "--token-file", file, "--state-dir", state, "--json")

    def audited(self, *events: str) -> list[tuple[str, str]]:
        lines = map(json.loads, self.plan.state.audit.read_text().splitlines())
        return [(line["event"], line["kid"]) for line in lines if line.get("event") in events]


@dataclass(frozen=True)
class Fleet:
    first: OneRelay
    second: OneRelay

    async def join_token(self) -> str:
        created = await self.first.command("join-token", "create", "--public-url", self.first.fleet_url)
        return created.out

    async def start_node(self, name: str) -> None:
        """Start the node, which knows the addresses of both relays."""
        state = str(self.second.plan.directory / name)
        relays = ["--relay", self.first.url, "--relay", self.second.url]
        command = ["kubelet", "run", "--state-dir", state, "--loopback-port", "0", *relays]
        await self.second.processes.start(name, [sys.executable, "-P", "-m", *command])

    async def admits(self, token: str) -> bool:
        """Return whether the second relay accepts the token."""
        root = (self.second.plan.state.ca / "server-root.pem").read_text()
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx2.AsyncClient(headers=headers, verify=client_context(root), trust_env=False) as http:
            return (await http.post(mcp_url(self.second.url), json={})).status_code != 401

    async def echo(self, node_id: str, token: str) -> object:
        """Call the node by way of the second relay, once it is listed and connected."""
        headers = {"Authorization": f"Bearer {token}"}
        root = (self.second.plan.state.ca / "server-root.pem").read_text()
        url = mcp_url(self.second.url)
        async with (
            asyncio.timeout(BOUND_S),
            httpx2.AsyncClient(headers=headers, verify=client_context(root), trust_env=False) as http,
            Client(streamable_http_client(url, http_client=http)) as client,
        ):
            await until_listed(client, {node_id}, self.second.processes.check)
            called = partial(client.call_tool, f"sysecho.{node_id}.echo.invoke", {"message": "hello"})
            while (result := await called()).is_error:
                assert error_of(result)["code"] in {"E_NODE_OFFLINE", "E_RATE_LIMITED"}, result
        assert not result.is_error, result
        return (result.structured_content or {})["message"]


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with Processes.running(tmp_path) as processes:
        plan = await start_cluster_server(plan_below(tmp_path), processes)
        await start_broker(plan, processes)
        url = f"https://127.0.0.1:{plan.relay_port}"
        first = OneRelay("relay", plan, processes, url)
        await first.command("ca", "init")
        await first.start()
        other = replace(plan, state=StateFiles(tmp_path / "second"), relay_port=unused_port())
        yield Fleet(first, OneRelay("second", other, processes, url))


async def test_nodes_enrol_at_a_relay_that_has_no_key_of_the_ca(fleet: Fleet, tmp_path: Path) -> None:
    first, second = fleet.first, fleet.second
    saved = tmp_path / "another.tar"
    await first.command("ca", "backup", saved, "--without-ca-key", "--plain")
    restored = await second.command("ca", "restore", saved, "--plain")
    assert "run it with --cluster" in restored.err
    await second.start()
    token, kitchen = await fleet.join_token(), "kitchen"
    assert not {"root.key", "server-root.key"} & {path.name for path in second.plan.state.ca.iterdir()}
    refused = await run("relay", "join-token", "create", "--state-dir", second.plan.state.root)
    assert (refused.code, refused.out) == (3, "")
    assert "make join tokens on the relay that has it" in refused.err
    assert not second.plan.state.join_tokens.exists()

    enrolled = await second.enroll(kitchen, token)
    assert enrolled.code == 0, enrolled.err
    facts = json.loads(enrolled.out)
    assert facts["relay"] == first.fleet_url
    ((_, kid),) = first.audited("enrolled")
    assert second.audited("enrolled", "enrolment_forwarded") == [("enrolment_forwarded", kid)]
    again = await second.enroll("garage", token)
    assert "the join token is used up" in again.err

    agent = (await first.command("token", "issue", "--sub", "agent", "--public-url", first.fleet_url)).out
    await fleet.start_node(kitchen)
    assert await fleet.echo(facts["node_id"], agent.strip()) == "hello"

    # The relay with the key is gone: who is enrolled goes on, and who is not is told when to try again.
    next_token = await fleet.join_token()
    await first.processes.kill(first.name)
    away = await second.enroll("garage", next_token)
    assert away.code == 1
    assert "run it again in 15 s" in away.err
    assert await fleet.echo(facts["node_id"], agent.strip()) == "hello"

    await first.start()
    enrolled = await second.enroll("garage", next_token)
    assert enrolled.code == 0, enrolled.err

    # Another key signs tokens. The second relay has neither, and verifies by both.
    await first.command("token", "rotate-key")
    after = (await first.command("token", "issue", "--sub", "agent")).out.strip()
    async with asyncio.timeout(BOUND_S):
        while not await fleet.admits(after):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.05)
    for token in (after, agent.strip()):
        assert await fleet.echo(facts["node_id"], token) == "hello"
    assert not second.plan.state.token_key.exists()
    refused = await run("relay", "token", "issue", "--sub", "x", "--state-dir", second.plan.state.root)
    assert (refused.code, refused.out) == (3, "")
