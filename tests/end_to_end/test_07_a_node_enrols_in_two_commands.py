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
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from relay.cli.demo.local_system import start_broker
from schemas.files import PRIVATE, write_atomic
from tests.fakes.demo import plan_below
from tests.fakes.small_fleet import SmallFleet, small_fleet

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


async def join_token(site: SmallFleet, name: str = "join-token", *options: str) -> Path:
    """Make a join token for one node, and return the file that it was carried in."""
    file = site.directory / name
    write_atomic(file, await site.relay("join-token", "create", "--tenant", TENANT, *options), PRIVATE)
    return file


async def join_token_for(site: SmallFleet, node_id: str) -> Path:
    """Make a join token for a node that keeps its id."""
    created = await run("relay", "join-token", "create", "--for", node_id, "--state-dir", site.state.root)
    assert "--again" in created.err
    file = site.directory / "join-token-for"
    write_atomic(file, created.out, PRIVATE)
    return file


async def enroll(site: SmallFleet, name: str, token_file: Path, *options: str) -> Ran:
    """Enrol the node called ``name``."""
    place = ("--token-file", token_file, "--state-dir", site.directory / name)
    return await run("kubelet", "enroll", site.url, *place, *options)


async def titles(site: SmallFleet, node_id: str) -> set[str | None]:
    """Return the titles of the node's tools."""
    async with site.agent() as client:
        return {tool.title for tool in (await client.list_tools()).tools if node_id in tool.name}


@asynccontextmanager
async def running_site(directory: Path) -> AsyncIterator[SmallFleet]:
    """Hold a relay that serves over TLS with a certificate of its own CA, and a broker beside it."""
    directory.mkdir()  # noqa: ASYNC240 - nothing else runs yet
    async with small_fleet(directory, secure=True) as site:
        site.tenant = TENANT
        plan = replace(plan_below(directory), broker_port=site.broker_port)
        await start_broker(plan, site.processes)
        for_nodes = f"mqtt://localhost:{site.broker_port}"
        await site.start_relay("--broker", plan.broker, "--node-broker", for_nodes)
        yield site


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with running_site(tmp_path / "site") as site:
        yield site


async def test_a_node_is_taken_in_with_two_commands_and_runs_without_another_word(site: SmallFleet) -> None:
    token_file = await join_token(site)
    enrolled = await enroll(site, "kitchen", token_file, "--json")
    assert enrolled.code == 0, enrolled.err
    facts = json.loads(enrolled.out)
    assert (facts["tenant"], facts["relay"]) == (TENANT, site.url)
    assert facts["broker"] == f"mqtt://localhost:{site.broker_port}"

    await site.start_node("kitchen")
    assert await site.echo(facts["node_id"], "hello") == "hello"

    # What the operator typed for the one node is of no use for another, nor a second time.
    other = await enroll(site, "garage", token_file)
    assert (other.code, other.out) == (1, "")
    assert "the join token is used up, expired or withdrawn" in other.err
    await site.processes.kill("kitchen")
    again = await enroll(site, "kitchen", token_file)
    assert (again.code, again.out) == (3, "")
    assert "is enrolled already" in again.err
    await site.start_node("kitchen")
    assert await site.echo(facts["node_id"], "still here") == "still here"

    # With a token of its own it comes in beside the first, under the name that the token carries.
    named = await join_token(site, "another", "--label", "garage pi", "--tag", "site=north")
    second = await enroll(site, "garage", named, "--json")
    assert second.code == 0, second.err
    await site.start_node("garage")
    assert await site.echo(json.loads(second.out)["node_id"], "hello too") == "hello too"
    assert "garage pi: Echo" in await titles(site, json.loads(second.out)["node_id"])
    shown = json.loads(await site.relay("node", "show", "garage pi", "--json"))
    assert (shown["node_id"], shown["tags"]) == (json.loads(second.out)["node_id"], ["site=north"])

    audited = [json.loads(line) for line in site.state.audit.read_text().splitlines()]
    found = [line for line in audited if line.get("event") in {"enrolled", "enrolment_refused"}]
    assert [(line["event"], line.get("node_id"), line.get("reason")) for line in found] == [
        ("enrolled", facts["node_id"], None),
        ("enrolment_refused", None, "used_up"),
        ("enrolled", json.loads(second.out)["node_id"], None),
    ]
    assert found[0]["join_id"] == token_file.read_text().split(".")[1]
    assert token_file.read_text().split(".")[2] not in site.state.audit.read_text()


async def test_a_token_of_another_relay_says_nothing_to_this_one(site: SmallFleet, tmp_path: Path) -> None:
    async with running_site(tmp_path / "elsewhere") as elsewhere:
        token_file = await join_token(elsewhere)
    refused = await enroll(site, "kitchen", token_file)
    assert (refused.code, refused.out) == (1, "")
    assert f"{site.url} is another relay than the one that made this join token" in refused.err
    assert not (site.directory / "kitchen" / "node.key").exists()


async def test_a_node_that_was_revoked_enrols_again_with_a_new_key_and_keeps_its_id_if_it_may(
    site: SmallFleet,
) -> None:
    enrolled = await enroll(site, "kitchen", await join_token(site), "--json")
    node_id = json.loads(enrolled.out)["node_id"]
    state = site.directory / "kitchen"
    keys = [(state / "node.key").read_text()]
    await site.relay("node", "label", node_id, "kitchen pi")
    await site.relay("ca", "revoke", node_id)

    # A token that is worth nothing takes nothing away.
    withdrawn = await join_token(site, "withdrawn")
    await site.relay("join-token", "revoke", withdrawn.read_text().split(".")[1])
    refused = await again(site, withdrawn)
    assert (refused.code, (state / "node.key").read_text()) == (1, keys[0])

    allowed = await join_token_for(site, node_id)
    back = await again(site, allowed)
    assert json.loads(back.out)["node_id"] == node_id, back.err
    keys.append((state / "node.key").read_text())
    await site.start_node("kitchen")
    assert await site.echo(node_id, "back") == "back"
    assert "kitchen pi: Echo" in await titles(site, node_id)
    await site.processes.kill("kitchen")

    # Revoked once more, it has no use of the token with which it came back.
    await site.relay("ca", "revoke", node_id)
    assert (await again(site, allowed)).code == 1
    other = await again(site, await join_token(site, "plain"))
    assert json.loads(other.out)["node_id"] != node_id
    keys.append((state / "node.key").read_text())
    assert len(set(keys)) == 3
    assert not (state / "again").exists()
    await site.start_node("kitchen")
    assert await site.echo(json.loads(other.out)["node_id"], "new") == "new"


async def again(site: SmallFleet, token_file: Path) -> Ran:
    """Enrol the kitchen's node again; it knows its relay."""
    state = site.directory / "kitchen"
    place = ("--token-file", token_file, "--state-dir", state, "--json")
    return await run("kubelet", "enroll", "--again", *place)
