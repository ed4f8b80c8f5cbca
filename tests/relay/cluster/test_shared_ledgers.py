import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.js import JetStreamContext

from relay.auth.shared_revocations import SharedTokenRevocations
from relay.demo.cluster_server import new_credentials
from relay.pki.authority import CertificateAuthority
from relay.shared_ledger import AT_ONCE
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.cluster import TENANT, Member
from tests.fakes.cluster_machine import Machine
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NODE_ID, NOW_MS, OTHER_NODE_ID

pytestmark = pytest.mark.integration

STREAM, REVOCATION = "edge_main_ledger", "revocation"
SEED, PUBLIC = new_credentials(os.urandom)


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    return Machine.made(tmp_path / "one", issues=True)


@pytest.fixture
def other(tmp_path: Path) -> Machine:
    return Machine.made(tmp_path / "other", issues=False)


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    """A server with an operator, who may do anything."""
    with NatsServer.running(tmp_path, f"{{ nkey: {PUBLIC} }}\n") as server:
        yield server


@asynccontextmanager
async def operator_of(nats: NatsServer) -> AsyncIterator[JetStreamContext]:
    client = Client()
    await client.connect(nats.url, nkeys_seed_str=SEED)
    yield client.jetstream()
    await client.close()


async def current(*members: Member) -> None:
    await until(lambda: all(member.part.ledgers.is_current for member in members))


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
    one.tokens.revoke_all(dict.fromkeys(before, NOW_MS))
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await until(lambda: other.tokens.jtis() == before)
        await current(first, second)
        other.tokens.revoke("meanwhile", NOW_MS)
        second.part.ledgers.changed()
        await until(lambda: one.tokens.jtis() == before | {"meanwhile"})


async def test_a_node_that_the_relay_with_the_key_has_enrolled_is_revoked_by_its_id_at_another(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    kid = one.issued(NODE_ID)
    async with one.joined(nats.config, registry), other.joined(nats.config, registry) as second:
        await until(lambda: other.ca.records().existed(NODE_ID))
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
        first.part.ledgers.changed()
        second.part.ledgers.changed()
        await until(lambda: one.labels == other.labels and len(one.labels) == 1)
        assert set(one.labels.values()) == {"pump"}


async def test_an_entry_that_others_would_not_understand_is_not_shared(
    one: Machine, other: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    one.tokens.revoke("two\nlines", NOW_MS)
    one.tokens.revoke("jti-1", NOW_MS)
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


async def test_a_stream_that_is_lost_is_made_and_filled_again(
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
        assert f"entry {placed.seq} " in member.part.health()["cluster"].state
        assert not member.part.health()["cluster"].ready
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
            patch.setattr(SharedTokenRevocations, "key_of", planted)
            await operator.publish("edge.main.ledger.token_revocation.x", b'{"jti":"x","revoked_ms":1}')
            await until(lambda: not member.part.ledgers.understands)
            fault = await member.fake.lines.until("entry not read")
        assert "LookupError: planted" in fault["exception"]
    assert one.revoked == {kid}


async def test_no_more_entries_are_read_than_the_bound(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.cluster.shared_ledgers.MAX_KEYS", 1)
    async with one.joined(nats.config, registry) as member:
        one.tokens.revoke("first", NOW_MS)
        one.tokens.revoke("second", NOW_MS)
        member.part.ledgers.changed()
        await until(lambda: not member.part.ledgers.understands)
        assert (
            "is one of more than 1" in (await member.fake.lines.until("shared ledgers not current"))["reason"]
        )
