"""What leaks is not flat; what is noise, warms up or shrinks is."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from tests.soak.slopes import CALLS_PER_S, LIMITS, MIB, SMALLEST_BYTES, Sample, slopes, theil_sen

HOUR_S, PERIOD_S = 3600, 5
RIGHT = [
    Sample(at_s, "relay", 60 * MIB + at_s * 7919 % MIB, 30 + at_s % 3, 8, 40 + at_s % 4)
    for at_s in range(0, HOUR_S, PERIOD_S)
]
MINUTE = [replace(sample, at_s=sample.at_s / 60) for sample in RIGHT]


def leaking(samples: Sequence[Sample], what: str, used: Callable[[float], float]) -> list[Sample]:
    """Return ``samples`` with what leaks added, by its time in seconds."""
    return [replace(sample, **{what: getattr(sample, what) + int(used(sample.at_s))}) for sample in samples]


def growing(samples: Sequence[Sample]) -> list[str]:
    return [slope.what for slope in slopes(samples) if not slope.is_flat]


@pytest.mark.parametrize("samples", [RIGHT, MINUTE], ids=["hour", "minute"])
def test_what_goes_up_and_down_is_flat(samples: list[Sample]) -> None:
    assert growing(samples) == []
    assert {slope.what for slope in slopes(samples)} == set(LIMITS)


@pytest.mark.parametrize("what", [what for what in LIMITS if what != "memory"])
def test_one_that_leaks_with_each_restart_of_the_broker_is_found(what: str) -> None:
    assert growing(leaking(RIGHT, what, lambda at_s: at_s / 15)) == [what]
    assert growing(leaking(MINUTE, what, lambda at_s: at_s / 15)) == [what]


def test_a_call_that_leaks_three_objects_is_found_in_an_hour() -> None:
    leak = leaking(RIGHT, "memory", lambda at_s: at_s * CALLS_PER_S * 3 * SMALLEST_BYTES)
    assert growing(leak) == ["memory"]


def test_a_call_that_leaks_eight_kibibytes_is_found_in_a_minute() -> None:
    leak = leaking(MINUTE, "memory", lambda at_s: at_s * CALLS_PER_S * 8192)
    assert growing(leak) == ["memory"]


@pytest.mark.parametrize(("mib_per_hour", "found"), [(0.7, ["memory"]), (0.5, ["memory"]), (0.3, [])])
def test_a_slow_leak_is_found_in_an_hour_and_a_half_and_in_no_shorter_run(
    mib_per_hour: float, found: list[str]
) -> None:
    long = [replace(sample, at_s=sample.at_s * 1.5) for sample in RIGHT]

    def leak(at_s: float) -> float:
        return mib_per_hour * MIB * at_s / HOUR_S

    assert growing(leaking(long, "memory", leak)) == found
    assert growing(leaking(RIGHT, "memory", leak)) == []


def test_a_heap_that_takes_its_shape_in_the_first_half_of_a_long_run_is_flat() -> None:
    long = [replace(sample, at_s=sample.at_s * 1.5) for sample in RIGHT]
    assert growing(leaking(long, "memory", lambda at_s: 2 * MIB * min(1.0, at_s / 2600))) == []


def test_what_is_used_once_at_the_beginning_or_given_back_is_flat() -> None:
    assert growing(leaking(RIGHT, "memory", lambda at_s: 50 * MIB * min(1.0, at_s / 240))) == []
    assert growing(leaking(RIGHT, "tasks", lambda at_s: 500 - at_s / 10)) == []


def test_samples_in_the_middle_of_a_reconnect_do_not_move_the_slope() -> None:
    assert growing(leaking(RIGHT, "tasks", lambda at_s: 500 * (at_s > 3000 and at_s % 50 == 0))) == []


def test_more_in_flight_is_flat_where_it_is_given_back_at_times() -> None:
    busy = leaking(RIGHT, "tasks", lambda at_s: 12 * (at_s > 1800 and at_s % 60 != 0))
    assert growing(busy) == []
    assert growing(leaking(busy, "tasks", lambda at_s: at_s / 900)) == ["tasks"]


def test_each_process_is_judged_by_itself() -> None:
    other = leaking([replace(sample, process="node-0") for sample in RIGHT], "tasks", lambda at_s: at_s)
    assert [(one.process, one.what) for one in slopes([*other, *RIGHT]) if not one.is_flat] == [
        ("node-0", "tasks")
    ]


def test_a_process_that_did_not_answer_is_not_flat_by_default() -> None:
    with pytest.raises(ValueError, match="too few samples of relay"):
        slopes(RIGHT[:1])
    with pytest.raises(ValueError, match="too few samples of node-0"):
        slopes(RIGHT, ["relay", "node-0"])


def test_the_slope_is_the_median_of_the_slopes_of_pairs() -> None:
    assert theil_sen([(0, 0), (1, 2), (2, 4), (3, 600), (4, 8), (5, 10)]) == 2
