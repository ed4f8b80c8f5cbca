"""The presence bucket on a cluster of three nats-servers: its copies, and a server that is lost."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest
from nats.errors import Error as NatsError
from nats.js.api import Header, StreamInfo
from nats.js.errors import APIError

from relay.cluster import presence_bucket as quorum
from relay.cluster.jetstream import append, make_streams
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Machine, Member
from tests.fakes.cluster_server import FLEET, NatsCluster, NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, TENANT

if TYPE_CHECKING:
    from nats.js import JetStreamContext

pytestmark = pytest.mark.integration

BUCKET = "edge_main_presence"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[NatsCluster]:
    three = NatsCluster(tmp_path)
    yield three
    three.stop()


async def info_of(server: NatsServer) -> StreamInfo:
    async with server.connected() as client:
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


@pytest.mark.long
async def test_the_bucket_of_a_single_server_is_copied_and_outlives_the_one_that_leads(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry
) -> None:
    cluster.start()
    async with cluster.servers[0].administered() as client:
        # As on a single server, which has others now.
        context = client.jetstream()
        for stream in ("edge_main_ledger", "KV_edge_main_presence"):
            await context.update_stream((await context.stream_info(stream)).config, num_replicas=1)
        done = await make_streams(client, FLEET, 3, BOUND_S)
        assert set(done.values()) == {"has 3 copies now"}
        assert set((await make_streams(client, FLEET, 3, BOUND_S)).values()) == {"is there"}
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


async def test_nothing_is_made_with_fewer_copies_while_a_server_is_not_there(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry
) -> None:
    cluster.start(2)
    async with Member.joined(cluster.config, tmp_path / "relay", registry) as member:
        async with cluster.servers[0].administered() as client:
            with pytest.raises((NatsError, TimeoutError)):
                await make_streams(client, FLEET, 3, 0.5)
        member.nodes.connect(NODE_ID)
        assert not member.part.presence.is_current
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
    await asyncio.to_thread(apart.start_empty)
    two = replace(apart.config, servers=(*other.config.servers, *apart.config.servers))
    # By this randomness the second, which is cut off, is tried first.
    joining = Member.joined(two, tmp_path / "relay", registry, random_bytes=bytes)
    async with joining as member:
        assert (await member.fake.lines.until("cluster connected"))["server"] == apart.url
        await until(lambda: member.part.presence.is_current, 3 * BOUND_S)
        assert str(member.part.connection.server) == other.url
        (left,) = member.fake.lines.entries("cluster server left")
        assert (left["server"], left["to"]) == (apart.url, other.url)


# --- what relays share is shared on while the nats-server that leads is lost


async def leader_of(cluster: NatsCluster) -> str:
    """Return the name of the server that leads the stream."""
    async with cluster.servers[0].connected() as client:
        info = await client.jetstream().stream_info("edge_main_ledger")
    assert info.config.num_replicas == 3
    assert info.cluster is not None
    assert info.cluster.leader is not None
    return info.cluster.leader


@pytest.mark.long
async def test_what_is_decided_while_the_leading_server_is_killed_is_known_everywhere(
    cluster: NatsCluster, tmp_path: Path, registry: SchemaRegistry
) -> None:
    cluster.start()
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


# --- what is appended at an expected number, and in how many copies it is kept


SUBJECT = "edge.main.ledger.name.x"
EMPTY = {Header.EXPECTED_LAST_SUBJECT_SEQUENCE.value: "0"}


async def test_of_two_that_expect_the_same_the_first_appends(nats: NatsServer) -> None:
    async with nats.connected() as client:
        context = client.jetstream()
        for kept_s, appended in ((60, 1), (None, None)):
            assert await append(context, SUBJECT, b"{}", expected=EMPTY, kept_s=kept_s) == appended


class Refusing:
    """Stands for servers in a state that a test cannot bring about: another entry is on its way."""

    def __init__(self, err_code: int) -> None:
        self._err_code = err_code

    async def publish(self, *_arguments: object, **_options: object) -> None:
        raise APIError(code=400, err_code=self._err_code)


@pytest.mark.parametrize("err_code", [10071, 10164])
async def test_a_number_that_is_not_known_yet_is_another_than_expected(err_code: int) -> None:
    context = cast("JetStreamContext", Refusing(err_code))
    assert await append(context, SUBJECT, b"{}", expected=EMPTY, kept_s=None) is None


async def test_any_other_error_is_raised() -> None:
    context = cast("JetStreamContext", Refusing(10077))
    with pytest.raises(APIError):
        await append(context, SUBJECT, b"{}", expected=EMPTY, kept_s=None)
