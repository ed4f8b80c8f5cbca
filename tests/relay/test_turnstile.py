from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.turnstile import BURST, LONGEST_WAIT_S, RATE_PER_S, Turnstile

NOW = 5000.0


def come(turnstile: Turnstile, count: int, now: float) -> list[float]:
    """Let ``count`` come in the same moment and return what each is told."""
    return [turnstile.enter(now) for _ in range(count)]


def test_the_first_burst_goes_through_and_the_rest_is_sent_away() -> None:
    waits = come(Turnstile(10, 5), 8, NOW)
    assert waits == pytest.approx([0, 0, 0, 0, 0, 0.1, 0.2, 0.3])


def test_by_default_the_burst_is_what_the_relay_bears_in_a_second() -> None:
    waits = come(Turnstile(), 201, NOW)
    assert (RATE_PER_S, BURST) == (200, 200)
    assert waits.count(0.0) == 200
    assert waits[-1] == pytest.approx(0.005)


def test_after_a_while_as_many_go_through_as_the_rate_says() -> None:
    turnstile = Turnstile(10, 5)
    come(turnstile, 5, NOW)
    assert come(turnstile, 4, NOW + 0.3).count(0.0) == 3


def test_no_more_than_the_burst_is_saved_up() -> None:
    turnstile = Turnstile(10, 5)
    assert come(turnstile, 9, NOW + 1_000_000).count(0.0) == 5


def test_every_appointment_is_another_one() -> None:
    waits = [wait for wait in come(Turnstile(10, 5), 500, NOW) if wait]
    appointments = sorted(NOW + wait for wait in waits)
    assert len(waits) == 495
    gaps = [later - earlier for earlier, later in pairwise(appointments)]
    assert gaps == pytest.approx([0.1] * 494)


def test_appointments_stay_different_for_those_who_come_later() -> None:
    turnstile = Turnstile(10, 5)
    come(turnstile, 5, NOW)
    first = [NOW + wait for wait in come(turnstile, 3, NOW)]
    second = [NOW + 0.05 + wait for wait in come(turnstile, 3, NOW + 0.05)]
    assert first + second == pytest.approx([NOW + 0.1 * number for number in range(1, 7)])


def test_appointments_of_the_past_keep_nobody_waiting() -> None:
    turnstile = Turnstile(10, 5)
    come(turnstile, 50, NOW)
    later = NOW + 100
    assert come(turnstile, 6, later) == [0.0] * 5 + [pytest.approx(0.1)]


def test_nobody_is_sent_away_for_more_than_a_minute() -> None:
    waits = come(Turnstile(10, 5), 5000, NOW)
    assert max(waits) == LONGEST_WAIT_S == 60
    assert waits.count(60) == 5000 - 5 - 599


def test_a_clock_that_goes_back_lets_nobody_in() -> None:
    turnstile = Turnstile(10, 5)
    come(turnstile, 5, NOW)
    assert turnstile.enter(NOW - 3600) > 0
    assert turnstile.enter(NOW - 3600 + 0.11) == 0


def drain(turnstile: Turnstile, crowd: int, now: float) -> tuple[list[float], int]:
    """Let a crowd come at once, and each again when told; return when each got in, and all attempts."""
    due = [now] * crowd
    entered: list[float] = []
    attempts = 0
    while due:
        due.sort()
        moment = due.pop(0)
        attempts += 1
        wait = turnstile.enter(moment)
        if wait:
            due.append(moment + wait)
        else:
            entered.append(moment)
    return entered, attempts


def test_a_crowd_that_returns_when_it_was_told_gets_in_at_the_rate_without_coming_often() -> None:
    rate, burst, crowd = 20.0, 20.0, 1000
    entered, attempts = drain(Turnstile(rate, burst), crowd, NOW)
    assert len(entered) == crowd
    assert entered[-1] - NOW <= crowd / rate + LONGEST_WAIT_S
    assert attempts <= 3 * crowd


def test_five_thousand_nodes_are_in_within_half_a_minute() -> None:
    entered, _ = drain(Turnstile(), 5000, NOW)
    assert entered[-1] - NOW <= 30


@settings(max_examples=50)
@given(st.floats(1, 100), st.lists(st.tuples(st.floats(0, 3), st.integers(1, 30)), min_size=1, max_size=30))
def test_never_more_than_burst_and_rate_get_in_and_every_wait_is_more_than_none(
    rate: float, steps: list[tuple[float, int]]
) -> None:
    turnstile, now, inside = Turnstile(rate, rate), NOW, 0
    for step, count in steps:
        now += step
        waits = come(turnstile, count, now)
        inside += waits.count(0.0)
        assert inside <= rate + rate * (now - NOW) + 1e-6
        assert all(0 <= wait <= LONGEST_WAIT_S for wait in waits)
