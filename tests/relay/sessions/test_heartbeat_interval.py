"""The interval of heartbeats by the size of the fleet."""

import pytest

from relay.sessions.heartbeat_interval import heartbeat_interval_ms


@pytest.mark.parametrize(
    ("nodes", "seconds"),
    [(0, 60), (1, 60), (10_000, 60), (55_000, 180), (100_000, 300), (10_000_000, 300)],
)
def test_the_interval_grows_with_the_fleet(nodes: int, seconds: int) -> None:
    assert heartbeat_interval_ms(nodes) == seconds * 1000


def test_it_never_shrinks_as_the_fleet_grows_and_is_whole_seconds() -> None:
    intervals = [heartbeat_interval_ms(nodes) for nodes in range(0, 120_000, 997)]
    assert intervals == sorted(intervals)
    assert not any(interval % 1000 for interval in intervals)
