"""What relays share is shared on while the nats-server that leads is lost."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client

from schemas.registry import SchemaRegistry
from tests.fakes.cluster_machine import Machine
from tests.fakes.nats_cluster import NatsCluster
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

pytestmark = [pytest.mark.integration, pytest.mark.long]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    three = NatsCluster(tmp_path)
    three.start()
    yield three
    three.stop()


async def leader_of(cluster: NatsCluster) -> str:
    """Return the name of the server that leads the stream."""
    server, client = cluster.servers[0], Client()
    seed = server.credentials.read_text()
    await client.connect(server.url, nkeys_seed_str=seed, inbox_prefix="edge.main.inbox")
    info = await client.jetstream().stream_info("edge_main_ledger")
    await client.close()
    assert info.config.num_replicas == 3
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader


async def test_what_is_decided_while_the_leading_server_is_killed_is_known_everywhere(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry
) -> None:
    one, other = (Machine.made(tmp_path / name, issues=name == "one") for name in ("one", "other"))
    before, kid = one.issued(NODE_ID), one.issued(OTHER_NODE_ID)
    async with (
        one.joined(cluster.config, registry) as first,
        other.joined(cluster.config, registry) as second,
    ):
        one.revoke(NODE_ID, first)
        await until(lambda: other.revoked == {before}, 3 * BOUND_S)
        leader = await leader_of(cluster)
        (server,) = (each for each in cluster.servers if each.directory.name == leader)
        await asyncio.to_thread(server.kill)
        one.revoke(OTHER_NODE_ID, first)
        other.names.label(NODE_ID, TENANT, "pump")
        second.part.ledgers.changed("name")
        # Another server is elected first.
        await until(lambda: other.revoked == {before, kid} and one.labels == {NODE_ID: "pump"}, 3 * BOUND_S)
