"""Relays that differ in what a fleet has in common are refused, by a real nats-server."""

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from nats.aio.client import Client

from relay.cluster.fleet_identity import (
    MAX_HEARD,
    REPEAT_S,
    FleetIdentity,
    HeardRelays,
    RelayIdentity,
    identity_subject,
)
from relay.routing.port import NoResponderError
from schemas.registry import SchemaRegistry
from tests.fakes.cluster import Member, Trial
from tests.fakes.cluster_server import FLEET, NatsServer
from tests.fakes.polling import BOUND_S, until
from tests.fakes.relay_keys import unsigned
from tests.fakes.seconds import Seconds

URL, OTHER_URL = "https://relay.example", "https://other.example"
ROOT, NEXT_ROOT, OTHER_ROOT = "ab" * 32, "cd" * 32, "ef" * 32
FIRST, SECOND, THIRD = (f"01HZX9K3M4P7Q8R9S0T1V2W3X{letter}" for letter in "ABC")


class Joining(Trial):
    """A relay as far as it says who it is; it tries again without a wait.

    ``unchecked``: its first connection is used without a check, as if others had connected at that moment.
    """

    def __init__(
        self, nats: NatsServer, own: RelayIdentity, registry: SchemaRegistry, *, unchecked: bool = False
    ) -> None:
        super().__init__(nats.config, own.relay)
        self._unchecked = unchecked
        self.own = own
        self.identity = FleetIdentity(
            lambda: self.own,
            fleet=FLEET,
            registry=registry,
            signed=unsigned(),
            monotonic=Seconds(),
            log=self.log,
            sleep=self._repeat,
        )
        self._said = asyncio.Event()
        self.connection.before(self._check)
        self.connection.during(self.identity.serve)

    async def _check(self, client: Client) -> None:
        unchecked, self._unchecked = self._unchecked, False
        if not unchecked:
            await self.identity.check(client)

    async def _repeat(self, seconds: float) -> None:
        self._said.set()
        if seconds == REPEAT_S:
            await asyncio.Event().wait()

    async def joined(self) -> None:
        """Return once it answers those that connect."""
        async with asyncio.timeout(BOUND_S):
            await self._said.wait()
            # It has subscribed by then, and the server reads in order: once it replies, it knows of that.
            with suppress(NoResponderError):
                await self.connection.request(f"edge.{FLEET}.unused", b"", BOUND_S)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("other", "todo"),
    [
        (RelayIdentity(SECOND, OTHER_URL, [ROOT]), "give both the same --public-url"),
        (RelayIdentity(SECOND, URL, [OTHER_ROOT]), "copy its ca/previous.pem and ca/root.pem"),
    ],
    ids=["url", "roots"],
)
async def test_a_relay_that_differs_does_not_join_and_says_what_to_do_once(
    nats: NatsServer, registry: SchemaRegistry, other: RelayIdentity, todo: str
) -> None:
    async with Joining(nats, RelayIdentity(FIRST, URL, [ROOT]), registry) as first:
        await first.joined()
        async with Joining(nats, other, registry) as refused:
            await until(lambda: refused.pauses >= 3)
            assert not refused.connection.is_connected
            assert refused.connection.problem is not None
            assert todo in refused.connection.problem
            (line,) = refused.lines.entries("cluster not connected")
            assert FIRST in line["reason"]
            assert first.connection.is_connected
            (line,) = first.lines.entries("another relay is not of this fleet")
            assert SECOND in line["reason"]


@pytest.mark.integration
async def test_relays_of_which_one_has_another_root_already_are_of_one_fleet(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with Joining(nats, RelayIdentity(FIRST, URL, [NEXT_ROOT, ROOT]), registry) as first:
        await first.joined()
        async with Joining(nats, RelayIdentity(SECOND, URL, [ROOT]), registry) as second:
            await second.joined()
            # The overlap has ended, and the new root was copied to the second relay before that.
            first.own = RelayIdentity(FIRST, URL, [NEXT_ROOT])
            second.own = RelayIdentity(SECOND, URL, [NEXT_ROOT])
            async with Joining(nats, RelayIdentity(THIRD, URL, [NEXT_ROOT]), registry) as third:
                await third.joined()
                assert first.connection.is_connected
                assert second.connection.is_connected


@pytest.mark.integration
async def test_once_the_others_have_ended_another_url_is_the_fleets(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with Joining(nats, RelayIdentity(FIRST, URL, [ROOT]), registry) as first:
        await first.joined()
        waiting = Joining(nats, RelayIdentity(SECOND, OTHER_URL, [ROOT]), registry)
        async with waiting:
            await until(lambda: waiting.pauses >= 1)
            await first.__aexit__()
            await waiting.joined()


@pytest.mark.integration
async def test_one_that_differs_from_several_leaves_although_its_id_is_lower(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    """Ids are by time, so a relay that was not restarted for long, or has a slow clock, has the lowest."""
    async with (
        Joining(nats, RelayIdentity(SECOND, URL, [ROOT]), registry) as second,
        Joining(nats, RelayIdentity(THIRD, URL, [ROOT]), registry) as third,
    ):
        # Neither repeats itself here: one answers the other, which it had not heard before.
        await until(lambda: SECOND in third.identity.others and THIRD in second.identity.others)
        wrong = Joining(nats, RelayIdentity(FIRST, OTHER_URL, [ROOT]), registry, unchecked=True)
        async with wrong:
            await until(lambda: wrong.pauses >= 1)
            await wrong.lines.until("cluster lost")
            assert second.connection.is_connected
            assert third.connection.is_connected
        assert second.lines.entries("cluster lost") == third.lines.entries("cluster lost") == []


@pytest.mark.integration
async def test_it_is_found_out_later_too(nats: NatsServer, registry: SchemaRegistry) -> None:
    """Two relays that could not hear each other, as on two sides of a partition."""
    async with Joining(nats, RelayIdentity(SECOND, OTHER_URL, [ROOT]), registry) as second:
        await second.joined()
        async with Joining(nats, RelayIdentity(FIRST, URL, [ROOT]), registry, unchecked=True) as first:
            await until(lambda: second.connection.problem is not None)
            assert second.lines.entries("cluster lost")
            assert first.connection.is_connected


@pytest.mark.integration
async def test_health_says_why_a_relay_did_not_join(
    nats: NatsServer, asker: Member, registry: SchemaRegistry, tmp_path: Path
) -> None:
    await until(lambda: asker.part.presence.is_current)
    async with Member.joined(nats.config, tmp_path / "other", registry, public_url=OTHER_URL) as other:
        health = other.part.health()
        assert not health.ready
        assert health.lets_calls_flow
        assert "give both the same --public-url" in health.state


@pytest.mark.integration
async def test_what_is_no_identity_is_dropped_and_logged_once_for_each_reason(
    nats: NatsServer, registry: SchemaRegistry
) -> None:
    async with (
        Joining(nats, RelayIdentity(FIRST, URL, [ROOT]), registry) as first,
        Joining(nats, RelayIdentity(SECOND, URL, [ROOT]), registry) as second,
    ):
        await first.joined()
        await second.joined()  # what is published without a connection is lost
        for said in (
            b'{"relay": "x"}',
            b'{"relay": "y"}',
            b"{",
            RelayIdentity(THIRD, URL, [ROOT]).document(),
        ):
            await second.connection.publish(identity_subject(FLEET), said)
        await until(lambda: THIRD in first.identity.others)
        dropped = first.lines.entries("identity of another relay dropped")
        assert len({line["reason"] for line in dropped}) == len(dropped) == 2
        assert first.connection.is_connected


def relay(name: str, url: str = URL, root: str = ROOT) -> RelayIdentity:
    return RelayIdentity(name, url, [root])


def heard(*relays: RelayIdentity) -> HeardRelays:
    others = HeardRelays(Seconds(), 90.0)
    for each in relays:
        others.add(each)
    return others


def test_of_two_the_one_stays_that_more_relays_agree_with() -> None:
    right, wrong = relay("9"), relay("1", OTHER_URL)
    others = heard(wrong, relay("8"))
    assert others.stays(right, wrong)
    assert not others.stays(wrong, right)


def test_roots_count_as_urls_do() -> None:
    right, wrong = relay("9"), relay("1", root=OTHER_ROOT)
    assert heard(relay("8")).stays(right, wrong)


def test_of_equally_many_the_one_with_the_lower_id_stays() -> None:
    one, other = relay("1"), relay("2", OTHER_URL)
    for others in (heard(), heard(relay("3"), relay("4", OTHER_URL))):
        assert others.stays(one, other)
        assert not others.stays(other, one)


def test_a_relay_counts_once_and_as_it_was_heard_last() -> None:
    right, wrong = relay("9"), relay("1", OTHER_URL)
    others = heard(relay("8"), relay("8"), relay("8", OTHER_URL))
    assert not others.stays(right, wrong)


def test_a_relay_that_was_not_heard_for_long_does_not_count() -> None:
    seconds = Seconds()
    others = HeardRelays(seconds, 90.0)
    others.add(relay("8"))
    assert "8" in others
    seconds.now += 91.0
    assert "8" not in others
    assert not others.stays(relay("9"), relay("1", OTHER_URL))


def test_no_more_relays_are_counted_than_the_bound() -> None:
    others = heard(*(relay(str(number)) for number in range(MAX_HEARD + 1)))
    assert "0" not in others
    assert str(MAX_HEARD) in others
