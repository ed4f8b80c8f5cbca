"""7. An operator takes a node in with two commands, and no other node is admitted.

Steps: make a join token on the relay · enrol on the node · run it without further options · call it as an
agent · try the token a second time, and at another relay · read in the audit what was decided · revoke the
node, and enrol it again.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from mcp.client.client import Client
from mcp.client.streamable_http import streamable_http_client

from relay.cli.demo.local_system import Plan, start_broker, until_listed
from relay.cli.demo.processes import Processes
from schemas.addresses import mcp_url
from schemas.files import PRIVATE, write_atomic
from schemas.tls import client_context
from tests.fakes.demo import plan_below

pytestmark = pytest.mark.long

BOUND_S = 60
TENANT = "acme"


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str


async def run(*arguments: str | Path) -> Ran:
    """Run ``python -m`` with ``arguments`` to its end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m"),
        *map(str, arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(BOUND_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


@dataclass(frozen=True)
class Site:
    """A relay that serves over TLS with a certificate of its own CA, and a broker beside it."""

    plan: Plan
    processes: Processes
    url: str

    async def relay(self, *arguments: str) -> Ran:
        """Run a command of the relay."""
        return await run("relay", *arguments, "--state-dir", self.plan.state.root)

    async def join_token(self, name: str = "join-token", *options: str) -> Path:
        """Make a join token for one node, and return the file that it was carried in."""
        created = await self.relay(
            "join-token", "create", "--tenant", TENANT, "--public-url", self.url, *options
        )
        assert created.code == 0, created.err
        file = self.plan.directory / name
        write_atomic(file, created.out, PRIVATE)
        return file

    async def join_token_for(self, node_id: str) -> Path:
        """Make a join token for a node that keeps its id."""
        created = await self.relay("join-token", "create", "--for", node_id, "--public-url", self.url)
        assert "--again" in created.err
        file = self.plan.directory / "join-token-for"
        write_atomic(file, created.out, PRIVATE)
        return file

    async def enroll(self, name: str, token_file: Path, *options: str) -> Ran:
        """Enrol the node called ``name``."""
        state = self.plan.directory / name
        return await run(
            "kubelet", "enroll", self.url, "--token-file", token_file, "--state-dir", state, *options
        )

    async def start_node(self, name: str) -> None:
        """Start the daemon of the node called ``name``, which gets its state directory, and nothing else."""
        state = str(self.plan.directory / name)
        command = [sys.executable, "-P", "-m", "kubelet", "run", "--state-dir", state, "--loopback-port", "0"]
        await self.processes.start(name, command)

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[Client]:
        """Hold an official MCP client that believes the relay by its root."""
        issued = await self.relay(
            "token", "issue", "--sub", "agent", "--tenant", TENANT, "--public-url", self.url
        )
        assert issued.code == 0, issued.err
        headers = {"Authorization": f"Bearer {issued.out.strip()}"}
        root = (self.plan.state.ca / "server-root.pem").read_text()
        async with httpx2.AsyncClient(headers=headers, verify=client_context(root)) as http:
            transport = streamable_http_client(mcp_url(self.url), http_client=http)
            async with Client(transport) as client:
                yield client

    async def titles(self, node_id: str) -> set[str | None]:
        """Return the titles of the node's tools."""
        async with self.agent() as client:
            return {tool.title for tool in (await client.list_tools()).tools if node_id in tool.name}

    async def echo(self, node_id: str, message: str) -> object:
        """Call the node's echo as soon as it is connected and listed, and return what comes."""
        name = f"sysecho.{node_id}.echo.invoke"
        async with asyncio.timeout(BOUND_S), self.agent() as client:
            tools = await until_listed(client, {node_id}, self.processes.check)
            assert name in {tool.name for tool in tools}
            result = await client.call_tool(name, {"message": message})
        assert not result.is_error, result
        return (result.structured_content or {})["message"]


@asynccontextmanager
async def running_site(directory: Path, processes: Processes) -> AsyncIterator[Site]:
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    plan = plan_below(directory)
    site = Site(plan, processes, f"https://127.0.0.1:{plan.relay_port}")
    await start_broker(plan, processes)
    assert (await site.relay("ca", "init")).code == 0
    serving = ["--public-url", site.url, "--listen", f"127.0.0.1:{plan.relay_port}", "--tls-own"]
    brokers = ["--broker", plan.broker, "--node-broker", f"mqtt://localhost:{plan.broker_port}"]
    command = ["relay", "run", *brokers, *serving, "--state-dir", str(plan.state.root)]
    await processes.start("relay", [sys.executable, "-P", "-m", *command])
    await processes.until_listening(plan.relay_port)
    yield site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with Processes.running(tmp_path) as processes, running_site(tmp_path / "site", processes) as site:
        yield site


async def test_a_node_is_taken_in_with_two_commands_and_runs_without_another_word(site: Site) -> None:
    token_file = await site.join_token()
    enrolled = await site.enroll("kitchen", token_file, "--json")
    assert enrolled.code == 0, enrolled.err
    facts = json.loads(enrolled.out)
    assert (facts["tenant"], facts["relay"]) == (TENANT, site.url)
    assert facts["broker"] == f"mqtt://localhost:{site.plan.broker_port}"

    await site.start_node("kitchen")
    assert await site.echo(facts["node_id"], "hello") == "hello"

    # What the operator typed for the one node is of no use for another, nor a second time.
    other = await site.enroll("garage", token_file)
    assert (other.code, other.out) == (1, "")
    assert "the join token is used up, expired or withdrawn" in other.err
    await site.processes.kill("kitchen")
    again = await site.enroll("kitchen", token_file)
    assert (again.code, again.out) == (3, "")
    assert "is enrolled already" in again.err
    await site.start_node("kitchen")
    assert await site.echo(facts["node_id"], "still here") == "still here"

    # With a token of its own it comes in beside the first, under the name that the token carries.
    named = await site.join_token("another", "--label", "garage pi", "--tag", "site=north")
    second = await site.enroll("garage", named, "--json")
    assert second.code == 0, second.err
    await site.start_node("garage")
    assert await site.echo(json.loads(second.out)["node_id"], "hello too") == "hello too"
    assert "garage pi: Echo" in await site.titles(json.loads(second.out)["node_id"])
    shown = json.loads((await site.relay("node", "show", "garage pi", "--json")).out)
    assert (shown["node_id"], shown["tags"]) == (json.loads(second.out)["node_id"], ["site=north"])

    audited = [json.loads(line) for line in site.plan.state.audit.read_text().splitlines()]
    found = [line for line in audited if line.get("event") in {"enrolled", "enrolment_refused"}]
    assert [(line["event"], line.get("node_id"), line.get("reason")) for line in found] == [
        ("enrolled", facts["node_id"], None),
        ("enrolment_refused", None, "used_up"),
        ("enrolled", json.loads(second.out)["node_id"], None),
    ]
    assert found[0]["join_id"] == token_file.read_text().split(".")[1]
    assert token_file.read_text().split(".")[2] not in site.plan.state.audit.read_text()


async def test_a_token_of_another_relay_says_nothing_to_this_one(site: Site, tmp_path: Path) -> None:
    async with Processes.running(tmp_path / "site") as processes:
        async with running_site(tmp_path / "elsewhere", processes) as elsewhere:
            token_file = await elsewhere.join_token()
        refused = await site.enroll("kitchen", token_file)
    assert (refused.code, refused.out) == (1, "")
    assert f"{site.url} is another relay than the one that made this join token" in refused.err
    assert not (site.plan.directory / "kitchen" / "node.key").exists()


async def test_a_node_that_was_revoked_enrols_again_with_a_new_key_and_keeps_its_id_if_it_may(
    site: Site,
) -> None:
    enrolled = await site.enroll("kitchen", await site.join_token(), "--json")
    node_id = json.loads(enrolled.out)["node_id"]
    state = site.plan.directory / "kitchen"
    keys = [(state / "node.key").read_text()]
    assert (await site.relay("node", "label", node_id, "kitchen pi")).code == 0
    assert (await site.relay("ca", "revoke", node_id)).code == 0

    # A token that is worth nothing takes nothing away.
    withdrawn = await site.join_token("withdrawn")
    assert (await site.relay("join-token", "revoke", withdrawn.read_text().split(".")[1])).code == 0
    refused = await again(site, withdrawn)
    assert (refused.code, (state / "node.key").read_text()) == (1, keys[0])

    allowed = await site.join_token_for(node_id)
    back = await again(site, allowed)
    assert json.loads(back.out)["node_id"] == node_id, back.err
    keys.append((state / "node.key").read_text())
    await site.start_node("kitchen")
    assert await site.echo(node_id, "back") == "back"
    assert "kitchen pi: Echo" in await site.titles(node_id)
    await site.processes.kill("kitchen")

    # Revoked once more, it has no use of the token with which it came back.
    assert (await site.relay("ca", "revoke", node_id)).code == 0
    assert (await again(site, allowed)).code == 1
    other = await again(site, await site.join_token("plain"))
    assert json.loads(other.out)["node_id"] != node_id
    keys.append((state / "node.key").read_text())
    assert len(set(keys)) == 3
    assert not (state / "again").exists()
    await site.start_node("kitchen")
    assert await site.echo(json.loads(other.out)["node_id"], "new") == "new"


async def again(site: Site, token_file: Path) -> Ran:
    """Enrol the kitchen's node again; it knows its relay."""
    state = site.plan.directory / "kitchen"
    place = ("--token-file", token_file, "--state-dir", state, "--json")
    return await run("kubelet", "enroll", "--again", *place)
