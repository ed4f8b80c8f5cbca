"""Entries of nodes and relays in a real nats-server, and when a relay looks for another server."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.api import ConsumerConfig, RePublish, StreamSource
from nats.js.kv import KeyValue

from relay.cluster.connection import ConnectionWork
from relay.cluster.credentials import new_nkey
from relay.cluster.jetstream import MAX_BUCKET_BYTES
from relay.cluster.presence import LEASE_S, Effects, Presence
from relay.cluster.presence_bucket import (
    CHECK_INTERVAL_S,
    FIRST_PATIENCE_S,
    LONGEST_PATIENCE_S,
    PresenceBucket,
    Quorum,
)
from relay.cluster.server_config import relay_permissions
from relay.observability.ascii_json import encoded
from schemas.errors import Failure
from schemas.files import PRIVATE, write_atomic
from schemas.payloads import OpenFinding
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member, echo
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import RelayCa
from tests.fakes.routers import echoed
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID

STREAM = "KV_edge_main_presence"


async def nothing(_bucket: PresenceBucket, _client: Client) -> None:
    """Stand for the end of a relay that is killed."""


@asynccontextmanager
async def relay_user(nats: NatsServer) -> AsyncIterator[KeyValue]:
    """Hold the bucket as one who has the credentials of a relay."""
    async with nats.connected() as client:
        yield await client.jetstream().key_value("edge_main_presence")


async def until_dropped(nats: NatsServer, key: str) -> None:
    """Wait until the bucket has nothing under ``key``."""
    subject = f"$KV.edge_main_presence.{key}"
    async with nats.connected() as client, asyncio.timeout(BOUND_S):
        while True:
            info = await client.jetstream().stream_info("KV_edge_main_presence", subjects_filter=subject)
            if not info.state.subjects:
                return
            await asyncio.sleep(0.05)  # the server does not announce what it drops


async def until_renewed(nats: NatsServer, key: str) -> None:
    """Wait until ``key`` of the bucket is written once more."""
    revisions = set[int | None]()
    async with relay_user(nats) as bucket, asyncio.timeout(BOUND_S):
        async for entry in await bucket.watch(key):
            revisions |= {entry.revision} if entry is not None else set()
            if len(revisions) == 2:
                return


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
    await until(lambda: owner.part.health().state.endswith(": 1 relay, 0 nodes at others"))
    async with Member.joined(nats.config, tmp_path / "later", registry) as later:
        await until(lambda: later.seen.elsewhere == {NODE_ID, OTHER_NODE_ID})
        await until(lambda: later.part.health().state.endswith(": 2 relays, 2 nodes at others"))
        ((relay, nodes),) = [(each["relay"], each["nodes"]) for each in later.part.status()["others"]]
        assert nodes == 2
        assert [relay] == list(later.part.presence.others())


@pytest.mark.integration
async def test_a_relay_that_cannot_read_says_that_it_runs(
    tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_INTERVAL_S", 0.1)
    seed, key = new_nkey(os.urandom)
    # As while the servers elect the leader that makes readers: there is no answer to that alone.
    allowed = relay_permissions(FLEET)
    create = "$JS.API.CONSUMER.CREATE.KV_edge_main_presence"
    allowed["publish"]["deny"] = [create, f"{create}.>"]
    user = {"nkey": key, "permissions": allowed}
    with NatsServer.running(tmp_path, users=[user]) as nats:
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
    assert (await owner.refused(echo(OTHER_NODE_ID))).failure is Failure.NODE_OFFLINE


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
@pytest.mark.parametrize("gives_up", [False, True], ids=["killed", "ended"])
async def test_the_lease_of_a_relay_that_is_gone_leaves_the_bucket(  # noqa: PLR0913 - what two relays need
    asker: Member,
    nats: NatsServer,
    tmp_path: Path,
    registry: SchemaRegistry,
    monkeypatch: pytest.MonkeyPatch,
    *,
    gives_up: bool,
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket.LEASE_KEPT_S", 1)
    if not gives_up:
        monkeypatch.setattr(PresenceBucket, "leave", nothing)
    async with Member.joined(nats.config, tmp_path / "gone", registry) as gone:
        await until(lambda: gone.part.peers.relay in asker.part.presence.others())
    await until_dropped(nats, f"relay.{gone.part.peers.relay}")


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
    assert not owner.part.health().ready
    assert owner.part.health().lets_calls_flow
    owner.nodes.lose(NODE_ID)
    owner.nodes.connect(OTHER_NODE_ID)
    nats.start()
    await until(lambda: asker.seen.elsewhere == {OTHER_NODE_ID})


@pytest.mark.integration
async def test_a_bucket_that_was_lost_is_written_again_once_an_administrator_has_made_it(
    asker: Member, owner: Member, nats: NatsServer
) -> None:
    owner.nodes.connect(NODE_ID)
    await until(lambda: NODE_ID in asker.seen.elsewhere)
    nats.stop()
    nats.lose_all()
    asker.seen.elsewhere.clear()
    nats.start()
    async with asyncio.timeout(30):
        while True:
            try:
                async with relay_user(nats) as bucket:
                    if f"node.{NODE_ID}" in await bucket.keys():
                        return
            except Exception:  # noqa: BLE001 - there is no bucket, or it is empty
                await asyncio.sleep(0.01)


@pytest.mark.integration
async def test_a_bucket_that_was_purged_is_written_again_and_says_nothing_of_who_had_a_node(
    owner: Member, nats: NatsServer, tmp_path: Path, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket._CHECK_STREAM_S", 0.1)
    async with Member.joined(nats.config, tmp_path / "first", registry) as asker:
        owner.nodes.connect(NODE_ID)
        await until(lambda: NODE_ID in asker.seen.elsewhere)
        async with nats.administered() as administrator:
            await administrator.jetstream().purge_stream("KV_edge_main_presence")
        await owner.fake.lines.until("presence not available")
        # One that reads for the first time finds what was removed.
        async with Member.joined(nats.config, tmp_path / "later", registry) as later:
            await until(lambda: NODE_ID in later.seen.elsewhere)
        # It was at another relay, whose keys this one does not know.
        await asker.fake.lines.until("presence available")
        asker.nodes.connect(OTHER_NODE_ID)
        await until(lambda: OTHER_NODE_ID in asker.seen.moved)
    assert owner.seen.superseded == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"republish": RePublish(src=">", dest="others.>")}, "republish RePublish("),
        ({"subjects": ["$KV.edge_main_presence.>", "edge.main.cmd.>"]}, "subjects ["),
        ({"sources": [StreamSource(name="another")]}, "sources [StreamSource("),
        ({"max_msg_size": -1}, "max_msg_size -1 in place of 2048"),
    ],
    ids=["copied", "commands too", "filled", "large"],
)
async def test_a_bucket_with_other_settings_is_refused_and_named(  # noqa: PLR0913, PLR0917 - what two relays need
    owner: Member,
    nats: NatsServer,
    monkeypatch: pytest.MonkeyPatch,
    registry: SchemaRegistry,
    tmp_path: Path,
    change: Mapping[str, Any],
    named: str,
) -> None:
    monkeypatch.setattr("relay.cluster.presence_bucket._CHECK_STREAM_S", 0.1)
    async with Member.joined(nats.config, tmp_path / "first", registry) as member:
        await current(owner, member)
        async with nats.administered() as administrator:
            context = administrator.jetstream()
            before = (await context.stream_info(STREAM)).config
            await context.update_stream(before, **change)
            refused = await member.fake.lines.until("presence not available")
            assert f"the stream {STREAM} has {named}" in refused["reason"]
            assert "`relay cluster streams`" in refused["reason"]
            await context.delete_stream(STREAM)
        nats.make_streams()
        await member.fake.lines.until("presence available")


@pytest.mark.integration
@pytest.mark.parametrize("stream", ["KV_edge_main_presence", "edge_main_ledger"])
async def test_a_reader_to_whom_a_relay_has_others_delivered_is_refused_and_named(
    owner: Member, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch, stream: str
) -> None:
    """The servers ask no permission of the subject that a reader has its messages delivered to."""
    monkeypatch.setattr("relay.cluster.presence_bucket._CHECK_STREAM_S", 0.1)
    monkeypatch.setattr("relay.state.sharer._CHECK_INTERVAL_S", 0.1)
    monkeypatch.setattr("relay.state.sharer._CHECKS_FOR_ONE_COUNT", 1)
    async with Member.joined(nats.config, owner.fake.environment.config.state.root, registry) as member:
        await until(lambda: member.part.health().ready)
        async with nats.connected() as hostile:
            # As large as the servers take: a list of many would be more than a connection has at once.
            context, metadata = hostile.jetstream(), {"x": "y" * 100_000}
            for number in range(100):
                await context.add_consumer(stream, ConsumerConfig(name=f"{number}", metadata=metadata))
            foreign = ConsumerConfig(name="reader", deliver_subject="edge.main.cancel", metadata=metadata)
            await context.add_consumer(stream, foreign)
            line = "presence not available" if stream == STREAM else "shared ledgers not current"
            refused = await member.fake.lines.until(line)
            assert refused["reason"] == (
                f"a reader of the stream {stream}, reader, has deliver_subject edge.main.cancel: "
                "find out who has made it, and remove it"
            )
        async with nats.administered() as administrator:
            await administrator.jetstream().delete_consumer(stream, "reader")
        await until(lambda: member.part.health().ready)
        assert member.fake.lines.entries("cluster lost") == []


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
async def test_a_node_that_reports_more_than_an_entry_takes_keeps_no_other_off_the_lists(
    nats: NatsServer, tmp_path: Path, registry: SchemaRegistry
) -> None:
    hot = OpenFinding(code="hot", severity="error", count=1, since_ms=None)
    large = OpenFinding(code="process_killed_for_memory", severity="warning", count=9999, since_ms=2**53 - 1)
    ca = RelayCa()
    async with (
        Member.joined(nats.config, tmp_path / "one", registry, ca=ca, sealed=True) as one,
        Member.joined(nats.config, tmp_path / "two", registry, ca=ca, sealed=True) as two,
    ):
        await current(one, two)
        one.nodes.connect(NODE_ID)
        one.part.bucket.found(one.nodes.sessions[NODE_ID], [hot] + 31 * [large])
        async with relay_user(nats) as bucket, asyncio.timeout(BOUND_S):
            async for entry in await bucket.watch(f"findings.{NODE_ID}"):
                if entry is not None and b'"hot"' in (entry.value or b""):
                    break
        one.nodes.connect(OTHER_NODE_ID)
        await until(lambda: two.seen.elsewhere == {NODE_ID, OTHER_NODE_ID})
        assert one.fake.lines.entries("presence not available") == []


@pytest.mark.integration
async def test_what_is_no_entry_is_not_read(asker: Member, nats: NatsServer) -> None:
    await current(asker)
    async with relay_user(nats) as bucket:
        for read, value in enumerate((b"", b"{", b'{"relay": 1}', b'{"relay":"' + b"A" * 2000 + b'"}'), 1):
            await bucket.put(f"node.{NODE_ID}", value)
            # One at a time: the bucket has the last value of a key alone, and so a reader that is slow.
            await until(lambda: asker.counted_entries("not_understood", "presence") == read)  # noqa: B023
        known = encoded({"relay": "A" * 26, "session_id": "A" * 26, "connected": True}).encode()
        for read, key in enumerate((NODE_ID, "foo.x", "node.x", f"node.{NODE_ID}.x", "relay.x"), 5):
            await bucket.put(key, known if "relay" not in key else b'{"url":"https://relay.example"}')
            await until(lambda: asker.counted_entries("not_understood", "presence") == read)  # noqa: B023
    assert asker.seen.changes == []
    assert list(asker.part.presence.others()) == []
    # Who writes without end must not fill the log.
    (line,) = asker.fake.lines.entries("presence not read")
    assert line["first"] == f"node.{NODE_ID}"


@pytest.mark.integration
async def test_the_servers_keep_no_more_than_is_read(asker: Member, nats: NatsServer) -> None:
    await current(asker)
    async with nats.connected() as client:
        info = await client.jetstream().stream_info(asker.part.bucket.stream)
    assert info.config.max_bytes == MAX_BUCKET_BYTES


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
        async with asyncio.timeout(30):
            await self.quorum.serve(Client())

    async def _sleep(self, seconds: float) -> None:
        self.seconds.now += seconds
        if self._is_read(self.seconds.now - self.began_s):
            self.presence.relay_seen("OWN")

    async def _move(self, _check: ConnectionWork, _reason: str) -> bool:
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
