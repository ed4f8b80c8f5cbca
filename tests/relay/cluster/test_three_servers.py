"""The presence bucket on a cluster of three nats-servers: its copies, and a server that is lost."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.api import KeyValueConfig, StreamInfo

from relay.cluster import presence_bucket as quorum
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.nats_cluster import NatsCluster
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration

BUCKET = "edge_main_presence"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    three = NatsCluster(tmp_path)
    yield three
    three.stop()


@asynccontextmanager
async def connected(server: NatsServer) -> AsyncIterator[Client]:
    client = Client()
    seed = server.credentials.read_text()
    await client.connect(server.url, nkeys_seed_str=seed, inbox_prefix="edge.main.inbox")
    try:
        yield client
    finally:
        await client.close()


async def info_of(server: NatsServer) -> StreamInfo:
    async with connected(server) as client:
        return (await (await client.jetstream().key_value(BUCKET)).status()).stream_info


async def until_copied(server: NatsServer) -> StreamInfo:
    """Wait until the bucket has three copies that are equal."""
    async with asyncio.timeout(2 * BOUND_S):
        while True:
            with suppress(NatsError):
                info = await info_of(server)
                copies = (info.cluster and info.cluster.replicas) or []
                if len(copies) == 2 and all(copy.current for copy in copies):
                    return info
            await asyncio.sleep(0.05)


async def made_on_one(cluster: NatsCluster) -> None:
    """Make the bucket with one copy, as a single server has it, once the servers have agreed on a leader."""
    async with asyncio.timeout(BOUND_S):
        while True:
            with suppress(NatsError):
                async with connected(cluster.servers[0]) as client:
                    await client.jetstream().create_key_value(KeyValueConfig(BUCKET, replicas=1))
                    return
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_the_bucket_of_a_single_server_is_copied_and_outlives_the_one_that_leads(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry
) -> None:
    cluster.start()
    await made_on_one(cluster)
    async with (
        Member.joined(cluster.config, tmp_path / "asker", registry) as asker,
        Member.joined(cluster.config, tmp_path / "owner", registry) as owner,
    ):
        owner.nodes.connect(NODE_ID)
        await until(lambda: NODE_ID in asker.seen.elsewhere)
        info = await until_copied(cluster.servers[1])
        assert info.cluster is not None
        (leader,) = (one for one in cluster.servers if one.directory.name == info.cluster.leader)
        await asyncio.to_thread(leader.kill)
        # A session that begins is written at another server, and is the newer one. Electing takes it seconds.
        asker.nodes.connect(OTHER_NODE_ID)
        await until(lambda: owner.seen.changes, 3 * BOUND_S)
        left = next(one for one in cluster.servers if one is not leader)
        assert (await info_of(left)).created == info.created
        assert asker.seen.changes == [(NODE_ID, True)]
        assert owner.seen.changes == [(OTHER_NODE_ID, True)]


async def test_a_cluster_that_has_lost_a_server_makes_no_bucket_with_fewer_copies(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry
) -> None:
    cluster.start(2)
    async with Member.joined(cluster.config, tmp_path / "relay", registry) as member:
        refused = await member.fake.lines.until("presence not available")
        member.nodes.connect(NODE_ID)
        assert not member.part.presence.is_current, refused
        cluster.servers[2].start()
        await until(lambda: member.part.presence.is_current)
        assert (await info_of(cluster.servers[0])).config.num_replicas == 3
        assert len(member.fake.lines.entries("presence not available")) < 5


@pytest.mark.long
async def test_a_server_that_is_cut_off_from_the_others_is_left_for_one_of_these(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quorum, "CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr(quorum, "FIRST_PATIENCE_S", 0.5)
    cluster.start()
    async with Member.joined(cluster.config, tmp_path / "before", registry) as before:
        await until(lambda: before.part.presence.is_current, 3 * BOUND_S)
    apart, other, _ = cluster.servers
    apart.stop()
    apart.part()
    await asyncio.to_thread(apart.start)
    two = replace(apart.config, servers=(*other.config.servers, *apart.config.servers))
    # By this randomness the second, which is cut off, is tried first.
    joining = Member.joined(two, tmp_path / "relay", registry, random_bytes=bytes)
    async with joining as member:
        assert (await member.fake.lines.until("cluster connected"))["server"] == apart.url
        await until(lambda: member.part.presence.is_current, 3 * BOUND_S)
        assert str(member.part.connection.server) == other.url
        (left,) = member.fake.lines.entries("cluster server left")
        assert (left["server"], left["to"]) == (apart.url, other.url)
