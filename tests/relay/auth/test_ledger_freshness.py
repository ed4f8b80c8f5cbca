import pytest

from relay.auth.ledger_freshness import Freshness
from tests.fakes.seconds import Seconds


def test_nothing_is_fresh_before_every_source_was_read() -> None:
    freshness = Freshness(("a", "b"), Seconds())
    assert not freshness.is_fresh()
    freshness.read("a")
    assert not freshness.is_fresh()
    freshness.read("b")
    assert freshness.is_fresh()


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
