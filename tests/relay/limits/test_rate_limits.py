import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.limits.allowance import Allowance
from relay.limits.rate_limits import BUSY_RETRY_MS, KeyedLimiters, Limiter
from schemas.errors import Failure, ToolError
from tests.fakes.hub import Hub
from tests.fakes.signer import ECHO, METRICS, NODE_ID

DAY_MS = 86_400_000


class Seconds:
    """A clock in seconds, which a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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


def test_each_key_has_a_limiter_of_its_own() -> None:
    limiters: KeyedLimiters[str] = KeyedLimiters(Seconds())
    with limiters.held("one", ONCE):
        with pytest.raises(ToolError), limiters.held("one", ONCE):
            raise AssertionError
        with limiters.held("another", ONCE):
            pass


def test_a_limiter_is_left_however_the_block_ends() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[str] = KeyedLimiters(clock)
    allowance = Allowance(1000, 1000, 1)
    for error in (RuntimeError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), limiters.held("one", allowance):
            raise error
    with limiters.held("one", allowance):
        pass


def test_of_a_key_the_newest_allowance_counts() -> None:
    limiters: KeyedLimiters[str] = KeyedLimiters(Seconds())
    with limiters.held("one", Allowance(1, 5, 1)):
        pass
    with pytest.raises(ToolError) as caught, limiters.held("one", Allowance(0.25, 1, 1), 2):
        raise AssertionError
    assert caught.value.retry_after_ms == 4000


def test_idle_limiters_are_forgotten_when_there_are_many_the_longest_unused_first() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[int] = KeyedLimiters(clock, max_limiters=3)
    for key in (1, 2, 3):
        with limiters.held(key, ONCE):
            pass
    clock.now += 1
    with limiters.held(1, ONCE):
        pass
    with limiters.held(4, ONCE):  # 2 goes, not 1
        pass
    assert len(limiters) == 3
    with pytest.raises(ToolError), limiters.held(1, ONCE):
        raise AssertionError


def test_a_limiter_that_is_not_idle_is_never_forgotten() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[str] = KeyedLimiters(clock, max_limiters=1)
    with limiters.held("used up", ONCE):
        pass
    for number in range(5):
        with limiters.held(f"other {number}", ONCE):
            pass
    with pytest.raises(ToolError), limiters.held("used up", ONCE):
        raise AssertionError
    clock.now += 1
    with limiters.held("inside", Allowance(1000, 1000, 1)):
        clock.now += 3600
        with limiters.held("another", ONCE):
            pass
        with pytest.raises(ToolError), limiters.held("inside", Allowance(1000, 1000, 1)):
            raise AssertionError
    clock.now += 3600
    with limiters.held("the last", ONCE):
        pass
    assert len(limiters) == 1


def test_limiters_that_are_never_idle_do_not_keep_those_behind_them_from_being_forgotten() -> None:
    clock = Seconds()
    limiters: KeyedLimiters[int] = KeyedLimiters(clock, max_limiters=200)
    hardly_ever = Allowance(1e-9, 1, 1)
    for key in range(100):
        with limiters.held(key, hardly_ever):
            pass
    for key in range(100, 1000):
        clock.now += 2
        with limiters.held(key, ONCE):
            pass
    assert len(limiters) == 200
    for key in range(100):
        with pytest.raises(ToolError), limiters.held(key, hardly_ever):
            raise AssertionError


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
    (tool,) = hub.fleet.nodes_of("acme")[0].tools.values()
    assert tool.allowance == allowance
    assert tool.allowance.burst == max(1, math.ceil(allowance.rate))


def test_all_verbs_of_a_capability_are_counted_together_and_no_other_capability(hub: Hub) -> None:
    hub.connect(hub.ca.issue(), capabilities=[ECHO, METRICS, {**ECHO, "cap_id": "echo2"}])
    (node,) = hub.fleet.nodes_of("acme")
    assert {tool.capability for tool in node.tools.values()} == {
        (NODE_ID, "echo"),
        (NODE_ID, "echo2"),
        (NODE_ID, "sysmetrics"),
    }
