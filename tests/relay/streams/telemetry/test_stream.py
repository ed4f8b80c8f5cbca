import pytest

from relay.auth.agent_tokens import Principal
from relay.streams.telemetry.stream import Cadence, History, HistoryBytes, Subscription, lease_s
from tests.fakes.signer import TENANT


def filled(count: int, history: History) -> History:
    for ts_ms in range(1, count + 1):
        history.append(ts_ms, f"{ts_ms:010}")
    return history


def test_histories_share_their_bytes_and_each_keeps_its_latest_sample() -> None:
    in_all = HistoryBytes(limit=100)
    long, short = filled(10, History(in_all)), History(in_all)
    filled(3, short)
    assert [sample.ts_ms for sample in short.since(0, 0)] == [3]
    assert len(long.since(0, 0)) == 10
    long.append(11, "0" * 10)
    assert [sample.ts_ms for sample in long.since(0, 0)] == [3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert in_all.used == 100
    for history in (long, short):
        history.clear()
    assert in_all.used == 0


def test_what_is_gone_after_a_number_is_counted() -> None:
    history = filled(12, History(HistoryBytes(), max_samples=5))
    assert [history.lost_after(number) for number in (0, 3, 7, 12)] == [7, 4, 0, 0]
    history.clear()
    assert history.lost_after(10) == 2


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


def test_jitter_loses_no_sample() -> None:
    cadence = Cadence(1.0)
    arrivals = [second + (0.3 if second % 2 else -0.3) for second in range(1, 30)]
    assert all(cadence.takes(at, 1.0, 0.5) for at in arrivals)


def test_after_a_gap_the_cadence_is_the_same_as_before() -> None:
    cadence = Cadence(2.0)
    assert [cadence.takes(50.0 + second, 2.0, 0.5) for second in range(5)] == [True, True, False, True, False]
