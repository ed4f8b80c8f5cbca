"""A relay of another fleet on the same NATS servers, which may do all there. It must reach nothing of ours.

It makes and updates streams of its own over our subjects, copies them to itself, fills them from ours, and
has what is in them published on ours. In one account with ours that would do, as the last test shows.
"""

import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from relay.cluster.credentials import new_nkey
from schemas.errors import ToolError
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import TENANT, Machine, Member, echo
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import ScriptedRouter, echoed
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration

DROPPED = "command of another relay dropped"
MINE = b'{"mine":1}'
WRITTEN = [
    f"edge.main.cmd.{NODE_ID}",
    f"edge.north.to.{NODE_ID}",
    f"edge.main.ledger.revocation.{'ab' * 32}",
    f"edge.north.in.{'ab' * 32}",
    "edge.main.ledger.of_a_later_version.x",
    f"$KV.edge_main_presence.node.{OTHER_NODE_ID}",
]
COPIED = "edge.north.copied"
STREAMS: list[dict[str, Any]] = [
    {"subjects": ["edge.main.cmd.>"], "republish": {"src": ">", "dest": f"{COPIED}.>"}},
    {"subjects": ["edge.main.inbox.>", "edge.main.relay.>"]},
    {"subjects": ["$KV.edge_main_presence.>"]},
    {"subjects": [], "mirror": {"name": "edge_main_ledger"}},
    {"subjects": [], "sources": [{"name": "edge_main_ledger"}, {"name": "KV_edge_main_presence"}]},
    {
        "subjects": ["edge.north.in.>"],
        "republish": {"src": "edge.north.in.>", "dest": "edge.main.ledger.revocation.>"},
    },
    {
        "subjects": ["edge.north.to.>"],
        "subject_transform": {"src": "edge.north.to.>", "dest": "edge.main.cmd.>"},
        "republish": {"src": ">", "dest": ">"},
    },
]


class TwoFleets(NatsServer):
    """A server with an account of another fleet, whose relay may do anything in it."""

    def config_text(self) -> str:
        """Return the file that names the others."""
        other = 'edge_north: { jetstream: enabled, users: [ { user: "north", password: "north" } ] }'
        return super().config_text().replace("accounts {", f"accounts {{\n  {other}")


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with TwoFleets.running(tmp_path) as server:
        yield server


@asynccontextmanager
async def hostile(nats: NatsServer, heard: list[str], **user: Any) -> AsyncIterator[Client]:
    """Hold a client that notes which subjects it hears others on."""

    async def hear(message: Msg) -> None:
        if message.data != MINE and not message.subject.startswith(("_INBOX.", "$JS.", "$SYS.")):
            heard.append(message.subject)

    client = Client()
    await client.connect(nats.url, allow_reconnect=False, **user)
    await client.subscribe(f"{COPIED}.>" if "nkeys_seed_str" in user else ">", cb=hear)
    yield client
    await client.close()


async def made(client: Client, number: int) -> list[bool]:
    """Make a stream, and update it; return which of the two is granted."""
    name, granted = f"mine_{number}", []
    for step in ("CREATE", "UPDATE"):
        body = json.dumps({"name": name, **STREAMS[number]}).encode()
        answer = await client.request(f"$JS.API.STREAM.{step}.{name}", body, BOUND_S)
        granted.append("error" not in json.loads(answer.data))
    return granted


async def test_it_reads_commands_and_stops_nothing(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    heard, local = list[str](), ScriptedRouter()
    one, other = (Machine.made(tmp_path / name, issues=name == "one") for name in ("one", "other"))
    kid = one.issued(NODE_ID)
    async with (
        Member.joined(nats.config, tmp_path / "asker", registry, ledgers=one.ledgers) as asker,
        Member.joined(nats.config, tmp_path / "owner", registry, local, other.ledgers) as owner,
        hostile(nats, heard, user="north", password="north") as client,
    ):
        await until(lambda: asker.part.health().ready and owner.part.health().ready)
        # The servers grant most of it: in its own account, where these are subjects as any.
        assert [(await made(client, number))[0] for number in range(len(STREAMS))].count(True) >= 5
        for name in ("edge_main_ledger", "KV_edge_main_presence"):
            for step in ("INFO", "PURGE", "DELETE"):
                answer = await client.request(f"$JS.API.STREAM.{step}.{name}", b"", BOUND_S)
                assert "error" in json.loads(answer.data)
        await owner.hold(NODE_ID, asker)
        dropped = len(owner.fake.lines.entries(DROPPED))
        assert await asker.part.router.run(echo(NODE_ID)) == echoed(echo(NODE_ID))
        one.revoke(NODE_ID, asker)
        await until(lambda: other.revoked == {kid})
        for subject in WRITTEN:
            await client.publish(subject, MINE)
        await client.flush()
        # Nothing of that has come: what was said behind it has, and calls flow.
        one.names.label(NODE_ID, TENANT, "pump")
        asker.part.ledgers.changed("name")
        await until(lambda: other.labels == {NODE_ID: "pump"})
        assert await asker.part.router.run(echo(NODE_ID)) == echoed(echo(NODE_ID))
        for member in (asker, owner):
            assert member.part.ledgers.understands
            assert member.fake.lines.entries("presence not read") == []
        assert len(owner.fake.lines.entries(DROPPED)) == dropped
    assert heard == []
    assert len(local.commands) == 2


async def test_in_one_account_with_ours_one_stream_of_its_own_would_do(
    tmp_path: Path, registry: SchemaRegistry
) -> None:
    seed, key = new_nkey(os.urandom)
    permissions = {
        "publish": {"allow": ["$JS.API.STREAM.CREATE.mine_0", "$JS.API.STREAM.UPDATE.mine_0"]},
        "subscribe": {"allow": ["_INBOX.>", f"{COPIED}.>"]},
    }
    heard = list[str]()
    with NatsServer.running(tmp_path, users=[{"nkey": key, "permissions": permissions}]) as nats:
        async with (
            Member.joined(nats.config, tmp_path / "asker", registry) as asker,
            Member.joined(nats.config, tmp_path / "owner", registry) as owner,
            hostile(nats, heard, nkeys_seed_str=seed) as client,
        ):
            assert await made(client, 0) == [True, True]
            await owner.hold(NODE_ID, asker)
            with suppress(ToolError):  # its stream has answered too
                await asker.part.router.run(echo(NODE_ID))
            await until(lambda: f"{COPIED}.edge.main.cmd.{NODE_ID}" in heard)
