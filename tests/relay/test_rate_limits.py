import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.rate_limits import BUSY_RETRY_MS, Allowance, Gate, Gates
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


def refused(gate: Gate, now: float, cost: float = 1.0) -> int:
    """Return after how many milliseconds to come again."""
    with pytest.raises(ToolError) as caught:
        gate.enter(now, cost)
    assert caught.value.failure is Failure.RATE_LIMITED
    assert isinstance(caught.value.retry_after_ms, int)
    return caught.value.retry_after_ms


def passes(gate: Gate, now: float, cost: float = 1.0) -> bool:
    """Tell whether one gets through, there and back."""
    try:
        gate.enter(now, cost)
    except ToolError:
        return False
    gate.leave()
    return True


def through(gate: Gate, now: float) -> int:
    """Return how many pass one after the other until one is refused."""
    passed = 0
    while passes(gate, now):
        passed += 1
    return passed


# --- a gate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [1, 2, 10, 500])
def test_as_many_as_the_burst_pass_at_once(burst: int) -> None:
    assert through(Gate(Allowance(1, burst, 10_000), 0.0), 0.0) == burst


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
    gate = Gate(Allowance(rate, 1, 1), 0.0)
    assert passes(gate, 0.0)
    assert refused(gate, 0.0) == retry_ms
    if retry_ms > 1:
        assert not passes(gate, retry_ms * 0.99 / 1000)
    assert passes(gate, retry_ms / 1000)


@pytest.mark.parametrize("rate", [5e-324, 1e-300, 1e-9])
def test_a_rate_next_to_nothing_is_told_as_a_day(rate: float) -> None:
    gate = Gate(Allowance(rate, 1, 1), 0.0)
    assert passes(gate, 0.0)
    assert refused(gate, 0.0) == DAY_MS


def test_what_has_come_back_in_part_shortens_the_wait() -> None:
    gate = Gate(Allowance(2, 2, 9), 0.0)
    assert through(gate, 0.0) == 2
    assert refused(gate, 0.25) == 250
    assert refused(gate, 0.375) == 125
    assert through(gate, 0.5) == 1


def test_who_is_refused_uses_nothing_up() -> None:
    gate = Gate(Allowance(1, 1, 1), 0.0)
    assert passes(gate, 0.0)
    for tenth in range(10):
        assert not passes(gate, tenth / 10)
    assert passes(gate, 1.0)


def test_no_more_than_the_burst_is_saved_up() -> None:
    gate = Gate(Allowance(5, 5, 9), 0.0)
    assert through(gate, 0.0) == 5
    assert through(gate, 3600.0) == 5


def test_a_cost_is_taken_as_so_many() -> None:
    gate = Gate(Allowance(1, 10, 9), 0.0)
    assert passes(gate, 0.0, 7.5)
    assert refused(gate, 0.0, 5) == 2500
    assert passes(gate, 0.0, 2.5)
    assert refused(gate, 0.0) == 1000


def test_no_more_are_inside_than_may_be_at_a_time() -> None:
    gate = Gate(Allowance(100, 100, 2), 0.0)
    gate.enter(0.0)
    gate.enter(0.0)
    assert refused(gate, 0.0) == BUSY_RETRY_MS
    gate.leave()
    assert passes(gate, 0.0)
    gate.enter(0.0)
    assert refused(gate, 0.0) == BUSY_RETRY_MS


def test_who_is_refused_for_want_of_room_has_not_used_up_the_rate() -> None:
    gate = Gate(Allowance(1, 2, 1), 0.0)
    gate.enter(0.0)
    for _ in range(5):
        assert refused(gate, 0.0) == BUSY_RETRY_MS
    gate.leave()
    assert passes(gate, 0.0)


def test_a_clock_that_goes_back_fills_nothing_and_stops_nothing() -> None:
    gate = Gate(Allowance(1, 3, 9), 100.0)
    assert through(gate, 100.0) == 3
    assert not passes(gate, 40.0)
    assert refused(gate, 40.0) == 1000
    assert passes(gate, 41.0)


# --- another allowance --------------------------------------------------------------------------------


def test_a_larger_allowance_fills_up_from_now_on() -> None:
    gate = Gate(Allowance(1, 1, 1), 0.0)
    assert passes(gate, 0.0)
    gate.change(Allowance(10, 10, 4))
    assert not passes(gate, 0.0)
    assert refused(gate, 0.0) == 100
    assert through(gate, 3600.0) == 10


def test_a_smaller_allowance_takes_away_what_was_saved_up() -> None:
    gate = Gate(Allowance(10, 10, 4), 0.0)
    gate.change(Allowance(1, 2, 4))
    assert through(gate, 0.0) == 2


def test_going_back_and_forth_between_allowances_gives_nothing_back() -> None:
    small, large = Allowance(1, 1, 1), Allowance(10, 10, 1)
    gate = Gate(large, 0.0)
    passed = 0
    for _ in range(20):
        gate.change(small)
        passed += passes(gate, 0.0)
        gate.change(large)
        passed += passes(gate, 0.0)
    assert passed == 1


def test_fewer_at_a_time_holds_for_those_who_come_and_throws_nobody_out() -> None:
    gate = Gate(Allowance(100, 100, 3), 0.0)
    for _ in range(3):
        gate.enter(0.0)
    gate.change(Allowance(100, 100, 1))
    gate.leave()
    gate.leave()
    assert refused(gate, 0.0) == BUSY_RETRY_MS
    gate.leave()
    assert passes(gate, 0.0)


# --- when a gate may be forgotten ---------------------------------------------------------------------


def test_a_gate_is_idle_when_nobody_is_inside_and_nothing_is_used_up() -> None:
    gate = Gate(Allowance(1, 2, 1), 0.0)
    assert gate.is_idle(0.0)
    gate.enter(0.0)
    assert not gate.is_idle(3600.0)
    gate.leave()
    assert gate.is_idle(3600.0)
    assert passes(gate, 3600.0)
    assert not gate.is_idle(3600.5)
    assert gate.is_idle(3601.0)


# --- what never happens -------------------------------------------------------------------------------

RATES = st.floats(0.01, 1000)
STEPS = st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 50)), max_size=40)


@given(RATES, STEPS)
def test_never_more_than_the_burst_and_the_rate_pass(rate: float, steps: list[tuple[float, int]]) -> None:
    burst = max(1.0, rate)
    gate = Gate(Allowance(rate, burst, 1), 0.0)
    now = forward = 0.0
    passed = 0
    for step, attempts in steps:
        now += step
        forward += max(0.0, step)  # a clock that goes back gives nothing
        passed += sum(passes(gate, now) for _ in range(attempts))
        assert passed <= burst + rate * forward + 1e-3


@given(RATES, st.integers(1, 200))
def test_what_comes_as_it_is_told_is_never_sent_away_twice(rate: float, calls: int) -> None:
    gate = Gate(Allowance(rate, max(1.0, rate), 1), 0.0)
    now = 0.0
    for _ in range(calls):
        if not passes(gate, now):
            now += refused(gate, now) / 1000
            assert passes(gate, now)


@given(st.integers(1, 5), st.lists(st.booleans(), max_size=100))
def test_never_more_than_may_are_inside(concurrency: int, moves: list[bool]) -> None:
    gate = Gate(Allowance(1e6, 1e6, concurrency), 0.0)
    inside = 0
    for comes in moves:
        if not comes and inside:
            gate.leave()
            inside -= 1
        elif comes:
            try:
                gate.enter(0.0)
                inside += 1
            except ToolError:
                assert inside == concurrency
        assert 0 <= inside <= concurrency


# --- a gate for each ----------------------------------------------------------------------------------

ONCE = Allowance(1, 1, 1)


def test_each_key_has_a_gate_of_its_own() -> None:
    gates: Gates[str] = Gates(Seconds())
    with gates.passed("one", ONCE):
        with pytest.raises(ToolError), gates.passed("one", ONCE):
            raise AssertionError
        with gates.passed("another", ONCE):
            pass


def test_a_gate_is_left_however_the_block_ends() -> None:
    clock = Seconds()
    gates: Gates[str] = Gates(clock)
    allowance = Allowance(1000, 1000, 1)
    for error in (RuntimeError, KeyboardInterrupt, GeneratorExit):
        with pytest.raises(error), gates.passed("one", allowance):
            raise error
    with gates.passed("one", allowance):
        pass


def test_of_a_key_the_newest_allowance_counts() -> None:
    gates: Gates[str] = Gates(Seconds())
    with gates.passed("one", Allowance(1, 5, 1)):
        pass
    with pytest.raises(ToolError) as caught, gates.passed("one", Allowance(0.25, 1, 1), 2):
        raise AssertionError
    assert caught.value.retry_after_ms == 4000


def test_idle_gates_are_forgotten_when_there_are_many_the_longest_unused_first() -> None:
    clock = Seconds()
    gates: Gates[int] = Gates(clock, max_gates=3)
    for key in (1, 2, 3):
        with gates.passed(key, ONCE):
            pass
    clock.now += 1
    with gates.passed(1, ONCE):
        pass
    with gates.passed(4, ONCE):  # 2 goes, not 1
        pass
    assert len(gates) == 3
    with pytest.raises(ToolError), gates.passed(1, ONCE):
        raise AssertionError


def test_a_gate_that_is_not_idle_is_never_forgotten() -> None:
    clock = Seconds()
    gates: Gates[str] = Gates(clock, max_gates=1)
    with gates.passed("used up", ONCE):
        pass
    for number in range(5):
        with gates.passed(f"other {number}", ONCE):
            pass
    with pytest.raises(ToolError), gates.passed("used up", ONCE):
        raise AssertionError
    clock.now += 1
    with gates.passed("inside", Allowance(1000, 1000, 1)):
        clock.now += 3600
        with gates.passed("another", ONCE):
            pass
        with pytest.raises(ToolError), gates.passed("inside", Allowance(1000, 1000, 1)):
            raise AssertionError
    clock.now += 3600
    with gates.passed("the last", ONCE):
        pass
    assert len(gates) == 1


def test_gates_that_are_never_idle_do_not_keep_those_behind_them_from_being_forgotten() -> None:
    clock = Seconds()
    gates: Gates[int] = Gates(clock, max_gates=200)
    hardly_ever = Allowance(1e-9, 1, 1)
    for key in range(100):
        with gates.passed(key, hardly_ever):
            pass
    for key in range(100, 1000):
        clock.now += 2
        with gates.passed(key, ONCE):
            pass
    assert len(gates) == 200
    for key in range(100):
        with pytest.raises(ToolError), gates.passed(key, hardly_ever):
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
