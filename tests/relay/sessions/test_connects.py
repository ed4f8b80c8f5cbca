"""How connecting nodes are admitted. Turns of the loop are counted: a task that sleeps for 0 s takes one."""

import asyncio
from heapq import heapify, heappop, heappush
from itertools import cycle, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.sessions.connects import BURST, LONGEST_WAIT_S, RATE_PER_S, ConnectLimiter, ConnectQueue
from tests.fakes.examples import examples

NOW = 5000.0


CROWD = [f"10.1.{number // 256}.{number % 256}" for number in range(5000)]
STRANGERS = cycle(range(1 << 16))
HOST, OTHER_HOST = "192.0.2.1", "192.0.2.2"
PROXY = "127.0.0.1"


def come(connect_limiter: ConnectLimiter, count: int, now: float, address: str | None = None) -> list[float]:
    """Let ``count`` come in the same moment, by default strangers all, and return what each is told."""
    return [connect_limiter.enter(now, address or f"2001:db8:0:{next(STRANGERS):x}::1") for _ in range(count)]


def test_the_first_burst_goes_through_and_the_rest_is_sent_away() -> None:
    waits = come(ConnectLimiter(10, 5), 8, NOW)
    assert waits == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2, 0.3])


def test_by_default_the_burst_is_what_the_relay_bears_in_a_quarter_of_a_second() -> None:
    waits = come(ConnectLimiter(), 76, NOW)
    assert (RATE_PER_S, BURST) == (300, 75)
    assert waits.count(0.0) == 75
    assert waits[-1] == pytest.approx(1 / 300)


def test_after_a_while_as_many_go_through_as_the_rate_says() -> None:
    connect_limiter = ConnectLimiter(10, 5)
    come(connect_limiter, 5, NOW)
    assert come(connect_limiter, 4, NOW + 0.3).count(0.0) == 3


def test_no_more_than_the_burst_is_saved_up() -> None:
    connect_limiter = ConnectLimiter(10, 5)
    assert come(connect_limiter, 9, NOW + 1_000_000).count(0.0) == 5


def test_every_retry_time_is_another_one() -> None:
    waits = [wait for wait in come(ConnectLimiter(10, 5), 500, NOW) if wait]
    retry_times = sorted(NOW + wait for wait in waits)
    assert len(waits) == 495
    gaps = [later - earlier for earlier, later in pairwise(retry_times)]
    assert gaps == pytest.approx([0.1] * 494)


def test_retry_times_stay_different_for_those_who_come_later() -> None:
    connect_limiter = ConnectLimiter(10, 5)
    come(connect_limiter, 5, NOW)
    first = [NOW + wait for wait in come(connect_limiter, 3, NOW)]
    second = [NOW + 0.05 + wait for wait in come(connect_limiter, 3, NOW + 0.05)]
    assert first + second == pytest.approx([NOW + 0.1 * number for number in range(1, 7)])


def test_retry_times_of_the_past_delay_no_client() -> None:
    connect_limiter = ConnectLimiter(10, 5)
    come(connect_limiter, 50, NOW)
    later = NOW + 100
    assert come(connect_limiter, 6, later) == [0.0] * 5 + [pytest.approx(0.1)]


def test_no_client_is_told_to_wait_for_more_than_a_minute() -> None:
    waits = come(ConnectLimiter(10, 5), 5000, NOW)
    assert max(waits) == LONGEST_WAIT_S == 60
    assert waits.count(60) == 5000 - 5 - 599


def test_a_clock_that_goes_back_admits_no_client() -> None:
    connect_limiter = ConnectLimiter(10, 5)
    come(connect_limiter, 5, NOW)
    assert connect_limiter.enter(NOW - 3600, HOST) > 0
    assert connect_limiter.enter(NOW - 3600 + 0.11, HOST) == 0


def drain(connect_limiter: ConnectLimiter, addresses: list[str], now: float) -> tuple[list[float], int]:
    """Connect from all addresses at once, with retries; return when each was admitted, and all attempts."""
    due = [(now, address) for address in addresses]
    entered: list[float] = []
    attempts = 0
    heapify(due)
    while due:
        moment, address = heappop(due)
        attempts += 1
        wait = connect_limiter.enter(moment, address)
        if wait:
            heappush(due, (moment + wait, address))
        else:
            entered.append(moment)
    return entered, attempts


def test_a_crowd_that_returns_when_it_was_told_gets_in_at_the_rate_without_coming_often() -> None:
    rate, burst, crowd = 20.0, 20.0, 1000
    entered, attempts = drain(ConnectLimiter(rate, burst), CROWD[:crowd], NOW)
    assert len(entered) == crowd
    assert entered[-1] - NOW <= crowd / rate + LONGEST_WAIT_S
    assert attempts <= 3 * crowd


def test_five_thousand_nodes_are_in_within_half_a_minute() -> None:
    for addresses in (CROWD, [PROXY] * 5000):
        entered, _ = drain(ConnectLimiter(), addresses, NOW)
        assert entered[-1] - NOW <= 30


# --- one address among others -------------------------------------------------------------------------


def test_five_thousand_nodes_behind_one_address_come_in_at_half_the_rate() -> None:
    entered, attempts = drain(ConnectLimiter(), [HOST] * 5000, NOW)
    assert 32 <= entered[-1] - NOW <= 34
    assert attempts <= 3 * 5000


def test_one_address_has_half_of_the_burst_and_of_the_rate() -> None:
    connect_limiter = ConnectLimiter(20, 10)
    assert come(connect_limiter, 8, NOW, HOST) == pytest.approx([0] * 5 + [0.1, 0.2, 0.3])
    assert come(connect_limiter, 5, NOW, OTHER_HOST) == [0] * 5
    assert come(connect_limiter, 40, NOW + 1, HOST).count(0.0) == 5
    assert come(connect_limiter, 40, NOW + 1.5, HOST).count(0.0) == 5


def test_a_host_that_never_waits_does_not_delay_other_hosts() -> None:
    connect_limiter, waits = ConnectLimiter(), []
    for step in range(4000):  # 400 a second from one, 50 a second from all the others
        now = NOW + step / 400
        connect_limiter.enter(now, HOST)
        if step % 8 == 0:
            waits.append(connect_limiter.enter(now, CROWD[step]))
    assert waits == [0.0] * 500


def test_retry_times_of_one_address_are_not_those_of_another() -> None:
    connect_limiter = ConnectLimiter(20, 10)
    assert come(connect_limiter, 500, NOW, HOST)[-1] > 40
    assert come(connect_limiter, 6, NOW, OTHER_HOST) == pytest.approx([0, 0, 0, 0, 0, 0.1])
    assert connect_limiter.enter(NOW, CROWD[0]) == pytest.approx(0.05)


def test_a_flood_that_is_over_delays_no_client() -> None:
    connect_limiter = ConnectLimiter()
    for second in range(120):
        for address in CROWD[:20]:
            come(connect_limiter, 50, NOW + second, address)
    later = NOW + 121
    assert come(connect_limiter, 50, later) == [0.0] * 50
    waits = [wait for wait in come(connect_limiter, 200, later + 61) if wait]
    assert max(waits) < 1


@pytest.mark.parametrize(
    ("one", "same"),
    [
        pytest.param("2001:db8:1:2::1", "2001:db8:1:2:ffff::9", id="one network"),
        pytest.param("::ffff:192.0.2.1", "192.0.2.1", id="mapped"),
        pytest.param("fe80::1%eth0", "fe80::2", id="with a zone"),
    ],
)
def test_addresses_of_one_subscriber_share(one: str, same: str) -> None:
    connect_limiter = ConnectLimiter(20, 10)
    come(connect_limiter, 5, NOW, one)
    assert connect_limiter.enter(NOW, same) > 0
    assert connect_limiter.enter(NOW, "2001:db8:1:3::1") == 0


@pytest.mark.parametrize("address", [PROXY, "::1", "::ffff:127.0.0.1", "unknown", "", "x" * 10_000])
def test_who_has_no_address_of_its_own_has_what_all_have(address: str) -> None:
    assert come(ConnectLimiter(20, 10), 11, NOW, address).count(0.0) == 10


def test_not_more_addresses_are_remembered_than_that_and_the_others_have_what_all_have() -> None:
    connect_limiter = ConnectLimiter(20, 10, max_addresses=1)
    connect_limiter.enter(NOW, HOST)
    assert come(connect_limiter, 9, NOW, OTHER_HOST) == [0.0] * 9
    assert connect_limiter.enter(NOW, HOST) > 0
    # When the first is idle, the second takes its place.
    assert come(connect_limiter, 9, NOW + 10, OTHER_HOST).count(0.0) == 5


@examples(20, 50)
@given(st.floats(1, 100), st.lists(st.tuples(st.floats(0, 3), st.integers(1, 30)), min_size=1, max_size=30))
def test_never_more_than_burst_and_rate_get_in_and_every_wait_is_more_than_none(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    connect_limiter, now, inside = ConnectLimiter(rate, rate), NOW, 0
    for step, count in steps:
        now += step
        waits = come(connect_limiter, count, now)
        inside += waits.count(0.0)
        assert inside <= rate + rate * (now - NOW) + 1e-6
        assert all(0 <= wait <= LONGEST_WAIT_S for wait in waits)


UNLIMITED = 1e9


class Connects:
    """Connects and handshakes that wait in one queue.

    Attributes:
        queue: the queue, with ``steps_per_turn``.
        done: those that had their turn, by the names that the test gave them.
    """

    def __init__(self, steps_per_turn: int = 2) -> None:
        self.queue = ConnectQueue(ConnectLimiter(UNLIMITED, UNLIMITED), lambda: NOW, steps_per_turn)
        self.done: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []

    def come(self, *names: str) -> None:
        """Let nodes connect, in this order."""
        self.tasks += [asyncio.create_task(self._come(name)) for name in names]

    def go_on(self, *names: str) -> None:
        """Let handshakes go on, in this order."""
        self.tasks += [asyncio.create_task(self._go_on(name)) for name in names]

    async def _come(self, name: str) -> None:
        assert await self.queue.enter(PROXY) == 0
        self.done.append(name)

    async def _go_on(self, name: str) -> None:
        await self.queue.go_on()
        self.done.append(name)

    async def steps_by_turn(self) -> list[int]:
        """Return how many had their turn in each turn of the event loop, until all had."""
        steps = []
        while any(not task.done() for task in self.tasks):
            before = len(self.done)
            await asyncio.sleep(0)
            steps.append(len(self.done) - before)
        return steps


async def test_a_few_steps_run_in_each_turn_in_the_order_of_the_connects() -> None:
    connects = Connects(steps_per_turn=2)
    connects.come(*"abcdefg")
    assert max(await connects.steps_by_turn()) == 2
    assert connects.done == list("abcdefg")


async def test_handshakes_that_have_begun_go_on_before_new_ones_begin() -> None:
    connects = Connects(steps_per_turn=2)
    connects.come(*"abcd")
    connects.go_on(*"xyz")
    assert max(await connects.steps_by_turn()) == 2
    assert connects.done == list("xyzabcd")


async def test_the_queue_goes_on_after_it_was_empty() -> None:
    connects = Connects()
    for name in "ab":
        connects.come(name)
        await asyncio.wait_for(asyncio.gather(*connects.tasks), 30)
    assert connects.done == list("ab")


async def test_a_connection_that_ended_while_it_waited_uses_no_turn_of_the_others() -> None:
    connects = Connects(steps_per_turn=2)
    connects.come(*"abcdef")
    await asyncio.sleep(0)
    assert not connects.done
    for task in connects.tasks[:4]:
        task.cancel()
    assert [count for count in await connects.steps_by_turn() if count] == [2]
    assert connects.done == list("ef")


async def test_a_connect_over_the_rate_is_told_so_without_waiting() -> None:
    queue = ConnectQueue(ConnectLimiter(rate=10, burst=1), lambda: NOW)
    assert await queue.enter(PROXY) == 0
    with pytest.raises(StopIteration) as returned:
        queue.enter(PROXY).send(None)
    assert returned.value.value == pytest.approx(0.1)


async def test_a_relay_that_is_slower_than_the_rate_sends_away_and_goes_on() -> None:
    queue = ConnectQueue(ConnectLimiter(rate=10, burst=10), lambda: NOW, steps_per_turn=1, most_waiting=3)
    waits = await asyncio.gather(*(queue.enter(PROXY) for _ in range(5)))
    assert waits == pytest.approx([0, 0, 0, 0.1, 0.2])
    assert await queue.enter(PROXY) == 0
