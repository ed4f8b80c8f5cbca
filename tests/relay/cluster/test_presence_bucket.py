import asyncio
from pathlib import Path

import pytest
from nats.aio.client import Client

from relay.cluster.presence_bucket import PresenceBucket
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

pytestmark = pytest.mark.integration


async def nothing(_bucket: PresenceBucket, _client: Client) -> None:
    """Stand for the end of a relay that is killed."""


async def until_dropped(nats: NatsServer, relay: str) -> None:
    """Wait until the bucket has nothing of the lease of ``relay``."""
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    lease = f"$KV.edge_main_presence.relay.{relay}"
    async with asyncio.timeout(BOUND_S):
        while True:
            info = await client.jetstream().stream_info("KV_edge_main_presence", subjects_filter=lease)
            if not info.state.subjects:
                break
            await asyncio.sleep(0.05)  # the server does not announce what it drops
    await client.close()


async def current(*members: Member) -> None:
    """Wait until each reads what the others write."""
    await until(lambda: all(member.part.presence.is_current for member in members))


async def test_a_node_is_shown_by_the_other_relays_while_it_is_connected(
    asker: Member, owner: Member
) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    owner.nodes.lose(NODE_ID)
    await until(lambda: NODE_ID not in asker.seen.elsewhere)
    assert owner.seen.changes == []


async def test_of_two_sessions_of_a_node_the_newer_stays(asker: Member, owner: Member) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    asker.nodes.connect(NODE_ID)
    await until(lambda: owner.seen.let_go_of)
    await until(lambda: NODE_ID in owner.seen.elsewhere)
    assert asker.seen.let_go_of == []
    assert asker.seen.moved == [NODE_ID]


async def test_of_two_that_begin_at_once_one_stays(asker: Member, owner: Member) -> None:
    await current(asker, owner)
    owner.nodes.connect(NODE_ID)
    asker.nodes.connect(NODE_ID)
    await until(lambda: len(owner.seen.let_go_of) + len(asker.seen.let_go_of) == 1)
    stays, left = (asker, owner) if owner.seen.let_go_of else (owner, asker)
    await until(lambda: NODE_ID in left.seen.elsewhere)
    assert stays.seen.let_go_of == []


async def test_a_relay_that_starts_reads_what_is_there(
    owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    owner.nodes.connect(NODE_ID)
    owner.nodes.connect(OTHER_NODE_ID)
    await current(owner)
    async with Member.joined(nats.config, tmp_path / "later", registry) as later:
        await until(lambda: later.seen.elsewhere == {NODE_ID, OTHER_NODE_ID})
        await current(later)
        assert later.part.health()["cluster"].state.endswith(": 2 relays, 2 nodes at others")
        ((relay, nodes),) = [(each["relay"], each["nodes"]) for each in later.part.status()["others"]]
        assert nodes == 2
        assert [relay] == list(later.part.presence.others())


async def test_the_nodes_of_a_relay_that_has_ended_are_gone(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with Member.joined(nats.config, tmp_path / "ends", registry) as ends:
        ends.nodes.connect(NODE_ID)
        await until(lambda: NODE_ID in asker.seen.elsewhere)
    await until(lambda: NODE_ID not in asker.seen.elsewhere)


async def test_the_lease_of_a_relay_that_was_killed_leaves_the_bucket(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_KEPT_S", 1)
    monkeypatch.setattr(PresenceBucket, "leave", nothing)
    async with Member.joined(nats.config, tmp_path / "killed", registry) as killed:
        await until(lambda: killed.part.peers.relay in asker.part.presence.others())
    await until_dropped(nats, killed.part.peers.relay)


async def test_the_sign_that_a_lease_was_given_up_leaves_the_bucket_too(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_KEPT_S", 1)
    async with Member.joined(nats.config, tmp_path / "ends", registry) as ends:
        await until(lambda: ends.part.peers.relay in asker.part.presence.others())
    await until_dropped(nats, ends.part.peers.relay)


async def test_what_happened_without_the_servers_is_written_when_they_are_back(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    nats.stop()
    await until(lambda: not owner.part.connection.is_connected)
    assert not owner.part.health()["cluster"].ready
    assert owner.part.health()["cluster"].lets_calls_flow
    owner.nodes.lose(NODE_ID)
    owner.nodes.connect(OTHER_NODE_ID)
    nats.start()
    await until(lambda: asker.seen.elsewhere == {OTHER_NODE_ID})


async def test_a_bucket_that_is_lost_is_made_and_written_again(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    nats.stop()
    nats.lose_all()
    asker.seen.elsewhere.clear()
    nats.start()
    key = f"node.{NODE_ID}"
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    context = client.jetstream()

    async def written() -> bool:
        bucket = await context.key_value("edge_main_presence")
        return key in await bucket.keys()

    async with asyncio.timeout(10):
        while True:
            try:
                if await written():
                    break
            except Exception:  # noqa: BLE001 - there is no bucket, or it is empty
                await asyncio.sleep(0.01)
    await client.close()


async def test_what_is_no_entry_is_not_read(asker: Member, nats: NatsServer) -> None:
    await current(asker)
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    bucket = await client.jetstream().key_value("edge_main_presence")
    for count, value in enumerate((b"", b"{", b'{"relay": 1}', b'{"relay":"' + b"A" * 2000 + b'"}'), 1):
        await bucket.put(f"node.{NODE_ID}", value)
        # One at a time: the bucket has the last value of a key alone, and so a reader that is slow.
        await asker.fake.lines.until("presence not read", count)
    assert asker.seen.changes == []
    await client.close()
