"""The keys that verify agents' tokens reach all relays by a real nats-server, and the CA endorses each."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from schemas.registry import SchemaRegistry
from tests.fakes.cluster_machine import Machine
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import until
from tests.fakes.signer import DAY_MS, NOW_MS, key_named

pytestmark = pytest.mark.integration

FIRST, SECOND = (bytes(key_named(f"token key {number}").verify_key) for number in (1, 2))


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer.running(tmp_path) as server:
        yield server


@pytest.fixture
def one(tmp_path: Path) -> Machine:
    machine = Machine.made(tmp_path / "one", issues=True)
    machine.keys.add(FIRST, NOW_MS)
    return machine


def ends(machine: Machine) -> dict[bytes, int | None]:
    return {key.public_key: key.until_ms for key in machine.keys.accepted().values()}


async def test_a_key_that_replaces_another_is_accepted_by_all_and_the_old_one_until_its_end(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    others = [Machine.like(one, tmp_path / name) for name in ("two", "three")]
    assert not any(other.ca.can_issue() for other in others)
    async with (
        one.joined(nats.config, registry) as first,
        others[0].joined(nats.config, registry),
        others[1].joined(nats.config, registry),
    ):
        await until(lambda: all(ends(other) == {FIRST: None} for other in others))
        one.keys.add(SECOND, NOW_MS + DAY_MS)
        first.part.ledgers.changed("token_key")
        await until(lambda: all(ends(other) == {FIRST: NOW_MS + DAY_MS, SECOND: None} for other in others))
    assert [other.refused for other in others] == [0, 0]


async def test_a_relay_restored_from_an_older_backup_learns_that_its_key_was_replaced(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    older = Machine.restored(one, tmp_path / "older")
    one.keys.add(SECOND, NOW_MS + DAY_MS)
    async with one.joined(nats.config, registry) as first:
        await until(lambda: first.counted_entries("appended", "token_key") == 2)
    async with older.joined(nats.config, registry):
        await until(lambda: older.keys.is_replaced(FIRST))
    assert ends(older) == ends(one)


async def test_the_keys_of_another_ca_are_refused_and_all_else_is_understood(
    one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    foreign = Machine.made(tmp_path / "foreign", issues=True)
    foreign.keys.add(SECOND, NOW_MS)
    async with foreign.joined(nats.config, registry) as stranger:
        await until(lambda: stranger.counted_entries("appended", "token_key") == 1)
    async with one.joined(nats.config, registry) as first:
        await until(lambda: first.part.ledgers.is_current and one.refused == 1)
        assert first.part.ledgers.understands
    assert ends(one) == {FIRST: None}
    assert len(one.lines.entries("token key refused: no root endorses it")) == 1
