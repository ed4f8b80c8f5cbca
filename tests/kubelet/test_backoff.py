import random

import pytest

from kubelet.backoff import FIRST_S, LONGEST_S, NodeBackoff
from tests.fakes.chance import FixedChance

CEILINGS = [1, 2, 4, 8, 16, 30, 30]
BACK_WITHIN_S = 45


def waits(backoff: NodeBackoff, count: int, at_least_s: float = 0.0) -> list[float]:
    return [backoff.next_s(at_least_s) for _ in range(count)]


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_waits_are_drawn_below_a_ceiling_that_doubles_from_a_second_to_thirty_seconds(share: float) -> None:
    assert waits(NodeBackoff(FixedChance(share)), len(CEILINGS)) == [share * ceiling for ceiling in CEILINGS]
    assert (CEILINGS[0], CEILINGS[-1]) == (FIRST_S, LONGEST_S)


def test_two_nodes_do_not_come_back_together() -> None:
    first, second = NodeBackoff(random.Random(1)), NodeBackoff(random.Random(2))  # noqa: S311 - jitter
    assert not set(waits(first, 20)) & set(waits(second, 20))


def test_success_starts_over() -> None:
    backoff = NodeBackoff(FixedChance(1.0))
    waits(backoff, 5)
    backoff.reset()
    assert waits(backoff, 3) == [1, 2, 4]


@pytest.mark.parametrize(("share", "expected"), [(0.0, [60, 60, 60]), (1.0, [61, 61, 61])])
def test_what_was_asked_for_is_waited_in_full_and_jitter_comes_on_top(
    share: float, expected: list[float]
) -> None:
    assert waits(NodeBackoff(FixedChance(share)), 3, at_least_s=60) == expected


@pytest.mark.parametrize(
    ("asked_s", "share", "expected"),
    [(599, 1.0, 600), (600, 1.0, 600), (86_400, 0.0, 599), (86_400, 1.0, 600)],
)
def test_a_requested_wait_is_ten_minutes_at_most(asked_s: float, share: float, expected: float) -> None:
    assert NodeBackoff(FixedChance(share)).next_s(asked_s) == expected


def test_the_bounds_can_be_others() -> None:
    assert waits(NodeBackoff(FixedChance(1.0), first_s=5, longest_s=12), 4) == [5, 10, 12, 12]


@pytest.mark.parametrize("attempt_s", [0.0, 10.0], ids=["refused at once", "no answer at all"])
@pytest.mark.parametrize("away_s", [90, 120, 3600])
def test_fifty_nodes_are_back_within_45_seconds_of_the_relays_return(away_s: float, attempt_s: float) -> None:
    def back_at(number: int) -> float:
        """Return when node ``number`` first reaches a relay that goes away at 0 and returns at ``away_s``."""
        backoff = NodeBackoff(random.Random(number))  # noqa: S311 - jitter
        now = backoff.next_s()
        while now < away_s:
            now += attempt_s + backoff.next_s()
        return now

    returns = [back_at(number) for number in range(50)]
    assert max(returns) - away_s <= BACK_WITHIN_S
    # Spread over that time, and not in one moment.
    assert max(returns) - min(returns) > LONGEST_S / 2
