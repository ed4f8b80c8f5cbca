import pytest

from relay.auth.agent_tokens import Principal
from relay.streams.telemetry.stream import Subscription, lease_s
from tests.fakes.signer import TENANT

AGENT = Principal(TENANT, "agent", "jti", "https://relay.example", frozenset(), 0, "kid", b"")


def begun(interval_ms: int) -> Subscription:
    subscription = Subscription(AGENT, interval_ms, None, lambda _: None, lambda _: None, 0)
    subscription.begin(100.0)
    return subscription


@pytest.mark.parametrize(("interval_s", "lasts_s"), [(1, 30), (10, 30), (11, 33), (60, 180)])
def test_a_lease_is_three_intervals_and_at_least_thirty_seconds(interval_s: float, lasts_s: float) -> None:
    assert lease_s(interval_s) == lasts_s
    subscription = begun(int(interval_s * 1000))
    assert subscription.expires_s == 100 + lasts_s
    subscription.renew(110.0)
    assert subscription.expires_s == 110 + lasts_s


@pytest.mark.parametrize(
    ("interval_ms", "expected"),
    [(1000, 60), (2000, 30), (2500, 24), (5000, 12), (60_000, 1)],
)
def test_each_subscriber_takes_the_samples_of_its_own_cadence(interval_ms: int, expected: int) -> None:
    subscription = begun(interval_ms)
    taken = [second for second in range(1, 61) if subscription.takes(100.0 + second, 1.0)]
    assert len(taken) == expected


def test_jitter_loses_no_sample() -> None:
    subscription = begun(1000)
    arrivals = [second + (0.3 if second % 2 else -0.3) for second in range(1, 30)]
    assert all(subscription.takes(100.0 + at, 1.0) for at in arrivals)


def test_after_a_gap_the_cadence_is_the_same_as_before() -> None:
    subscription = begun(2000)
    assert subscription.takes(150.0, 1.0)
    assert [subscription.takes(150.0 + second, 1.0) for second in (1, 2, 3, 4)] == [True, False, True, False]
