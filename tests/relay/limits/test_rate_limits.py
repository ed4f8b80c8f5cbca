"""Limiters, how the holders of one share its rate, and which addresses count as one."""

import math
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.limits.rate_limits import (
    BUSY_RETRY_MS,
    MAX_PRESENT,
    PRESENT_S,
    Allowance,
    FairShares,
    KeyedLimiters,
    Limiter,
)
from schemas.errors import Failure, ToolError
from schemas.pacing import TokenBucket
from tests.fakes.hub import Hub
from tests.fakes.seconds import Seconds
from tests.fakes.signer import ECHO, METRICS, NODE_ID

DAY_MS = 86_400_000


def refused(limiter: Limiter, now: float, cost: float = 1.0) -> int:
    """Return after how many milliseconds to come again."""
    with pytest.raises(ToolError) as caught:
        limiter.acquire(now, cost)
    assert caught.value.failure is Failure.RATE_LIMITED
    assert isinstance(caught.value.retry_after_ms, int)
    return caught.value.retry_after_ms


def admits(limiter: Limiter, now: float, cost: float = 1.0) -> bool:
    """Admit one and release it; return whether it was admitted."""
    try:
        limiter.acquire(now, cost)
    except ToolError:
        return False
    limiter.release()
    return True


def admitted(limiter: Limiter, now: float) -> int:
    """Return how many pass one after the other until one is refused."""
    passed = 0
    while admits(limiter, now):
        passed += 1
    return passed


# --- a limiter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 2, 10, 500])
def test_as_many_as_the_burst_pass_at_once(burst: int) -> None:
    assert admitted(Limiter(Allowance(1, burst, 10_000), 0.0), 0.0) == burst


@pytest.mark.parametrize(
    ("rate", "retry_ms"),
    [
        pytest.param(1000, 1, id="1000 a second"),
        pytest.param(10, 100, id="10 a second"),
        pytest.param(3, 334, id="never told too early"),
        pytest.param(1, 1000, id="1 a second"),
        pytest.param(0.5, 2000, id="one in two seconds"),
        pytest.param(1 / 3600, 3_600_000, id="one an hour"),
        pytest.param(10_000, 1, id="less than a millisecond"),
    ],
)
def test_who_is_refused_is_told_when_to_come_and_passes_then_and_not_before(
    rate: float, retry_ms: int
) -> None:
    limiter = Limiter(Allowance(rate, 1, 1), 0.0)
    assert admits(limiter, 0.0)
    assert refused(limiter, 0.0) == retry_ms
    if retry_ms > 1:
        assert not admits(limiter, retry_ms * 0.99 / 1000)
    assert admits(limiter, retry_ms / 1000)


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-9])
def test_a_rate_next_to_nothing_is_told_as_a_day(rate: float) -> None:
    limiter = Limiter(Allowance(rate, 1, 1), 0.0)
    assert admits(limiter, 0.0)
    assert refused(limiter, 0.0) == DAY_MS


def test_what_has_come_back_in_part_shortens_the_wait() -> None:
    limiter = Limiter(Allowance(2, 2, 9), 0.0)
    assert admitted(limiter, 0.0) == 2
    assert refused(limiter, 0.25) == 250
    assert refused(limiter, 0.375) == 125
    assert admitted(limiter, 0.5) == 1


def test_who_is_refused_uses_nothing_up() -> None:
    limiter = Limiter(Allowance(1, 1, 1), 0.0)
    assert admits(limiter, 0.0)
    for tenth in range(10):
        assert not admits(limiter, tenth / 10)
    assert admits(limiter, 1.0)


def test_no_more_than_the_burst_is_saved_up() -> None:
    limiter = Limiter(Allowance(5, 5, 9), 0.0)
    assert admitted(limiter, 0.0) == 5
    assert admitted(limiter, 3600.0) == 5


def test_a_cost_is_taken_as_so_many() -> None:
    limiter = Limiter(Allowance(1, 10, 9), 0.0)
    assert admits(limiter, 0.0, 7.5)
    assert refused(limiter, 0.0, 5) == 2500
    assert admits(limiter, 0.0, 2.5)
    assert refused(limiter, 0.0) == 1000


def test_no_more_are_in_flight_than_may_be_at_a_time() -> None:
    limiter = Limiter(Allowance(100, 100, 2), 0.0)
    limiter.acquire(0.0)
    limiter.acquire(0.0)
    assert refused(limiter, 0.0) == BUSY_RETRY_MS
    limiter.release()
    assert admits(limiter, 0.0)
    limiter.acquire(0.0)
    assert refused(limiter, 0.0) == BUSY_RETRY_MS


def test_who_is_refused_for_want_of_room_has_not_used_up_the_rate() -> None:
    limiter = Limiter(Allowance(1, 2, 1), 0.0)
    limiter.acquire(0.0)
    for _ in range(5):
        assert refused(limiter, 0.0) == BUSY_RETRY_MS
    limiter.release()
    assert admits(limiter, 0.0)


def test_a_clock_that_goes_back_fills_nothing_and_stops_nothing() -> None:
    limiter = Limiter(Allowance(1, 3, 9), 100.0)
    assert admitted(limiter, 100.0) == 3
    assert not admits(limiter, 40.0)
    assert refused(limiter, 40.0) == 1000
    assert admits(limiter, 41.0)


# --- another allowance --------------------------------------------------------------------------------


def test_a_larger_allowance_fills_up_from_now_on() -> None:
    limiter = Limiter(Allowance(1, 1, 1), 0.0)
    assert admits(limiter, 0.0)
    limiter.change(Allowance(10, 10, 4))
    assert not admits(limiter, 0.0)
    assert refused(limiter, 0.0) == 100
    assert admitted(limiter, 3600.0) == 10


def test_a_smaller_allowance_takes_away_what_was_saved_up() -> None:
    limiter = Limiter(Allowance(10, 10, 4), 0.0)
    limiter.change(Allowance(1, 2, 4))
    assert admitted(limiter, 0.0) == 2


def test_going_back_and_forth_between_allowances_gives_nothing_back() -> None:
    small, large = Allowance(1, 1, 1), Allowance(10, 10, 1)
    limiter = Limiter(large, 0.0)
    passed = 0
    for _ in range(20):
        limiter.change(small)
        passed += admits(limiter, 0.0)
        limiter.change(large)
        passed += admits(limiter, 0.0)
    assert passed == 1


def test_fewer_at_a_time_holds_for_new_calls_and_ends_none_in_flight() -> None:
    limiter = Limiter(Allowance(100, 100, 3), 0.0)
    for _ in range(3):
        limiter.acquire(0.0)
    limiter.change(Allowance(100, 100, 1))
    limiter.release()
    limiter.release()
    assert refused(limiter, 0.0) == BUSY_RETRY_MS
    limiter.release()
    assert admits(limiter, 0.0)


# --- when a limiter may be forgotten ---------------------------------------------------------------------


def test_a_limiter_is_idle_when_no_call_is_in_flight_and_nothing_is_used_up() -> None:
    limiter = Limiter(Allowance(1, 2, 1), 0.0)
    assert limiter.is_idle(0.0)
    limiter.acquire(0.0)
    assert not limiter.is_idle(3600.0)
    limiter.release()
    assert limiter.is_idle(3600.0)
    assert admits(limiter, 3600.0)
    assert not limiter.is_idle(3600.5)
    assert limiter.is_idle(3601.0)


# --- what never happens -------------------------------------------------------------------------------

RATES = st.floats(0.01, 1000)
STEPS = st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 50)), max_size=40)


@given(RATES, STEPS)
def test_never_more_than_the_burst_and_the_rate_pass(rate: float, steps: list[tuple[float, int]]) -> None:
    burst = max(1.0, rate)
    limiter = Limiter(Allowance(rate, burst, 1), 0.0)
    now = forward = 0.0
    passed = 0
    for step, attempts in steps:
        now += step
        forward += max(0.0, step)  # a clock that goes back gives nothing
        passed += sum(admits(limiter, now) for _ in range(attempts))
        assert passed <= burst + rate * forward + 1e-3


@given(RATES, st.integers(1, 200))
def test_what_comes_as_it_is_told_is_never_sent_away_twice(rate: float, calls: int) -> None:
    limiter = Limiter(Allowance(rate, max(1.0, rate), 1), 0.0)
    now = 0.0
    for _ in range(calls):
        if not admits(limiter, now):
            now += refused(limiter, now) / 1000
            assert admits(limiter, now)


def test_what_one_in_flight_has_started_counts_beyond_its_end() -> None:
    limiter = Limiter(Allowance(100, 100, 1), 0.0)
    limiter.acquire(0.0)
    limiter.acquire_extra()
    limiter.release()
    assert refused(limiter, 0.0) == BUSY_RETRY_MS
    limiter.release()
    assert admits(limiter, 0.0)


def test_a_charge_takes_from_the_rate_alone_however_many_are_in_flight() -> None:
    limiter = Limiter(Allowance(10, 3, 1), 0.0)
    limiter.acquire(0.0)
    limiter.charge(0.0, 2)
    assert refused(limiter, 0.0) == BUSY_RETRY_MS
    limiter.release()
    assert refused(limiter, 0.0) == 100
    with pytest.raises(ToolError) as caught:
        limiter.charge(0.0, 2)
    assert caught.value.retry_after_ms == 200
    assert admitted(limiter, 0.1) == 1


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=100))
def test_never_more_than_may_are_in_flight(concurrency: int, moves: list[bool]) -> None:
    limiter = Limiter(Allowance(1e6, 1e6, concurrency), 0.0)
    inside = 0
    for comes in moves:
        if not comes and inside:
            limiter.release()
            inside -= 1
        elif comes:
            try:
                limiter.acquire(0.0)
                inside += 1
            except ToolError:
                assert inside == concurrency
        assert 0 <= inside <= concurrency


# --- a limiter for each ----------------------------------------------------------------------------------

ONCE = Allowance(1, 1, 1)


def passes(limiters: KeyedLimiters[Any], key: object, allowance: Allowance = ONCE) -> bool:
    """Return whether one is let through, and leaves at once."""
    try:
        with limiters.held(key, allowance):
            return True
    except ToolError:
        return False


def test_each_key_has_a_limiter_of_its_own() -> None:
    limiters: KeyedLimiters[str] = KeyedLimiters(Seconds())
    with limiters.held("one", ONCE):
        assert not passes(limiters, "one")
        assert passes(limiters, "another")


def test_a_limiter_is_left_however_the_block_ends() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[str] = KeyedLimiters(clock)
    allowance = Allowance(1000, 1000, 1)
    for error in (RuntimeError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), limiters.held("one", allowance):
            raise error
    assert passes(limiters, "one", allowance)


def test_of_a_key_the_newest_allowance_counts() -> None:
    limiters: KeyedLimiters[str] = KeyedLimiters(Seconds())
    assert passes(limiters, "one", Allowance(1, 5, 1))
    with pytest.raises(ToolError) as caught, limiters.held("one", Allowance(0.25, 1, 1), 2):
        raise AssertionError
    assert caught.value.retry_after_ms == 4000


def test_idle_limiters_are_forgotten_when_there_are_many_the_longest_unused_first() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[int] = KeyedLimiters(clock, max_limiters=3)
    for key in (1, 2, 3):
        assert passes(limiters, key)
    clock.now += 1
    assert passes(limiters, 1)
    assert passes(limiters, 4)  # 2 goes, not 1
    assert len(limiters) == 3
    assert not passes(limiters, 1)


def test_a_limiter_that_is_not_idle_is_never_forgotten() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[str] = KeyedLimiters(clock, max_limiters=1)
    assert passes(limiters, "used up")
    for number in range(5):
        assert passes(limiters, f"other {number}")
    assert not passes(limiters, "used up")
    clock.now += 1
    with limiters.held("inside", Allowance(1000, 1000, 1)):
        clock.now += 3600
        assert passes(limiters, "another")
        assert not passes(limiters, "inside", Allowance(1000, 1000, 1))
    clock.now += 3600
    assert passes(limiters, "the last")
    assert len(limiters) == 1


def test_limiters_that_are_never_idle_do_not_keep_those_behind_them_from_being_forgotten() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[int] = KeyedLimiters(clock, max_limiters=200)
    hardly_ever = Allowance(1e-9, 1, 1)
    for key in range(100):
        assert passes(limiters, key, hardly_ever)
    for key in range(100, 1000):
        clock.now += 2
        assert passes(limiters, key)
    assert len(limiters) == 200
    for key in range(100):
        assert not passes(limiters, key, hardly_ever)


# --- what a capability says of itself -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("constraints", "allowance"),
    [
        pytest.param({"rate_limit_rps": 10, "max_concurrency": 4}, Allowance(10, 10, 4), id="both"),
        pytest.param({"rate_limit_rps": 0.5}, Allowance(0.5, 1, 1), id="one may always come"),
        pytest.param({"rate_limit_rps": 1}, Allowance(1, 1, 1), id="one a second"),
    ],
)
def test_the_burst_is_a_seconds_worth_and_one_at_least(
    hub: Hub, constraints: dict[str, Any], allowance: Allowance
) -> None:
    hub.connect(hub.ca.issue(), capabilities=[{**ECHO, "constraints": constraints}])
    (tool,) = hub.nodes_of("acme")[0].tools.values()
    assert tool.allowance == allowance
    assert tool.allowance.burst == max(1, math.ceil(allowance.rate))


def test_all_verbs_of_a_capability_are_counted_together_and_no_other_capability(hub: Hub) -> None:
    hub.connect(hub.ca.issue(), capabilities=[ECHO, METRICS, {**ECHO, "cap_id": "echo2"}])
    (node,) = hub.nodes_of("acme")
    assert {tool.capability for tool in node.tools.values()} == {
        (NODE_ID, "echo"),
        (NODE_ID, "echo2"),
        (NODE_ID, "sysmetrics"),
    }


TEN = Allowance(10, 10, 4)


class Shared:
    """One bucket and its holders, on a clock that a test moves."""

    def __init__(self, allowance: Allowance = TEN) -> None:
        self.allowance = allowance
        self.bucket = TokenBucket(allowance.rate, allowance.burst, 0.0)
        self.shares = FairShares(0.0)

    def asks(self, who: str, now: float) -> float:
        """Ask for one; return how many seconds to wait, 0 if it was given."""
        return self.shares.take(self.bucket, self.allowance, who, now, 1.0)

    def given(self, who: str, now: float) -> int:
        """Return how many ``who`` is given at once."""
        for count in range(10_000):
            if self.asks(who, now) > 0:
                return count
        raise AssertionError


@dataclass
class Outcome:
    """How many were given to whom, and when whom was refused."""

    served: Counter[str]
    refused: list[tuple[float, str]]

    def rate(self, who: str, seconds: float) -> float:
        return self.served[who] / seconds


def play(shared: Shared, per_second: dict[str, float], seconds: float, jitter_s: float = 0.0) -> Outcome:
    """Let each ask so often, from times and with deviations that a seed decides."""
    chance = random.Random(7)  # noqa: S311 - no secret
    times = sorted(
        (max(0.0, (number + chance.random() * 0.01) / rate + chance.uniform(-jitter_s, jitter_s)), who)
        for who, rate in per_second.items()
        for number in range(int(rate * seconds))
    )
    outcome = Outcome(Counter(), [])
    for now, who in times:
        if shared.asks(who, now) > 0:
            outcome.refused.append((now, who))
        else:
            outcome.served[who] += 1
    return outcome


@pytest.mark.parametrize("jitter_s", [0.0, 0.15], ids=["in step", "with jitter"])
@pytest.mark.parametrize("greedy", [40, 200, 2000])
def test_who_asks_for_its_share_is_never_refused_however_often_another_asks(
    greedy: int, jitter_s: float
) -> None:
    outcome = play(Shared(), {"modest": 5, "greedy": greedy}, 60, jitter_s)
    # Both begin with a full bucket: the greedy one can have emptied it before the other has asked.
    settled_s = 1.0 if jitter_s else 0.0
    assert not [now for now, who in outcome.refused if who == "modest" and now >= settled_s]
    assert outcome.rate("greedy", 60) == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        pytest.param({"a": 2, "b": 50}, {"a": 2, "b": 8}, id="what one leaves goes to the other"),
        pytest.param({"a": 7, "b": 50}, {"a": 5, "b": 5}, id="two that want more than half"),
        pytest.param({"a": 1, "b": 4, "c": 50}, {"a": 1, "b": 4, "c": 5}, id="in turn, from the smallest"),
        pytest.param({"a": 1, "b": 40, "c": 90}, {"a": 1, "b": 4.5, "c": 4.5}, id="two that are greedy"),
        pytest.param({"a": 3, "b": 4}, {"a": 3, "b": 4}, id="less than there is"),
        pytest.param({"a": 90}, {"a": 10}, id="alone"),
    ],
)
def test_the_rate_is_divided_max_min_fair_and_used_up(
    asked: dict[str, float], served: dict[str, float]
) -> None:
    outcome = play(Shared(), asked, 100)
    for who, rate in served.items():
        assert outcome.rate(who, 100) == pytest.approx(rate, abs=0.15)


def test_twenty_that_are_more_than_the_burst_all_have_the_same() -> None:
    asked = {f"agent-{number}": 3.0 if number else 200.0 for number in range(20)}
    outcome = play(Shared(), asked, 100, jitter_s=0.1)
    assert sum(outcome.served.values()) == pytest.approx(1000, abs=20)
    assert all(outcome.rate(who, 100) == pytest.approx(0.5, abs=0.15) for who in asked)


def test_one_that_obeys_the_retry_time_is_served_beside_many_that_do_not() -> None:
    shared, comes_at, served = Shared(), 0.0, 0
    for now in (tenth / 10 for tenth in range(1000)):
        for number in range(50):
            shared.asks(f"agent-{number}", now)
        if now >= comes_at:
            wait_s = shared.asks("modest", now)
            served += wait_s == 0
            comes_at = now + (wait_s or 8.0)
    assert served >= 8  # of at most 13, where its part is 19


def test_where_there_is_one_token_at_a_time_it_is_each_ones_turn() -> None:
    shared = Shared(Allowance(0.5, 1, 1))
    served = play(shared, {"greedy": 40, "modest": 1}, 200).served
    assert served["modest"] == pytest.approx(served["greedy"], abs=1)
    assert served.total() > 75  # the token waits while its turn is not taken


def test_a_turn_that_is_not_taken_passes() -> None:
    shared = Shared(Allowance(0.5, 1, 1))
    assert shared.given("greedy", 0.0) == 1
    wait_s = shared.asks("gone", 0.5)
    assert shared.asks("greedy", 2.0) > 0  # it is the other's turn
    assert shared.asks("greedy", 0.5 + wait_s + 1.1) == 0


def test_one_alone_may_take_the_burst_at_once_and_then_the_rate() -> None:
    shared = Shared()
    assert shared.given("alone", 0.0) == 10
    wait_s = shared.asks("alone", 0.0)
    assert shared.asks("alone", wait_s - 0.01) > 0
    assert shared.asks("alone", wait_s) == 0
    assert shared.given("alone", 3600.0) == 10


@pytest.mark.parametrize("rate", [10, 4])
def test_who_comes_beside_a_greedy_one_finds_a_token(rate: int) -> None:
    shared = Shared(Allowance(rate, rate, 4))
    play(shared, {"greedy": 200}, 30)
    assert shared.asks("comes", 30.0) == 0


def test_a_share_is_kept_for_a_while_and_costs_the_others_no_rate() -> None:
    shared = Shared()
    assert shared.asks("away", 0.0) == 0
    outcome = play(shared, {"greedy": 200}, PRESENT_S - 1)
    assert outcome.rate("greedy", PRESENT_S - 1) == pytest.approx(10, abs=1)
    assert shared.given("away", PRESENT_S - 1) == 4
    assert len(shared.shares) == 2
    shared.asks("greedy", 3 * PRESENT_S)
    assert len(shared.shares) == 1


def test_the_holders_of_one_bucket_are_bounded() -> None:
    shared = Shared(Allowance(1000, 1000, 4))
    for number in range(5 * MAX_PRESENT):
        assert shared.asks(f"agent-{number}", 0.0) == 0
    assert len(shared.shares) == MAX_PRESENT


SHARED_STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40)), max_size=80)


@given(SHARED_STEPS, st.sampled_from([0.5, 1, 2, 10, 50]))
def test_all_together_never_get_more_than_the_bucket_has(steps: list[tuple[float, int]], rate: float) -> None:
    allowance = Allowance(rate, max(1, rate), 4)
    shared, now, served = Shared(allowance), 0.0, 0
    for after_s, who in steps:
        now += after_s
        served += shared.asks(str(who), now) == 0
        assert served <= allowance.burst + rate * now + 1e-3


@given(SHARED_STEPS, st.sampled_from([0.5, 1, 2, 10, 50]))
def test_the_one_that_goes_on_asking_is_served_in_the_end(
    steps: list[tuple[float, int]], rate: float
) -> None:
    shared, now = Shared(Allowance(rate, max(1, rate), 4)), 0.0
    for after_s, who in steps:
        now += after_s
        shared.asks(str(who), now)
    for _ in range(50):
        wait_s = shared.asks("patient", now)
        if wait_s == 0:
            return
        now += wait_s
    raise AssertionError
