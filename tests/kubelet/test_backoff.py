import random

import pytest

from kubelet.backoff import FIRST_S, LONGEST_S, Backoff
from tests.fakes.chance import FixedChance

CEILINGS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]


def waits(backoff: Backoff, count: int, at_least_s: float = 0.0) -> list[float]:
    return [backoff.next_s(at_least_s) for _ in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_waits_are_drawn_below_a_ceiling_that_doubles_from_a_second_to_five_minutes(share: float) -> None:
    assert waits(Backoff(FixedChance(share)), len(CEILINGS)) == [share * ceiling for ceiling in CEILINGS]
    assert (CEILINGS[0], CEILINGS[-1]) == (FIRST_S, LONGEST_S)


def test_two_nodes_do_not_come_back_together() -> None:
    first, second = Backoff(random.Random(1)), Backoff(random.Random(2))  # noqa: S311 - jitter
    assert not set(waits(first, 20)) & set(waits(second, 20))


def test_success_starts_over() -> None:
    backoff = Backoff(FixedChance(1.0))
    waits(backoff, 5)
    backoff.reset()
    assert waits(backoff, 3) == [1, 2, 4]


@pytest.mark.parametrize(("share", "expected"), [(0.0, [60, 60, 60]), (1.0, [61, 61, 61])])
def test_what_was_asked_for_is_waited_in_full_and_jitter_comes_on_top(
    share: float, expected: list[float]
) -> None:
    assert waits(Backoff(FixedChance(share)), 3, at_least_s=60) == expected
