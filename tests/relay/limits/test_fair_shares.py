import random
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.limits.allowance import Allowance
from relay.limits.fair_shares import MAX_PRESENT, PRESENT_S, FairShares
from schemas.token_bucket import TokenBucket

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


STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 40)), max_size=80)


@given(STEPS, st.sampled_from([0.5, 1, 2, 10, 50]))
def test_all_together_never_get_more_than_the_bucket_has(steps: list[tuple[float, int]], rate: float) -> None:
    allowance = Allowance(rate, max(1, rate), 4)
    shared, now, served = Shared(allowance), 0.0, 0
    for after_s, who in steps:
        now += after_s
        served += shared.asks(str(who), now) == 0
        assert served <= allowance.burst + rate * now + 1e-3


@given(STEPS, st.sampled_from([0.5, 1, 2, 10, 50]))
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
