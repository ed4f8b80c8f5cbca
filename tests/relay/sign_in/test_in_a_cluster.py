"""Sign-in in a fleet of several relays, by a real nats-server: any answers, each code is redeemed once."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.settings.config import StateFiles
from relay.sign_in.forwarding import FORWARDED
from relay.sign_in.pages import ELSEWHERE, FROM_ELSEWHERE
from relay.state.grants import MAX_LIVE
from relay.state.people import PersonRole
from relay.state.seal import FleetSeal
from schemas.registry import SchemaRegistry
from tests.fakes.clock import FakeClock
from tests.fakes.cluster_server import NatsServer
from tests.fakes.environment import PUBLIC_URL
from tests.fakes.person import Browser
from tests.fakes.polling import BOUND_S, until
from tests.fakes.signer import NOW_MS, TENANT
from tests.relay.sign_in.conftest import RelayOfAFleet, another_relay, asking

pytestmark = pytest.mark.integration


@dataclass
class Fleet:
    """The relay with the CA's key, and another. ``stack`` holds what a test adds."""

    nats: NatsServer
    registry: SchemaRegistry
    first: RelayOfAFleet
    other: RelayOfAFleet
    stack: AsyncExitStack

    async def signed_in(self, name: str = "ada", role: PersonRole = PersonRole.OPERATOR) -> Browser:
        """Return the browser of a person who has made a passkey at the other relay."""
        _, secret = self.first.relay.people.invite(name, role, TENANT)
        await until(lambda: self.first.relay.signs_in and self.other.relay.signs_in)
        browser = Browser(self.other.http, PUBLIC_URL)
        made = await browser.accept_invitation(f"{PUBLIC_URL}/invitation#{secret}")
        assert made.status_code == 200, made.text
        return browser

    async def add(self, state: Path) -> RelayOfAFleet:
        return await self.stack.enter_async_context(
            RelayOfAFleet.joined(self.nats.config, state, self.registry)
        )


def make_first(directory: Path) -> CertificateAuthority:
    ca = CertificateAuthority(directory / "ca", FakeClock(NOW_MS), os.urandom)
    ca.create()
    return ca


@pytest.fixture
async def fleet(tmp_path: Path, nats: NatsServer, registry: SchemaRegistry) -> AsyncIterator[Fleet]:
    one = tmp_path / "one"
    ca = make_first(one)
    FleetSeal(StateFiles(one).cluster_seal, ca).seal(NOW_MS)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(RelayOfAFleet.joined(nats.config, one, registry))
        two = another_relay(one, tmp_path / "two")
        other = await stack.enter_async_context(RelayOfAFleet.joined(nats.config, two, registry))
        await other.reaches(first)
        await first.reaches(other)
        yield Fleet(nats, registry, first, other, stack)


async def until_refused(relay: RelayOfAFleet, token: str) -> None:
    """Return once ``relay`` does not accept an access token any more."""
    async with asyncio.timeout(BOUND_S):
        while await relay.is_accepted(token):  # noqa: ASYNC110 - a request is all there is
            await asyncio.sleep(0.01)


async def test_each_step_of_sign_in_may_go_to_another_relay(fleet: Fleet) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    browser.http = fleet.first.http  # with the cookie of the other relay
    query = fleet.first.query(client)
    assert (await browser.get(query)).status_code == 200
    browser.http = fleet.other.http
    code = await fleet.other.code(browser, client)
    redeemed = await fleet.first.token(code=code, client_id=client)
    assert redeemed.status_code == 200, redeemed.text
    refreshed = await fleet.other.refresh(redeemed.json()["refresh_token"], client)
    assert refreshed.status_code == 200, refreshed.text
    access = refreshed.json()["access_token"]
    assert await fleet.first.is_accepted(access)
    assert await fleet.other.is_accepted(access)


async def test_of_tries_at_the_same_instant_at_all_relays_one_at_most_redeems_a_code(fleet: Fleet) -> None:
    third = await fleet.add(another_relay(fleet.first.state, fleet.first.state.parent / "three"))
    await third.reaches(fleet.first)
    browser = await fleet.signed_in()
    await until(lambda: third.relay.signs_in)
    client = await fleet.first.registered()
    for _ in range(4):
        code = await fleet.other.code(browser, client)
        tries = [each.token(code=code, client_id=client) for each in (fleet.other, third, fleet.first)]
        answers = await asyncio.gather(*tries)
        assert sorted(answer.status_code for answer in answers)[1:] == [400, 400]
        refused = {answer.json()["error"] for answer in answers if answer.status_code == 400}
        assert refused == {"invalid_grant"}


async def test_a_refresh_token_is_rotated_once_whichever_relays_are_asked_together(fleet: Fleet) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    tokens = await fleet.other.tokens(browser, client)
    both = (fleet.first, fleet.other, fleet.first, fleet.other)
    answers = await asyncio.gather(*(each.refresh(tokens["refresh_token"], client) for each in both))
    assert {answer.status_code for answer in answers} == {200}  # within the grace: of one generation
    (grant,) = fleet.first.relay.grants.read().by_id.values()
    assert grant.generation == 2
    assert len(answers) == sum(1 for _, each in grant.tokens if each == grant.generation)


async def test_clients_that_sign_in_at_all_relays_together_have_no_more_than_one_person_may(
    fleet: Fleet,
) -> None:
    browser, client = await fleet.signed_in(), await fleet.first.registered()
    oldest = await fleet.first.tokens(browser, client)
    for _ in range(MAX_LIVE - 2):
        fleet.first.fake.clock.advance(1)
        await fleet.first.tokens(browser, client)
    both = (fleet.first, fleet.other)
    codes = [await each.code(browser, client) for each in both]
    answers = await asyncio.gather(
        *(each.token(code=code, client_id=client) for each, code in zip(both, codes, strict=True))
    )
    assert [answer.status_code for answer in answers] == [200, 200]
    assert len(fleet.first.relay.grants.read().by_id) == MAX_LIVE
    for each in both:
        await until_refused(each, oldest["access_token"])


async def test_a_refresh_token_of_what_has_ended_is_refused_for_good(fleet: Fleet) -> None:
    """Not until later: the client has to ask the person again."""
    browser, client = await fleet.signed_in(), await fleet.first.registered()
    tokens = await fleet.other.tokens(browser, client, lifetime="day")
    for each in (fleet.first, fleet.other):
        each.fake.clock.advance(86_400_000)
    refused = await fleet.other.refresh(tokens["refresh_token"], client)
    assert (refused.status_code, refused.json()["error"]) == (400, "invalid_grant")


async def test_of_two_relays_restored_from_one_backup_one_redeems_a_refresh_token(fleet: Fleet) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    tokens = await fleet.first.tokens(browser, client)
    copy = fleet.first.state.parent / "copy"
    shutil.copytree(fleet.first.state, copy)
    restored = await fleet.add(copy)
    answers = await asyncio.gather(
        *(each.refresh(tokens["refresh_token"], client) for each in (fleet.first, restored))
    )
    assert sorted(answer.status_code for answer in answers) == [200, 400]
    redeemed = [each.relay.grants.read().by_id for each in (fleet.first, restored)]
    assert sorted(map(len, redeemed)) == [0, 1]  # the other one has ended what it had


async def test_a_relay_restored_from_an_older_backup_does_not_redeem_what_was_redeemed_since(
    fleet: Fleet,
) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    tokens = await fleet.first.tokens(browser, client)
    copy = fleet.first.state.parent / "copy"
    shutil.copytree(fleet.first.state, copy)
    assert (await fleet.first.refresh(tokens["refresh_token"], client)).status_code == 200
    restored = await fleet.add(copy)
    again = await restored.refresh(tokens["refresh_token"], client)
    assert (again.status_code, again.json()["error"]) == (400, "invalid_grant")


async def test_without_nats_nothing_is_redeemed_and_then_the_same_is(fleet: Fleet) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    tokens = await fleet.first.tokens(browser, client)
    code = await fleet.first.code(browser, client)
    cluster = fleet.first.relay.cluster
    assert cluster is not None
    fleet.nats.stop()
    await until(lambda: not cluster.connection.is_connected)
    for each in (fleet.first, fleet.other):
        for answer in (
            await each.token(code=code, client_id=client),
            await each.refresh(tokens["refresh_token"], client),
        ):
            assert answer.status_code == 503, answer.text
            assert answer.json()["error"] == "temporarily_unavailable"
            assert answer.headers["retry-after"] == "15"
            assert answer.headers["cache-control"] == "no-store"
    page = await Browser(fleet.other.http, PUBLIC_URL).get("/sign-in")
    assert page.status_code == 503
    assert "is not reached: try again later" in page.text
    assert (await fleet.other.http.get("/.well-known/oauth-authorization-server")).status_code == 200
    fleet.nats.start()
    await until(cluster.shares)
    assert (await fleet.first.token(code=code, client_id=client)).status_code == 200
    assert (await fleet.first.refresh(tokens["refresh_token"], client)).status_code == 200


@pytest.mark.parametrize("at", ["first", "other"])
async def test_a_person_who_is_revoked_on_any_machine_has_nothing_at_any_relay(fleet: Fleet, at: str) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    tokens = await fleet.other.tokens(browser, client)
    code = await fleet.other.code(browser, client)
    both, machine = (fleet.first, fleet.other), {"first": fleet.first, "other": fleet.other}[at]
    for each in both:
        assert await each.is_accepted(tokens["access_token"])
    machine.relay.people.revoke("ada")
    for each in both:
        await until_refused(each, tokens["access_token"])
    assert fleet.first.relay.grants.read().by_id == {}
    for each in both:
        assert (await each.refresh(tokens["refresh_token"], client)).status_code == 400
        assert (await each.token(code=code, client_id=client)).status_code == 400
        browser.http = each.http
        assert 'name="form"' not in (await browser.get(each.query(client))).text
        assert (await browser.sign_in()).status_code == 403


async def test_a_fleet_that_is_not_sealed_signs_nobody_in_until_it_is(
    tmp_path: Path, nats: NatsServer, registry: SchemaRegistry
) -> None:
    one = tmp_path / "one"
    ca = make_first(one)
    async with (
        RelayOfAFleet.joined(nats.config, one, registry) as first,
        RelayOfAFleet.joined(nats.config, another_relay(one, tmp_path / "two"), registry) as other,
    ):
        _, secret = first.relay.people.invite("ada", PersonRole.MEMBER, TENANT)
        said = "people cannot sign in until `relay cluster seal`"
        await until(lambda: any(said in line["event"] for line in first.fake.lines.entries()))
        for each in (first, other):
            assert not each.relay.signs_in
            answer = await each.http.get("/.well-known/oauth-authorization-server")
            assert answer.status_code == 404
        FleetSeal(StateFiles(one).cluster_seal, ca).seal(NOW_MS)
        await until(lambda: first.relay.signs_in and other.relay.signs_in)
        async with asyncio.timeout(BOUND_S):
            # Both connect anew, sealed; a request is all that shows when they have.
            while (await other.http.get("/invitation")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        made = await Browser(other.http, PUBLIC_URL).accept_invitation(f"/invitation#{secret}")
        assert made.status_code == 200, made.text
        await first.reaches(other)
        await until(
            lambda: all(each.relay.cluster and each.relay.cluster.shares() for each in (first, other))
        )


async def test_the_relays_share_no_passkey_no_link_and_no_token(fleet: Fleet) -> None:
    browser = await fleet.signed_in()
    client = await fleet.first.registered()
    tokens = await fleet.other.tokens(browser, client)
    await until((fleet.first.state / "redemptions.jsonl").exists)
    kept = "".join(path.read_text() for path in fleet.other.state.rglob("*.jsonl"))
    (person,) = fleet.other.relay.people.read().by_id.values()
    assert (person.name, person.passkeys, person.invitations) == ("ada", (), ())
    assert not (fleet.other.state / "grants.jsonl").exists()
    for secret in (
        tokens["access_token"],
        tokens["refresh_token"],
        client,
        browser.cookies["__Host-edge-session"],
    ):
        assert str(secret) not in kept


async def test_what_is_too_large_or_malformed_is_not_forwarded(fleet: Fleet) -> None:
    await fleet.signed_in()
    http = fleet.other.http
    assert (await http.get(f"/authorize?client_id={'x' * 9000}")).status_code == 414
    assert (await http.post("/token", content=b"x" * 40_000)).status_code == 413
    assert (await http.get("/sign-in", headers=[(b"cookie", b"a=\xe9")])).status_code == 400
    assert (await http.get("/sign-in", headers={"cookie": f"a={'x' * 9000}"})).status_code == 414
    assert (await http.get("/sign-in", headers=[("cookie", "a=b")] * 33)).status_code == 414
    assert (await http.get("/token")).status_code == 405
    assert "question of another relay dropped" not in fleet.first.fake.lines.getvalue()


async def test_a_page_is_asked_for_without_its_body_at_each_relay(fleet: Fleet) -> None:
    await fleet.signed_in()
    for each in (fleet.first, fleet.other):
        assert (await each.http.head("/sign-in")).status_code == 200


async def test_strangers_do_not_shut_out_an_address_from_which_a_person_has_signed_in(fleet: Fleet) -> None:
    """By whatever way: here with a link, at a relay that only forwards it."""
    _, secret = fleet.first.relay.people.invite("ada", PersonRole.OPERATOR, TENANT)
    await until(lambda: fleet.first.relay.signs_in and fleet.other.relay.signs_in)
    async with asking(fleet.other.relay, "203.0.113.7") as home:
        ada = Browser(home, PUBLIC_URL)
        made = await ada.accept_invitation(f"{PUBLIC_URL}/invitation#{secret}")
        assert made.status_code == 200, made.text
        for number in range(250):
            async with asking(fleet.other.relay, f"198.51.100.{number}") as stranger:
                malformed = [(b"cookie", b"a=\xe9")]
                said = [(await stranger.get("/sign-in", headers=malformed)).status_code for _ in range(30)]
                if 429 in said:  # the limit of all together: each has sent less than its own
                    break
        assert 429 in said
        assert [(await ada.get("/sign-in")).status_code for _ in range(10)] == [200] * 10


async def test_every_path_of_sign_in_is_forwarded(fleet: Fleet) -> None:
    await fleet.signed_in()
    here, there = (each.relay.application._sign_in_paths for each in (fleet.first, fleet.other))  # noqa: SLF001
    # A provider is a setting of the relay that signs people in: the other one forwards whatever that has.
    assert there - here == {ELSEWHERE, FROM_ELSEWHERE}
    assert here <= there
    assert set(FORWARDED) <= there
