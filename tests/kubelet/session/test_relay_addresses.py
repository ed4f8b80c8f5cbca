import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kubelet.session import relay_addresses
from kubelet.session.relay_addresses import LONGEST_S, MOST_ADDRESSES, RelayAddress, RelayAddresses
from tests.fakes.chance import FixedChance
from tests.fakes.clock import FakeClock

FLEET = "https://relay.example"
URLS = [FLEET, "https://192.0.2.2", "https://192.0.2.3:8700"]
HALF_OF_FIRST_S = 0.5  # with every draw in the middle of its range
HOSTS = ["192.0.2.1", "2001:db8::1"]


class Names:
    """The names of hosts, played by a test."""

    def __init__(self, hosts: Sequence[str] = HOSTS) -> None:
        self.hosts = hosts
        self.asked: list[tuple[str, int]] = []

    async def __call__(self, host: str, port: int) -> Sequence[str]:
        self.asked.append((host, port))
        if not self.hosts:
            raise OSError("no such name")
        return self.hosts


def relays(
    *urls: str, node_id: str = "node", clock: FakeClock | None = None, names: Names | None = None
) -> RelayAddresses:
    return RelayAddresses(urls, node_id, FixedChance(0.5), clock or FakeClock(0), names or Names())


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ws_proxy", "wss_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def tried(addresses: RelayAddresses, count: int) -> list[tuple[RelayAddress, float]]:
    """Return the next attempts, all of which fail, and their waits."""
    found = []
    for _ in range(count):
        address, wait_s = await addresses.next()
        found.append((address, wait_s))
        addresses.failed(address, 0, was_open=False)
    return found


async def test_each_address_is_tried_at_once_before_any_is_tried_again() -> None:
    first = await tried(relays(*URLS), 5)
    assert {str(address) for address, _ in first[:4]} == {
        f"{FLEET} at 192.0.2.1",
        f"{FLEET} at 2001:db8::1",
        *URLS[1:],
    }
    assert [wait_s for _, wait_s in first] == [0, 0, 0, 0, HALF_OF_FIRST_S]


async def test_waits_grow_for_each_address_by_itself() -> None:
    clock = FakeClock(0)
    addresses = relays(*URLS[1:], clock=clock)
    waits: dict[RelayAddress, list[float]] = {}
    for _ in range(6):
        address, wait_s = await addresses.next()
        clock.advance(int(wait_s * 1000))
        waits.setdefault(address, []).append(clock())
        addresses.failed(address, 0, was_open=False)
    assert list(waits.values()) == [[0, 500, 1500]] * 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
async def test_waits_are_drawn_below_a_ceiling_that_doubles_from_a_second_to_thirty_seconds(
    share: float,
) -> None:
    addresses = RelayAddresses(URLS[1:2], "node", FixedChance(share), FakeClock(0))
    address, _ = await addresses.next()

    def waits(count: int) -> list[float]:
        return [addresses.failed(address, 0, was_open=False) for _ in range(count)]

    assert waits(7) == [share * ceiling for ceiling in (1, 2, 4, 8, 16, 30, 30)]
    addresses.succeeded(address)
    assert waits(3) == [share * ceiling for ceiling in (1, 2, 4)]


@pytest.mark.parametrize(
    ("asked_s", "share", "expected"),
    [(60, 0.0, 60), (60, 1.0, 61), (599, 1.0, 600), (600, 1.0, 600), (86_400, 0.0, 599), (86_400, 1.0, 600)],
)
async def test_a_requested_wait_is_kept_with_jitter_on_top_and_is_ten_minutes_at_most(
    asked_s: float, share: float, expected: float
) -> None:
    addresses = RelayAddresses(URLS[1:2], "node", FixedChance(share), FakeClock(0))
    address, _ = await addresses.next()
    waits = [addresses.failed(address, asked_s, was_open=False) for _ in range(3)]
    assert waits == [expected] * 3


@pytest.mark.parametrize("attempt_s", [0.0, 10.0], ids=["refused at once", "no answer at all"])
@pytest.mark.parametrize("away_s", [90, 120, 3600])
async def test_fifty_nodes_are_back_within_45_seconds_of_the_relays_return(
    away_s: float, attempt_s: float
) -> None:
    async def back_at(number: int) -> float:
        """Return when node ``number`` first reaches a relay that goes away at 0 and returns at ``away_s``."""
        addresses = RelayAddresses(URLS[1:2], "node", random.Random(number), FakeClock(0))  # noqa: S311 - jitter
        address, _ = await addresses.next()
        now = addresses.failed(address, 0, was_open=True)
        while now < away_s:
            now += attempt_s + addresses.failed(address, 0, was_open=False)
        return now

    returns = [await back_at(number) for number in range(50)]
    assert max(returns) - away_s <= 45
    # Spread over that time, and not in one moment.
    assert max(returns) - min(returns) > LONGEST_S / 2


async def test_a_relay_that_asks_for_time_gets_it_and_the_next_one_is_tried_at_once() -> None:
    clock = FakeClock(0)
    addresses = relays(*URLS[1:], clock=clock)
    full, _ = await addresses.next()
    addresses.failed(full, 60, was_open=False)
    other, wait_s = await addresses.next()
    assert (other != full, wait_s) == (True, 0)
    for _ in range(3):  # it is away: 0.5, 1 and 2 s
        addresses.failed(other, 0, was_open=False)
        again, wait_s = await addresses.next()
        assert again == other
        clock.advance(int(wait_s * 1000))
    addresses.failed(other, 300, was_open=False)
    assert await addresses.next() == (full, 60 + HALF_OF_FIRST_S - 3.5)


async def test_after_a_lost_session_its_relay_comes_first_and_none_at_once() -> None:
    clock = FakeClock(0)
    addresses = relays(*URLS[1:], clock=clock)
    mine, _ = await addresses.next()
    addresses.succeeded(mine)
    addresses.failed(mine, 0, was_open=True)
    assert await addresses.next() == (mine, HALF_OF_FIRST_S)
    clock.advance(500)
    addresses.failed(mine, 0, was_open=False)
    other, wait_s = await addresses.next()
    assert (other != mine, wait_s) == (True, 0)


async def test_nodes_that_a_relay_sends_away_do_not_reach_the_next_one_in_one_moment() -> None:
    addresses = relays(*URLS[1:])
    mine, _ = await addresses.next()
    addresses.failed(mine, 60, was_open=True)
    other, wait_s = await addresses.next()
    assert (other != mine, wait_s) == (True, HALF_OF_FIRST_S)


async def test_a_node_stays_with_the_relay_that_it_has_found() -> None:
    clock = FakeClock(0)
    addresses = relays(*URLS[1:], clock=clock)
    preferred, _ = await addresses.next()
    addresses.failed(preferred, 0, was_open=False)
    found, _ = await addresses.next()
    addresses.succeeded(found)
    clock.advance(3_600_000)
    addresses.failed(found, 0, was_open=True)
    assert (await addresses.next())[0] == found


async def test_what_is_no_relays_fault_holds_them_all() -> None:
    addresses = relays(*URLS[1:])
    mine, _ = await addresses.next()
    addresses.postpone_all(300)
    assert await addresses.next() == (mine, 300)


async def test_nodes_spread_over_the_relays_and_keep_their_order() -> None:
    urls = [f"https://192.0.2.{number}" for number in range(1, 5)]
    first = {f"node-{n}": await tried(relays(*urls, node_id=f"node-{n}"), 4) for n in range(400)}
    again = {f"node-{n}": await tried(relays(*urls, node_id=f"node-{n}"), 4) for n in range(400)}
    assert first == again
    shares = Counter(order[0][0].url for order in first.values())
    assert set(shares) == set(urls)
    assert min(shares.values()) > 60  # of 100


async def test_a_relay_that_is_removed_moves_its_own_nodes_alone() -> None:
    urls = [f"https://192.0.2.{number}" for number in range(1, 5)]
    for number in range(100):
        node_id = f"node-{number}"
        [(before, _)] = await tried(relays(*urls, node_id=node_id), 1)
        [(after, _)] = await tried(relays(*urls[1:], node_id=node_id), 1)
        assert after == before or before.url == urls[0]


async def test_names_are_resolved_for_each_attempt_and_addresses_are_not() -> None:
    names = Names()
    addresses = relays(FLEET, "https://192.0.2.9", "https://[2001:db8::9]:8700", names=names)
    await addresses.next()
    assert names.asked == [("relay.example", 443)]
    names.hosts = ["192.0.2.77"]
    found = await tried(addresses, 3)
    assert RelayAddress(FLEET, "192.0.2.77") in [address for address, _ in found]


async def test_without_a_resolver_the_addresses_known_last_are_used() -> None:
    names = Names()
    addresses = relays(FLEET, names=names)
    known = {address for address, _ in await tried(addresses, 2)}
    names.hosts = []
    assert {address for address, _ in await tried(addresses, 2)} == known


async def test_a_name_that_was_never_resolved_is_left_to_the_connection() -> None:
    assert await relays(FLEET, names=Names([])).next() == (RelayAddress(FLEET), 0)


async def test_a_resolver_that_does_not_answer_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(_host: str, _port: int) -> Sequence[str]:
        await asyncio.Event().wait()
        return []

    monkeypatch.setattr(relay_addresses, "RESOLVE_TIMEOUT_S", 0.01)
    addresses = RelayAddresses([FLEET], "node", FixedChance(0.5), FakeClock(0), silent)
    assert await asyncio.wait_for(addresses.next(), 30) == (RelayAddress(FLEET), 0)


async def test_a_name_with_thousands_of_addresses_is_cut() -> None:
    names = Names([f"10.0.{n // 250}.{n % 250}" for n in range(2000)])
    addresses = relays(FLEET, names=names)
    assert len({address for address, _ in await tried(addresses, 100)}) == MOST_ADDRESSES


async def test_a_proxy_resolves_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://proxy.example:3128")
    names = Names()
    assert (await relays(FLEET, names=names).next())[0] == RelayAddress(FLEET)
    assert names.asked == []
    monkeypatch.setenv("no_proxy", "relay.example")
    assert (await relays(FLEET, names=names).next())[0].host in HOSTS


async def test_the_systems_resolver_finds_this_machine() -> None:
    addresses = RelayAddresses(["http://localhost:8700"], "node", FixedChance(0.5), FakeClock(0))
    address, _ = await addresses.next()
    assert address.host in {"127.0.0.1", "::1"}
