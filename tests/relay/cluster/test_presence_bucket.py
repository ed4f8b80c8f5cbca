"""Entries of nodes and relays in a real nats-server, and when a relay looks for another server."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js.kv import KeyValue

from relay.ascii_json import encoded
from relay.cli.demo.cluster_server import new_credentials, relay_permissions
from relay.cluster.connection import Work
from relay.cluster.presence import LEASE_S, Effects, Presence
from relay.cluster.presence_bucket import (
    CHECK_INTERVAL_S,
    FIRST_PATIENCE_S,
    LONGEST_PATIENCE_S,
    MAX_BUCKET_BYTES,
    PresenceBucket,
    Quorum,
)
from schemas.errors import Failure, ToolError
from schemas.files import PRIVATE, write_atomic
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.polling import BOUND_S, until
from tests.fakes.routers import echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID


async def nothing(_bucket: PresenceBucket, _client: Client) -> None:
    """Stand for the end of a relay that is killed."""


@asynccontextmanager
async def relay_user(nats: NatsServer) -> AsyncIterator[KeyValue]:
    """Hold the bucket as one who has the credentials of a relay."""
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    yield await client.jetstream().key_value("edge_main_presence")
    await client.close()


async def until_dropped(nats: NatsServer, key: str) -> None:
    """Wait until the bucket has nothing under ``key``."""
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    subject = f"$KV.edge_main_presence.{key}"
    async with asyncio.timeout(BOUND_S):
        while True:
            info = await client.jetstream().stream_info("KV_edge_main_presence", subjects_filter=subject)
            if not info.state.subjects:
                break
            await asyncio.sleep(0.05)  # the server does not announce what it drops
    await client.close()


async def until_renewed(nats: NatsServer, key: str) -> None:
    """Wait until ``key`` of the bucket is written once more."""
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    watcher = await (await client.jetstream().key_value("edge_main_presence")).watch(key)
    revisions = set[int | None]()
    async with asyncio.timeout(BOUND_S):
        async for entry in watcher:
            revisions |= {entry.revision} if entry is not None else set()
            if len(revisions) == 2:
                break
    await client.close()


async def current(*members: Member) -> None:
    """Wait until each reads what the others write."""
    await until(lambda: all(member.part.presence.is_current for member in members))


@pytest.mark.integration
async def test_a_node_is_shown_by_the_other_relays_while_it_is_connected(
    asker: Member, owner: Member
) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    owner.nodes.lose(NODE_ID)
    await until(lambda: NODE_ID not in asker.seen.elsewhere)
    assert owner.seen.changes == []


@pytest.mark.integration
async def test_of_two_sessions_of_a_node_the_newer_stays(asker: Member, owner: Member) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    asker.nodes.connect(NODE_ID)
    await until(lambda: owner.seen.superseded)
    await until(lambda: NODE_ID in owner.seen.elsewhere)
    assert asker.seen.superseded == []
    assert asker.seen.moved == [NODE_ID]


@pytest.mark.integration
async def test_of_two_that_begin_at_once_one_stays(asker: Member, owner: Member) -> None:
    await current(asker, owner)
    owner.nodes.connect(NODE_ID)
    asker.nodes.connect(NODE_ID)
    await until(lambda: len(owner.seen.superseded) + len(asker.seen.superseded) == 1)
    stays, left = (asker, owner) if owner.seen.superseded else (owner, asker)
    await until(lambda: NODE_ID in left.seen.elsewhere)
    assert stays.seen.superseded == []


@pytest.mark.integration
async def test_a_relay_that_starts_reads_what_is_there(
    owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    owner.nodes.connect(NODE_ID)
    owner.nodes.connect(OTHER_NODE_ID)
    await until(lambda: owner.part.health()["cluster"].state.endswith(": 1 relay, 0 nodes at others"))
    async with Member.joined(nats.config, tmp_path / "later", registry) as later:
        await until(lambda: later.seen.elsewhere == {NODE_ID, OTHER_NODE_ID})
        await until(lambda: later.part.health()["cluster"].state.endswith(": 2 relays, 2 nodes at others"))
        ((relay, nodes),) = [(each["relay"], each["nodes"]) for each in later.part.status()["others"]]
        assert nodes == 2
        assert [relay] == list(later.part.presence.others())


@pytest.mark.integration
async def test_a_relay_that_cannot_read_says_that_it_runs(
    tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_INTERVAL_S", 0.1)
    seed, key = new_credentials(os.urandom)
    # As while the servers elect the leader that makes readers: there is no answer to that alone.
    allowed = relay_permissions(FLEET)
    create = "$JS.API.CONSUMER.CREATE.KV_edge_main_presence"
    allowed["publish"]["deny"] = [create, f"{create}.>"]
    user = f"    {{ nkey: {key}, permissions: {json.dumps(allowed)} }}\n"
    with NatsServer.running(tmp_path, user) as nats:
        limited = tmp_path / "limited.seed"
        write_atomic(limited, seed, PRIVATE)
        config = replace(nats.config, credentials=limited)
        async with (
            Member.joined(nats.config, tmp_path / "reads", registry) as reads,
            Member.joined(config, tmp_path / "does not", registry) as member,
        ):
            relay = member.part.peers.relay
            await until(lambda: relay in reads.part.presence.others())
            await until_renewed(nats, f"relay.{relay}")
            assert not member.part.presence.is_current


@pytest.mark.integration
async def test_a_command_goes_where_the_node_is_and_not_where_the_bucket_says(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    await asker.hold(NODE_ID, owner)
    await until(lambda: NODE_ID in owner.seen.elsewhere)
    owner.part.presence.relay_gone(asker.part.peers.relay)  # as when its lease has ended
    assert owner.seen.elsewhere == set()
    assert await owner.part.router.run(echo(NODE_ID)) == echoed(echo(NODE_ID))
    # A relay that never ran has a lease, and a node that no relay holds.
    relay = owner.fake.environment.ulids.new()
    async with relay_user(nats) as bucket:
        await bucket.put(f"relay.{relay}", encoded({"url": PUBLIC_URL}).encode())
        entry = {"relay": relay, "session_id": relay, "connected": True}
        await bucket.put(f"node.{OTHER_NODE_ID}", encoded(entry).encode())
    await until(lambda: (OTHER_NODE_ID, True) in owner.seen.changes)
    with pytest.raises(ToolError) as refused:
        await owner.part.router.run(echo(OTHER_NODE_ID))
    assert refused.value.failure is Failure.NODE_OFFLINE


@pytest.mark.integration
async def test_while_nodes_stay_connected_only_leases_are_written(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    for node_id in (NODE_ID, OTHER_NODE_ID):
        owner.nodes.connect(node_id)
    await until(lambda: asker.seen.elsewhere == {NODE_ID, OTHER_NODE_ID})
    leases = {f"relay.{member.part.peers.relay}" for member in (asker, owner)}
    written = list[str]()
    async with relay_user(nats) as bucket, asyncio.timeout(BOUND_S):
        watcher = await bucket.watch(">")
        are_new = False
        async for entry in watcher:
            if entry is None:
                are_new = True
            elif are_new:
                written.append(entry.key)
            if all(written.count(lease) >= 2 for lease in leases):
                break
    assert set(written) == leases


@pytest.mark.integration
async def test_the_nodes_of_a_relay_that_has_ended_are_gone(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    async with Member.joined(nats.config, tmp_path / "ends", registry) as ends:
        ends.nodes.connect(NODE_ID)
        await until(lambda: NODE_ID in asker.seen.elsewhere)
    await until(lambda: NODE_ID not in asker.seen.elsewhere)


@pytest.mark.integration
async def test_the_lease_of_a_relay_that_was_killed_leaves_the_bucket(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_KEPT_S", 1)
    monkeypatch.setattr(PresenceBucket, "leave", nothing)
    async with Member.joined(nats.config, tmp_path / "killed", registry) as killed:
        await until(lambda: killed.part.peers.relay in asker.part.presence.others())
    await until_dropped(nats, f"relay.{killed.part.peers.relay}")


@pytest.mark.integration
async def test_the_sign_that_a_lease_was_given_up_leaves_the_bucket_too(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_KEPT_S", 1)
    async with Member.joined(nats.config, tmp_path / "ends", registry) as ends:
        await until(lambda: ends.part.peers.relay in asker.part.presence.others())
    await until_dropped(nats, f"relay.{ends.part.peers.relay}")


@pytest.mark.integration
async def test_the_entry_of_a_session_that_has_ended_leaves_the_bucket_and_the_node_may_come_back(
    asker: Member, owner: Member, nats: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.ENDED_KEPT_S", 1)
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    owner.nodes.lose(NODE_ID)
    await until_dropped(nats, f"node.{NODE_ID}")
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    asker.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in owner.seen.elsewhere)
    assert asker.seen.superseded == []


@pytest.mark.integration
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


@pytest.mark.integration
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


@pytest.mark.integration
async def test_the_nodes_of_a_relay_that_was_killed_stay_lost_when_all_is_read_again(
    asker: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PresenceBucket, "leave", nothing)
    async with Member.joined(nats.config, tmp_path / "killed", registry) as killed:
        killed.nodes.connect(NODE_ID)
        await until(lambda: NODE_ID in asker.seen.elsewhere)
    asker.part.presence.relay_gone(killed.part.peers.relay)  # as when its lease has ended
    assert asker.seen.elsewhere == set()
    nats.stop()
    await until(lambda: not asker.part.connection.is_connected)
    nats.start()
    async with Member.joined(nats.config, tmp_path / "later", registry) as later:
        later.nodes.connect(OTHER_NODE_ID)
        # The entry and the last lease of the relay that was killed are there still, before this one.
        await until(lambda: OTHER_NODE_ID in asker.seen.elsewhere)
        assert list(asker.part.presence.others()) == [later.part.peers.relay]
    assert [change for change in asker.seen.changes if change[0] == NODE_ID] == [
        (NODE_ID, True),
        (NODE_ID, False),
    ]


@pytest.mark.integration
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
    known = encoded({"relay": "A" * 26, "session_id": "A" * 26, "connected": True}).encode()
    for count, key in enumerate((NODE_ID, "foo.x", "node.x", f"node.{NODE_ID}.x", "relay.x"), 5):
        await bucket.put(key, known if "relay" not in key else b'{"url":"https://relay.example"}')
        await asker.fake.lines.until("presence not read", count)
    assert asker.seen.changes == []
    assert list(asker.part.presence.others()) == []
    assert asker.counted_entries("not_understood", "presence") == 9
    await client.close()


@pytest.mark.integration
async def test_the_servers_keep_no_more_than_is_read(asker: Member, nats: NatsServer) -> None:
    await current(asker)
    client = Client()
    await client.connect(
        nats.url, nkeys_seed_str=nats.credentials.read_text(), inbox_prefix="edge.main.inbox"
    )
    info = await client.jetstream().stream_info(asker.part.bucket.stream)
    assert info.config.max_bytes == MAX_BUCKET_BYTES
    await client.close()


class Stage:
    """A relay at a server, which it leaves with the given try. ``is_read`` tells when presence is read."""

    def __init__(self, leaves_at: int, is_read: Callable[[float], bool] = lambda _: False) -> None:
        self.seconds = Seconds()
        self.began_s = self.seconds.now
        self.tried_s: list[float] = []
        self._leaves_at = leaves_at
        self._is_read = is_read
        effects = Effects(lambda *_: None, lambda *_: True, lambda _: None, lambda *_: None)
        self.presence = Presence("OWN", effects, self.seconds)
        self.quorum = Quorum(self.presence, self._move, stream="a stream", sleep=self._sleep)

    async def run(self) -> None:
        async with asyncio.timeout(10):
            await self.quorum.serve(Client())

    async def _sleep(self, seconds: float) -> None:
        self.seconds.now += seconds
        if self._is_read(self.seconds.now - self.began_s):
            self.presence.relay_seen("OWN")

    async def _move(self, _check: Work, _reason: str) -> bool:
        self.tried_s.append(self.seconds.now - self.began_s)
        return len(self.tried_s) == self._leaves_at


async def test_others_are_tried_less_and_less_often_until_one_is_better() -> None:
    stage = Stage(leaves_at=6)
    await stage.run()
    steps = [later - before for before, later in zip([0.0, *stage.tried_s], stage.tried_s, strict=False)]
    assert steps == [5, 10, 20, 40, 60, 60]
    assert (steps[0], steps[-1]) == (FIRST_PATIENCE_S, LONGEST_PATIENCE_S)


async def test_a_server_at_which_presence_is_read_is_not_left() -> None:
    stage = Stage(leaves_at=1, is_read=lambda now_s: now_s <= 1000)
    await stage.run()
    assert stage.tried_s == [1000 + LEASE_S - CHECK_INTERVAL_S + FIRST_PATIENCE_S]


async def test_a_server_that_is_of_use_again_has_the_first_patience_again() -> None:
    stage = Stage(leaves_at=3, is_read=lambda now_s: now_s == 20)
    await stage.run()
    assert stage.tried_s == [5, 15, 20 + LEASE_S - CHECK_INTERVAL_S + FIRST_PATIENCE_S]
