import asyncio
import json
import os
from collections.abc import AsyncIterator, Container, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext
from nats.js.api import ConsumerInfo, RePublish, StreamSource, SubjectTransform

from relay.cluster.credentials import new_nkey
from relay.cluster.ledger_stream import ConnectedStream, LedgerStream
from relay.pki.authority import CertificateAuthority
from relay.state.certificates import CaRecords
from relay.state.kinds import KINDS
from relay.state.merging import AT_ONCE, SINCE_SEALED, SharedLedger
from relay.state.people import PeopleLedger, PersonRole
from relay.state.redemptions import Redemptions
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import TENANT, Machine, Member, current, echo
from tests.fakes.cluster_server import NatsServer
from tests.fakes.hub import counted
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import RelayCa
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, key_named

pytestmark = pytest.mark.integration

STREAM, REVOCATION = "edge_main_ledger", "revocation"
SEED, PUBLIC = new_nkey(os.urandom)


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    return Machine.made(tmp_path / "one", issues=True)


@pytest.fixture
def other(tmp_path: Path) -> Machine:
    return Machine.made(tmp_path / "other", issues=False)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A server with an operator, who may do anything."""
    with NatsServer.running(tmp_path, users=[{"nkey": PUBLIC}]) as server:
        yield server


@asynccontextmanager
async def operator_of(nats: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = Client()
    await client.connect(nats.url, nkeys_seed_str=SEED)
    yield client.jetstream()
    await client.close()


async def test_what_is_revoked_at_one_relay_is_revoked_at_all(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    before, kid = one.issued(NODE_ID), one.issued(OTHER_NODE_ID)
    one.ca.revoke(NODE_ID)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await until(lambda: other.revoked == {before})
        await current(first, second)
        one.revoke(OTHER_NODE_ID, first)
        async with asyncio.timeout(BOUND_S):
            while other.revoked != {before, kid}:
                await second.part.ledgers.written(within_s=2 * BOUND_S)
    serials = one.ca.records().revoked_serials()
    assert all(serials)
    assert other.ca.records().revoked_serials() == serials


async def test_a_token_that_is_revoked_at_one_relay_is_revoked_at_all(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    # More than are shared at a time.
    before = {f"before: the start {number}" for number in range(AT_ONCE + 1)}
    for jti in before:
        one.tokens.revoke(jti, now_ms=NOW_MS)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await until(lambda: other.tokens.jtis() == before)
        await current(first, second)
        other.tokens.revoke("meanwhile", now_ms=NOW_MS)
        second.part.ledgers.changed("token_revocation")
        await until(lambda: one.tokens.jtis() == before | {"meanwhile"})


async def test_what_an_older_relay_does_not_know_is_kept_back_while_it_runs(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    one.kinds = [replace(kind, since="999.0") for kind in KINDS]
    async with one.joined(nats.config, registry) as first:
        async with other.joined(nats.config, registry) as second:
            name = second.part.peers.relay
            await until(lambda: name in first.part.presence.others())
            one.tokens.revoke("meanwhile", now_ms=NOW_MS)
            first.part.ledgers.changed("token_revocation")
            await until(lambda: f"kept here until relay {name}" in first.part.ledgers.problem)
            # What the others send is taken all the same, and a relay says its version.
            other.tokens.revoke("elsewhere", now_ms=NOW_MS)
            second.part.ledgers.changed("token_revocation")
            await until(lambda: one.tokens.jtis() == {"meanwhile", "elsewhere"})
            assert other.tokens.jtis() == {"elsewhere"}
            others = first.part.status()["others"]
            assert [(each["relay"], each["version"]) for each in others] == [(name, version("edge-kubelet"))]
        await until(lambda: first.counted_entries("appended", "token_revocation") == 1)
    async with other.joined(nats.config, registry):
        await until(lambda: other.tokens.jtis() == {"meanwhile", "elsewhere"})


async def test_a_node_that_the_relay_with_the_key_has_enrolled_is_revoked_by_its_id_at_another(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry), other.joined(nats.config, registry) as second:
        await until(lambda: other.ca.records().was_issued(NODE_ID))
        other.revoke(NODE_ID, second)
        await until(lambda: one.revoked == {kid})


async def test_of_two_relays_that_give_one_label_to_two_nodes_at_once_one_does(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    one.names.label(NODE_ID, TENANT, "an older one")
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await until(lambda: other.labels == {NODE_ID: "an older one"})
        one.names.label(NODE_ID, TENANT, "pump")
        other.names.label(OTHER_NODE_ID, TENANT, "pump")
        first.part.ledgers.changed("name")
        second.part.ledgers.changed("name")
        await until(lambda: one.labels == other.labels and len(one.labels) == 1)
        assert set(one.labels.values()) == {"pump"}


async def test_an_entry_that_others_would_not_understand_is_not_shared(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    one.tokens.revoke("two\nlines", now_ms=NOW_MS)
    one.tokens.revoke("jti-1", now_ms=NOW_MS)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await until(lambda: other.tokens.jtis() == {"jti-1"})
        await current(first, second)
        assert len(first.fake.lines.entries("entry not shared")) == 1
        assert second.part.ledgers.understands


async def test_a_relay_that_was_away_learns_it_when_it_is_back_and_keeps_it_without_the_servers(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with other.joined(nats.config, registry):
        pass
    async with one.joined(nats.config, registry) as first:
        one.revoke(NODE_ID, first)
        await until(lambda: first.counted_entries("appended", REVOCATION) == 1)
    async with other.joined(nats.config, registry):
        await until(lambda: other.revoked == {kid})
    nats.stop()
    restarted = CertificateAuthority(other.directory / "ca", FakeClock(NOW_MS), os.urandom)
    assert restarted.revoked_kids() == {kid}


async def test_a_stream_that_was_lost_is_filled_again_once_an_administrator_has_made_it(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry) as first:
        one.revoke(NODE_ID, first)
        await until(lambda: first.counted_entries("appended", REVOCATION) == 1)
        nats.stop()
        nats.lose_all()
        nats.start()
        async with other.joined(nats.config, registry):
            await until(lambda: other.revoked == {kid})


async def test_without_the_servers_a_revocation_waits_for_them(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await current(first, second)
        nats.stop()
        await until(lambda: not first.part.connection.is_connected)
        one.revoke(NODE_ID, first)
        assert first.part.ledgers.understands
        nats.start()
        await until(lambda: other.revoked == {kid})


@pytest.mark.long  # all is read again after ten seconds
@pytest.mark.parametrize(
    ("subject", "data"),
    [
        (f"revocation.{'ab' * 32}", b"{"),
        (f"revocation.{'ab' * 32}", b'{"kid":"' + b"ab" * 32 + b'","revoked_ms":1,"more":1}'),
        (f"revocation.{'ab' * 32}", b'{"kid":"' + b"cd" * 32 + b'","revoked_ms":1}'),
        ("of_a_later_version.x", b"{}"),
    ],
    ids=["no JSON", "an unknown member", "another key", "an unknown kind"],
)
async def test_an_entry_that_is_not_understood_is_told_until_it_is_gone(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, subject: str, data: bytes
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry) as member, operator_of(nats) as operator:
        await current(member)
        placed = await operator.publish(f"edge.main.ledger.{subject}", data)
        await until(lambda: not member.part.ledgers.understands)
        await member.fake.lines.until("shared ledgers not current", 1)
        assert f"entry {placed.seq} " in member.part.health().state
        assert not member.part.health().ready
        # What is understood is kept and shared all the same.
        one.revoke(NODE_ID, member)
        await until(lambda: member.counted_entries("appended", REVOCATION) == 1)
        assert not member.part.ledgers.understands
        assert one.revoked == {kid}
        await operator.delete_msg(STREAM, placed.seq)
        await until(lambda: member.part.ledgers.understands)
        await member.fake.lines.until("shared ledgers current")
        await current(member)


async def test_a_fault_of_our_own_in_reading_is_logged_and_loses_no_revocation(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    kid = one.issued(NODE_ID)
    one.ca.revoke(NODE_ID)

    def planted(_self: object, _entry: object) -> str:
        raise LookupError("planted")

    async with one.joined(nats.config, registry) as member, operator_of(nats) as operator:
        await current(member)
        with monkeypatch.context() as patch:
            patch.setattr(LedgerStream, "read", planted)
            await operator.publish("edge.main.ledger.token_revocation.x", b'{"jti":"x","revoked_ms":1}')
            await until(lambda: not member.part.ledgers.understands)
            fault = await member.fake.lines.until("entry not read")
        assert "LookupError: planted" in fault["exception"]
    assert one.revoked == {kid}


async def test_no_more_entries_are_read_than_the_bound(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.state.sharer.MAX_KEYS", 1)
    async with one.joined(nats.config, registry) as member:
        one.tokens.revoke("first", now_ms=NOW_MS)
        one.tokens.revoke("second", now_ms=NOW_MS)
        member.part.ledgers.changed("token_revocation")
        await until(lambda: not member.part.ledgers.understands)
        assert (
            "is one of more than 1" in (await member.fake.lines.until("shared ledgers not current"))["reason"]
        )


async def test_a_fault_of_our_own_in_one_kind_ends_no_sharing_and_is_logged_with_its_traceback(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def planted(_self: object, _kid: object) -> int:
        raise LookupError("planted")

    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry):
        await current(first)
        monkeypatch.setattr(CaRecords, "serial_of", planted)
        kid = one.issued(NODE_ID)
        one.revoke(NODE_ID, first)
        fault = await first.fake.lines.until("shared ledger failed")
        assert "LookupError: planted" in fault["exception"]
        one.tokens.revoke("meanwhile", now_ms=NOW_MS)
        first.part.ledgers.changed("token_revocation")
        await until(lambda: other.tokens.jtis() == {"meanwhile"})
        monkeypatch.undo()
        await until(lambda: other.revoked == {kid})


async def test_a_fault_of_our_own_in_taking_what_has_arrived_loses_no_revocation(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = SharedLedger.settle

    def planted(ledger: SharedLedger, arrived: Mapping[str, Any], known: Container[str]) -> Mapping[str, Any]:
        if arrived:
            raise LookupError("planted")
        return settle(ledger, arrived, known)

    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await current(first, second)
        kid = one.issued(NODE_ID)
        monkeypatch.setattr(SharedLedger, "settle", planted)
        one.revoke(NODE_ID, first)
        await second.fake.lines.until("shared ledger failed")
        monkeypatch.undo()
        await until(lambda: other.revoked == {kid})


async def test_a_ledger_that_cannot_be_written_keeps_no_other_waiting(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await current(first, second)
        file = other.ca.ledger.path
        whole = file.read_bytes()
        file.write_bytes(b"damaged\n" + whole)
        one.revoke(NODE_ID, first)
        one.tokens.revoke("meanwhile", now_ms=NOW_MS)
        first.part.ledgers.changed("token_revocation")
        await until(lambda: other.tokens.jtis() == {"meanwhile"})
        await until(lambda: second.counted_entries("failed", REVOCATION) >= 1)
        assert not second.part.health().ready
        assert second.part.ledgers.understands
        (line,) = second.fake.lines.entries("shared ledgers not current")[:1]
        assert line["ledger"] in {REVOCATION, "leaf"}
        file.write_bytes(whole)
        await until(lambda: other.revoked == {kid})
        await current(first, second)
        assert second.fake.lines.entries("shared ledgers current")


async def test_a_ledger_whose_lock_another_process_holds_is_told(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.state.sharer._SETTLE_S", 0.1)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await current(first, second)
        with other.tokens.ledger.locked():
            one.tokens.revoke("jti-1", now_ms=NOW_MS)
            first.part.ledgers.changed("token_revocation")
            await until(lambda: "another process may hold its lock" in second.part.ledgers.problem)
            assert not second.part.health().ready
        await until(lambda: other.tokens.jtis() == {"jti-1"})
        await current(second)


async def test_a_stream_that_is_full_is_told_and_what_is_in_it_is_known_all_the_same(
    one: Machine,
    other: Machine,
    nats: NatsServer,
    registry: SchemaRegistry,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("jetstream", "ledger_stream"):
        monkeypatch.setattr(f"relay.cluster.{module}.MAX_LEDGER_BYTES", 4096)
    async with operator_of(nats) as operator:
        await operator.delete_stream(STREAM)
    nats.make_streams()
    check_often(monkeypatch)
    for number in range(32):
        one.tokens.revoke(str(number), now_ms=NOW_MS)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry):
        await until(lambda: first.counted_entries("failed", "token_revocation") >= 1)
        await until(lambda: len(other.tokens.jtis()) == first.counted_entries("appended", "token_revocation"))
        assert other.tokens.jtis() < one.tokens.jtis()
        metrics = first.fake.environment.metrics
        await until(lambda: counted(metrics, "cluster_ledger_filled_ratio") > 0.8)
        assert "maximum bytes exceeded" in first.part.health().state


async def test_what_is_removed_from_the_stream_is_appended_again_for_relays_that_are_new(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_often(monkeypatch)
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry) as first, operator_of(nats) as operator:
        one.revoke(NODE_ID, first)
        await until(lambda: first.counted_entries("appended", REVOCATION) == 1)
        await current(first)
        await operator.purge_stream(STREAM)
        await until(lambda: first.counted_entries("appended", REVOCATION) == 2)
        async with other.joined(nats.config, registry):
            await until(lambda: other.revoked == {kid})


async def test_a_reader_that_another_relay_has_replaced_is_noticed(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the same name it would have what is in the stream, and nothing would be pending here."""
    monkeypatch.setattr("relay.state.sharer._CHECK_INTERVAL_S", 0.2)
    async with other.joined(nats.config, registry) as member, nats.connected() as hostile:
        await current(member)
        context, client = hostile.jetstream(), hostile
        (name,) = [each.name for each in await listed(nats)]
        before = (await context.consumer_info(STREAM, name)).config
        await until(lambda: member.part.ledgers.is_current)
        await context.delete_consumer(STREAM, name)
        own = await client.subscribe("edge.main.inbox.hostile")
        config = {**before.as_dict(), "deliver_subject": own.subject, "name": name}
        asked = {"stream_name": STREAM, "config": config, "action": "create"}
        subject = f"$JS.API.CONSUMER.CREATE.{STREAM}.{name}.edge.main.ledger.>"
        answer = await client.request(subject, json.dumps(asked).encode(), BOUND_S)
        assert "error" not in json.loads(answer.data)
        refused = await member.fake.lines.until("shared ledgers not current")
        assert "reader" in refused["reason"]
        await current(member)
        kid = one.issued(NODE_ID)
        async with one.joined(nats.config, registry) as first:
            one.revoke(NODE_ID, first)
            await until(lambda: other.revoked == {kid})


async def listed(nats: NatsServer) -> list[ConsumerInfo]:
    """Return the readers of the stream."""
    async with nats.administered() as administrator:
        return list(await administrator.jetstream().consumers_info(STREAM))


async def test_servers_that_do_not_answer_for_a_moment_have_nothing_read_again(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_often(monkeypatch)
    follow, followed = ConnectedStream.followed, []

    def noted(self: ConnectedStream, arrive: Any) -> Any:
        followed.append(arrive)
        return follow(self, arrive)

    async def unanswered(_self: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(ConnectedStream, "followed", noted)
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry) as member:
        await current(member)
        with monkeypatch.context() as patch:
            patch.setattr(JetStreamContext.PushSubscription, "consumer_info", unanswered)
            await until(lambda: not member.part.ledgers.is_current)
            assert member.part.ledgers.problem == "the servers do not answer"
            one.revoke(NODE_ID, member)
            await until(lambda: member.counted_entries("appended", REVOCATION) == 1)
        await current(member)
        assert member.part.ledgers.problem == ""
    assert one.revoked == {kid}
    assert len(followed) == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_msgs": 1, "discard": "old"}, "max_msgs 1 in place of -1"),
        ({"max_age": 1000.0}, "max_age 1000.0 in place of 0"),
        ({"max_bytes": 4096}, "max_bytes 4096"),
        ({"subjects": ["edge.main.>"]}, "subjects ['edge.main.>']"),
        ({"republish": RePublish(src=">", dest="others.>")}, "republish RePublish("),
        ({"sources": [StreamSource(name="another")]}, "sources [StreamSource("),
        ({"subject_transform": SubjectTransform("edge.>", "edge.>")}, "subject_transform SubjectTransform("),
        ({"allow_rollup_hdrs": True}, "allow_rollup_hdrs True in place of False"),
    ],
    ids=["few", "old", "small", "commands too", "copied", "filled", "renamed", "emptied"],
)
async def test_a_stream_that_could_forget_a_revocation_or_keep_more_is_refused_and_named(  # noqa: PLR0913, PLR0917
    one: Machine,
    nats: NatsServer,
    registry: SchemaRegistry,
    monkeypatch: pytest.MonkeyPatch,
    change: Mapping[str, Any],
    named: str,
) -> None:
    check_often(monkeypatch)
    async with one.joined(nats.config, registry) as member, operator_of(nats) as operator:
        await current(member)
        config = (await operator.stream_info(STREAM)).config
        await operator.update_stream(config, **change)
        await until(lambda: named in member.part.ledgers.problem)
        assert not member.part.health().ready
        await operator.delete_stream(STREAM)
        await until(lambda: "`relay cluster streams`" in member.part.health().state)
        nats.make_streams()
        await current(member)
        assert (await operator.stream_info(STREAM)).config.max_bytes == config.max_bytes


async def test_no_secret_and_no_free_text_is_in_what_the_servers_keep(
    one: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid, reason, said = one.issued(NODE_ID), "stolen from the shed", "what is in a call and its result"
    used, revoked = (one.join_tokens.create(TENANT, 3600, 2, one.ca.root_pem()) for _ in range(2))
    one.join_tokens.spend(used.id, OTHER_NODE_ID)
    one.join_tokens.revoke(revoked.id)
    one.tokens.revoke("a jti", now_ms=NOW_MS)
    one.keys.add(bytes(key_named("the key of tokens").verify_key), NOW_MS)
    one.names.label(NODE_ID, TENANT, "pump")
    one.ca.revoke(NODE_ID, reason)
    one.seal.seal(NOW_MS)
    joined = Member.joined(nats.config, one.directory / "asker", registry)
    async with one.joined(nats.config, registry) as member, joined as asker:
        await current(member)
        await member.hold(NODE_ID, asker)
        answer = await asker.part.router.run(echo(NODE_ID, arguments={"message": said}))
        assert said in str(answer)
        for ledger in one.ledgers:
            if ledger.row.since != SINCE_SEALED:
                assert member.counted_entries("appended", ledger.kind) >= 1, ledger.kind
    people = PeopleLedger(one.directory / "people.jsonl", one.clock, os.urandom)
    person, link = people.invite("ada", PersonRole.OPERATOR, TENANT)
    people.add_passkey(link, b"a public key")
    people.revoke("ada")
    registration = base64url(people.registration_key())
    Redemptions(one.directory / "redemptions.jsonl", one.clock).claim("ab" * 32, person.id, NOW_MS + DAY_MS)
    async with one.joined(nats.config, registry, RelayCa(), sealed=True) as member:
        await current(member)
        for ledger in one.ledgers:
            assert member.counted_entries("appended", ledger.kind) >= 1, ledger.kind
    nats.stop()
    kept = b"".join(file.read_bytes() for file in (nats.directory / "store").rglob("*") if file.is_file())
    for public in (kid, "a jti", "pump", OTHER_NODE_ID, person.id, "ada", "ab" * 32):
        assert public.encode() in kept
    keys = [key for token in (used, revoked) for key in (token.key, token.key.hex(), base64url(token.key))]
    pems = [file.read_text("ascii").split("\n")[1] for file in one.directory.rglob("*.key")]
    signing = bytes(key_named("the key of tokens"))
    secrets = [*keys, *pems, signing, signing.hex(), used.id, revoked.id, reason, said]
    secrets += [link, registration, b"a public key", base64url(b"a public key")]
    assert pems
    for secret in secrets:
        assert (secret if isinstance(secret, bytes) else secret.encode()) not in kept


def check_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stream compared with what was read all the time, and not each minute."""
    monkeypatch.setattr("relay.state.sharer._CHECK_INTERVAL_S", 0.2)
    monkeypatch.setattr("relay.state.sharer._CHECKS_FOR_ONE_COUNT", 1)
