"""What this version has written, the one before it reads: an operator can go back to it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from relay.cli.demo.processes import Processes
from relay.state.kinds import FLEET_SEAL, GRANTS, REDEEMED, files_of
from schemas.addresses import BrokerAddress
from tests.compatibility.site import Programs, Site

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),  # some thirty commands of two versions
    pytest.mark.parametrize("broker_kind", ["nats-server"]),
]


@pytest.fixture
async def site(tmp_path: Path, broker: BrokerAddress) -> AsyncIterator[Site]:
    async with Processes.running(tmp_path) as processes:
        yield Site(tmp_path, broker, processes)


def only_name_in(directory: Path) -> str:
    (found,) = directory.iterdir()
    return found.name


async def decided(site: Site, programs: Programs, mocks: Path) -> str:
    """Have something of every kind decided, and return the node that is left."""
    await site.relay(programs, "ca", "init")
    await site.start_relay(programs)
    node_id = await site.enroll(programs, programs)
    await site.relay(programs, "ca", "issue", "--mock", "1", "--out", str(mocks), "--tenant", "acme")
    gone = only_name_in(mocks)
    await site.relay(programs, "node", "label", node_id, "Greenhouse")
    await site.relay(programs, "node", "tag", node_id, "gateway")
    await site.relay(programs, "ca", "revoke", gone)
    await site.relay(programs, "node", "forget", gone)
    await site.token(programs)
    (issued,) = (await shown(site, programs))["token list"]
    await site.relay(programs, "token", "revoke", issued["jti"])
    join = await site.relay(programs, "join-token", "create", "--tenant", "acme", "--public-url", site.url)
    await site.relay(programs, "join-token", "revoke", join.strip().split(".")[1])
    await site.relay(programs, "token", "rotate-key")
    await site.relay(programs, "people", "invite", "ada", "--public-url", "https://relay.example")
    return node_id


async def shown(site: Site, programs: Programs) -> dict[str, Any]:
    """Return what the commands show of the state."""
    commands = ("node list", "join-token list", "token list", "ca list")
    return {each: json.loads(await site.relay(programs, *each.split(), "--json")) for each in commands}


async def test_the_version_before_goes_on_with_the_state_that_this_one_has_written(
    site: Site, current: Programs, previous: Programs, tmp_path: Path
) -> None:
    node_id = await decided(site, current, tmp_path / "mocks")
    # What Ada's client has is not written: she needs a browser. To seal a fleet ends the way back.
    written = [file for file in files_of() if file not in {FLEET_SEAL, GRANTS, REDEEMED}]
    before = {file: (site.relay_state / file.path).read_bytes() for file in written}
    assert all(before.values())
    ours = await shown(site, current)
    await site.processes.stop("relay")

    theirs = await shown(site, previous)
    for command, rows in theirs.items():
        pairs = zip(rows, ours[command], strict=True)
        # What only this version knows of it, that one does not show.
        assert all(own | row == own for row, own in pairs), command
    await site.start_relay(previous)
    await site.start_node(previous)
    async with site.agent(previous) as agent:
        await agent.uses(node_id)
    await site.relay(previous, "node", "label", node_id, "Pump")
    # It appends to the files, and changes nothing of what was there; and back again.
    for file, data in before.items():
        assert (site.relay_state / file.path).read_bytes().startswith(data)
    await site.processes.stop("relay")
    labels = {each["node_id"]: each["label"] for each in (await shown(site, current))["node list"]}
    assert labels[node_id] == "Pump"
