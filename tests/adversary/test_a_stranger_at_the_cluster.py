"""A node or an agent reaches the servers of the cluster. It must read and write nothing of the relays'."""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError

from relay.demo.cluster_server import new_credentials
from relay.routing.cluster_messages import command_subject
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import ScriptedRouter
from tests.fakes.signer import NODE_ID

SEED, PUBLIC = new_credentials(os.urandom)
# As a node is admitted to a broker that the relays' servers are too: for its own topics alone.
NODE = f'{{ nkey: {PUBLIC}, permissions: {{ publish: ["$devices.x.>", "x.>"], subscribe: ["x.>"] }} }}\n'
SUBJECTS = [
    "edge.>",
    "edge.main.>",
    "edge.main.inbox.>",
    "edge.main.cancel",
    f"edge.main.cmd.{NODE_ID}",
    "edge.*.cmd.*",
    "edge.main.relay.*.*",
    "edge.*.telemetry.*",
    "$KV.>",
    "$KV.edge_main_presence.>",
    "edge.main.ledger.>",
    "$JS.API.>",
    ">",
]


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer.running(tmp_path, NODE) as server:
        yield server


async def stranger(nats: NatsServer, seed: str | None) -> tuple[Client, list[str]]:
    """Return a client of the servers, and what they have refused it."""
    client, refused = Client(), []

    async def failed(error: Exception) -> None:
        refused.append(str(error).lower())

    try:
        await client.connect(
            nats.url,
            nkeys_seed_str=seed,
            inbox_prefix="x.inbox",
            error_cb=failed,
            allow_reconnect=False,
            max_reconnect_attempts=1,
        )
    except NatsError:
        await client.close()
        raise
    return client, refused


async def test_without_credentials_nothing_is_admitted(nats: NatsServer) -> None:
    with pytest.raises(NatsError):
        await stranger(nats, None)


async def test_a_client_with_other_permissions_hears_nothing_of_a_call(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    heard: list[str] = []

    async def hear(message: object) -> None:
        heard.append(repr(message))

    client, refused = await stranger(nats, SEED)
    for subject in SUBJECTS:
        await client.subscribe(subject, cb=hear)
    await until(lambda: len(refused) == len(SUBJECTS))
    assert all("permissions violation for subscription" in text for text in refused)
    async with (
        Member.joined(nats.config, tmp_path / "one", registry) as asker,
        Member.joined(nats.config, tmp_path / "other", registry) as owner,
    ):
        await owner.hold(NODE_ID, asker)
        await asker.part.router.run(echo(NODE_ID))
        await client.flush()
    assert heard == []
    await client.close()


async def test_a_client_with_other_permissions_asks_cancels_and_writes_nothing(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    client, refused = await stranger(nats, SEED)
    local = ScriptedRouter()
    async with (
        Member.joined(nats.config, tmp_path / "one", registry) as asker,
        Member.joined(nats.config, tmp_path / "other", registry, local) as owner,
    ):
        await owner.hold(NODE_ID, asker)
        subjects = [
            command_subject(FLEET, NODE_ID),
            "edge.main.cancel",
            f"edge.main.relay.{NODE_ID.upper()}.session_call",
            f"edge.main.telemetry.{NODE_ID}",
            "edge.main.inbox.guessed",
            f"$KV.edge_main_presence.node.{NODE_ID}",
            "$JS.API.STREAM.DELETE.KV_edge_main_presence",
            f"edge.main.ledger.revocation.{'ab' * 32}",
            "$JS.API.STREAM.INFO.edge_main_ledger",
            "$JS.API.STREAM.MSG.GET.edge_main_ledger",
            "$JS.API.DIRECT.GET.edge_main_ledger",
            "$JS.API.CONSUMER.CREATE.edge_main_ledger.x",
            "$JS.API.STREAM.PURGE.edge_main_ledger",
        ]
        for subject in subjects:
            await client.publish(subject, b"{}", reply="x.inbox.1")
        await until(lambda: len(refused) == len(subjects))
        assert all("permissions violation for publish" in text for text in refused)
        async with asyncio.timeout(BOUND_S):
            await asker.part.router.run(echo(NODE_ID))
    assert len(local.commands) == 1
    await client.close()
