import pytest

from relay.remote_tools import RetryPolicy

POLICY = RetryPolicy(attempts=5, first_delay_s=0.1, longest_delay_s=1.0)


@pytest.mark.parametrize(
    ("attempt", "bound_s"), [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (1000, 1.0)]
)
def test_delays_are_chosen_from_zero_to_a_bound_that_doubles(attempt: int, bound_s: float) -> None:
    assert POLICY.delay_s(attempt, None, lambda: 0.0) == 0
    assert POLICY.delay_s(attempt, None, lambda: 0.5) == pytest.approx(bound_s / 2)


def test_the_servers_delay_is_a_minimum() -> None:
    assert POLICY.delay_s(1, 3000, lambda: 0.0) == 3
    assert POLICY.delay_s(1, 3000, lambda: 0.5) == pytest.approx(3.05)
