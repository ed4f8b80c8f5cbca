"""A join token's uses count once in the fleet, and its revocation at all relays, by a real nats-server."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from relay.pki.enrolments import CountedUses, EnrolmentInfo, EnrolmentRefusedError, Enrolments
from schemas.certificates import make_csr
from schemas.enrolment import NODE, EnrolRequest, JoinToken, proven
from schemas.keys import base64url
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import TENANT, Machine, Member
from tests.fakes.cluster_server import NatsServer
from tests.fakes.enrolling import enrolments_of
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.hub import Hub
from tests.fakes.polling import until
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, key_named

pytestmark = pytest.mark.integration

INFO = EnrolmentInfo(PUBLIC_URL, None, own_root=True)
SOON_S = 0.2
"""How long an enrolment waits that is to be refused: nothing else is done meanwhile."""


def enrolments(hub: Hub, machine: Machine, member: Member, **options: Any) -> Enrolments:
    """Return what decides who is enrolled at ``machine``, which has joined its fleet as ``member``."""
    uses = CountedUses(machine.join_tokens, **options)
    uses.connect(member.part.ledgers)
    return enrolments_of(hub, machine.ca, machine.join_tokens, machine.names.name_new, INFO, uses)


def made(machine: Machine, uses: int = 1) -> JoinToken:
    return machine.join_tokens.create(TENANT, 3600, uses, machine.ca.root_pem())


def request_of(token: JoinToken, node_id: str = NODE_ID) -> Any:
    csr = make_csr(key_named(node_id), node_id)
    return proven({"join_id": token.id, "csr": csr, "nonce": base64url(os.urandom(32))}, token.key, NODE)


async def reason_of(enrolments: Enrolments, request: EnrolRequest) -> str:
    with pytest.raises(EnrolmentRefusedError) as refused:
        await enrolments.enrol(request)
    return refused.value.reason


async def test_a_relay_restored_from_an_older_backup_does_not_enrol_for_a_use_again(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    token = made(one)
    older = Machine.restored(one, tmp_path / "older")
    async with one.joined(nats.config, registry) as first:
        await enrolments(hub, one, first).enrol(request_of(token))
        # The answer was lost, and the node asks again.
        await enrolments(hub, one, first).enrol(request_of(token))
    async with older.joined(nats.config, registry) as restored:
        # At once: it need not have read what the others have counted.
        assert (
            await reason_of(enrolments(hub, older, restored), request_of(token, OTHER_NODE_ID)) == "used_up"
        )
        assert await reason_of(enrolments(hub, older, restored), request_of(token)) == "used_up"
    assert older.ca.records().issued == {}


async def test_of_two_relays_restored_from_one_backup_one_enrols_for_each_use(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    token = made(one, uses=3)
    other = Machine.restored(one, tmp_path / "other")
    nodes = [f"{number}{NODE_ID[1:]}" for number in range(6)]
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        by = [enrolments(hub, one, first), enrolments(hub, other, second)]
        asked = [by[number % 2].enrol(request_of(token, node_id)) for number, node_id in enumerate(nodes)]
        ended = await asyncio.gather(*asked, return_exceptions=True)
    refused = [each for each in ended if isinstance(each, BaseException)]
    assert all(isinstance(each, EnrolmentRefusedError) and each.reason == "used_up" for each in refused)
    assert len(refused) == 3
    issued = {leaf.name for machine in (one, other) for leaf in machine.ca.records().issued.values()}
    assert len(issued) == 3


async def test_without_the_servers_no_node_enrols_and_then_the_same_one_does(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    token = made(one)
    async with one.joined(nats.config, registry) as first:
        await until(lambda: first.part.ledgers.is_current)
        nats.stop()
        with pytest.raises(EnrolmentRefusedError) as refused:
            await enrolments(hub, one, first, timeout_s=SOON_S).enrol(request_of(token))
        assert (refused.value.reason, refused.value.status) == ("not_counted", 503)
        assert refused.value.retry_after_ms == 15_000
        assert one.ca.records().issued == {}
        nats.start()
        await until(lambda: first.part.ledgers.is_current)
        assert await reason_of(enrolments(hub, one, first), request_of(token, OTHER_NODE_ID)) == "used_up"
        await enrolments(hub, one, first).enrol(request_of(token))


async def test_what_was_used_before_the_relay_joined_a_fleet_is_counted_there(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    token = made(one, uses=2)
    older = Machine.restored(one, tmp_path / "older")
    one.join_tokens.spend(token.id, NODE_ID)
    async with one.joined(nats.config, registry) as first:
        await until(lambda: first.counted_entries("appended", "join_token_use") == 1)
    async with older.joined(nats.config, registry) as restored:
        await enrolments(hub, older, restored).enrol(request_of(token, OTHER_NODE_ID))
        third = f"0{NODE_ID[1:]}"
        assert await reason_of(enrolments(hub, older, restored), request_of(token, third)) == "used_up"


async def test_a_token_that_is_revoked_on_one_machine_is_refused_by_the_relay_that_enrols(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    other = Machine.like(one, tmp_path / "other")
    token, kept = made(one), made(one)
    async with one.joined(nats.config, registry) as first, other.joined(nats.config, registry) as second:
        await until(lambda: first.part.ledgers.is_current and second.part.ledgers.is_current)
        other.join_tokens.revoke(token.id, made_here=False)
        second.part.ledgers.changed("join_token_revocation")
        await until(lambda: one.join_tokens.find(token.id) is None)
        assert await reason_of(enrolments(hub, one, first), request_of(token)) == "unknown_token"
        await enrolments(hub, one, first).enrol(request_of(kept))
    (leaf,) = one.ca.records().issued.values()
    assert leaf.name == NODE_ID


async def test_a_relay_restored_from_an_older_backup_learns_that_a_token_was_revoked(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    token = made(one)
    older = Machine.restored(one, tmp_path / "older")
    async with one.joined(nats.config, registry) as first:
        one.join_tokens.revoke(token.id)
        first.part.ledgers.changed("join_token_revocation")
        await until(lambda: first.counted_entries("appended", "join_token_revocation") == 1)
    async with older.joined(nats.config, registry) as restored:
        await until(lambda: restored.part.ledgers.is_current)
        assert await reason_of(enrolments(hub, older, restored), request_of(token)) == "unknown_token"
    assert older.ca.records().issued == {}


async def test_a_token_that_is_revoked_while_its_use_is_counted_enrols_no_node(
    hub: Hub, one: Machine, nats: NatsServer, registry: SchemaRegistry
) -> None:
    token = made(one)
    async with one.joined(nats.config, registry) as first:
        await until(lambda: first.part.ledgers.is_current)
        nats.stop()
        enrolling = asyncio.create_task(reason_of(enrolments(hub, one, first), request_of(token)))
        await until(lambda: one.join_tokens.all()[0].node_ids == (NODE_ID,))
        one.join_tokens.revoke(token.id)
        assert await enrolling == "used_up"


# --- the keys that verify agents' tokens reach all relays by a real nats-server, and the CA endorses each


FIRST, SECOND = (bytes(key_named(f"token key {number}").verify_key) for number in (1, 2))


@pytest.fixture
def keyed(one: Machine) -> Machine:
    """The machine with the CA, and with a key of tokens."""
    one.keys.add(FIRST, NOW_MS)
    return one


def ends(machine: Machine) -> dict[bytes, int | None]:
    return {key.public_key: key.until_ms for key in machine.keys.accepted().values()}


async def test_a_key_that_replaces_another_is_accepted_by_all_and_the_old_one_until_its_end(
    keyed: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    others = [Machine.like(keyed, tmp_path / name) for name in ("two", "three")]
    assert not any(other.ca.can_issue() for other in others)
    async with (
        keyed.joined(nats.config, registry) as first,
        others[0].joined(nats.config, registry),
        others[1].joined(nats.config, registry),
    ):
        await until(lambda: all(ends(other) == {FIRST: None} for other in others))
        keyed.keys.add(SECOND, NOW_MS + DAY_MS)
        first.part.ledgers.changed("token_key")
        await until(lambda: all(ends(other) == {FIRST: NOW_MS + DAY_MS, SECOND: None} for other in others))
    assert [other.refused for other in others] == [0, 0]


async def test_a_relay_restored_from_an_older_backup_learns_that_its_key_was_replaced(
    keyed: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    older = Machine.restored(keyed, tmp_path / "older")
    keyed.keys.add(SECOND, NOW_MS + DAY_MS)
    async with keyed.joined(nats.config, registry) as first:
        await until(lambda: first.counted_entries("appended", "token_key") == 2)
    async with older.joined(nats.config, registry):
        await until(lambda: older.keys.is_replaced(FIRST))
    assert ends(older) == ends(keyed)


async def test_the_keys_of_another_ca_are_refused_and_all_else_is_understood(
    keyed: Machine, nats: NatsServer, registry: SchemaRegistry, tmp_path: Path
) -> None:
    foreign = Machine.made(tmp_path / "foreign", issues=True)
    foreign.keys.add(SECOND, NOW_MS)
    async with foreign.joined(nats.config, registry) as stranger:
        await until(lambda: stranger.counted_entries("appended", "token_key") == 1)
    async with keyed.joined(nats.config, registry) as first:
        await until(lambda: first.part.ledgers.is_current and keyed.refused == 1)
        assert first.part.ledgers.understands
    assert ends(keyed) == {FIRST: None}
    assert len(keyed.lines.entries("token key refused: no root endorses it")) == 1
