import pytest

from relay.state.kinds import watched_names
from relay.state.watcher import LIMIT_S, SHARED, Freshness
from tests.fakes.seconds import Seconds


@pytest.mark.parametrize("late", ["a", "b"])
def test_one_source_that_was_not_read_for_three_seconds_is_enough(late: str) -> None:
    seconds = Seconds()
    freshness = Freshness(("a", "b"), seconds)
    for source in ("a", "b"):
        freshness.read(source)
    seconds.now += 2.9
    freshness.read("b" if late == "a" else "a")
    assert freshness.is_fresh()
    seconds.now += 0.1
    assert not freshness.is_fresh()
    freshness.read(late)
    assert freshness.is_fresh()


def test_calls_are_not_ready_before_every_ledger_was_read_and_while_one_is_old() -> None:
    seconds = Seconds()
    sources = (*watched_names(), SHARED)
    freshness = Freshness(sources, seconds)
    for source in sources:
        assert freshness.health().ready is False
        freshness.read(source)
    assert freshness.health().ready is True
    seconds.now += LIMIT_S
    assert freshness.health().ready is False
