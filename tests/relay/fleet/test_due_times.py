"""A queue of names by the time at which each is due."""

from hypothesis import given
from hypothesis import strategies as st

from relay.fleet.node_index import DueTimes


def test_names_come_due_by_time_and_once() -> None:
    due = DueTimes()
    for name, at_ms in (("c", 30), ("a", 10), ("b", 20)):
        due.no_later_than(name, at_ms)
    assert list(due.take(9)) == []
    assert list(due.take(20)) == ["a", "b"]
    assert list(due.take(20)) == []
    assert list(due.take(1000)) == ["c"]


def test_an_earlier_time_replaces_a_later_one_and_a_later_one_changes_nothing() -> None:
    due = DueTimes()
    due.no_later_than("a", 20)
    due.no_later_than("a", 10)
    due.no_later_than("a", 30)
    assert list(due.take(10)) == ["a"]
    assert list(due.take(1000)) == []


def test_a_time_that_moves_later_adds_nothing_to_the_queue() -> None:
    due = DueTimes()
    for at_ms in range(1000):
        due.no_later_than("a", at_ms)
    assert len(due) == 1


def test_times_that_move_earlier_again_and_again_do_not_fill_the_queue() -> None:
    due = DueTimes()
    names = [f"node {number}" for number in range(10)]
    for at_ms in range(10_000, 0, -1):
        due.no_later_than(names[at_ms % 10], at_ms)
    assert len(due) <= 2 * len(names) + 64
    assert sorted(due.take(10)) == sorted(names)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 50), st.booleans()), max_size=200))
def test_a_name_is_due_at_the_earliest_time_that_was_asked_for(steps: list[tuple[str, int, bool]]) -> None:
    due, model = DueTimes(), dict[str, int]()
    for name, at_ms, takes in steps:
        if takes:
            ready = sorted((due_ms, each) for each, due_ms in model.items() if due_ms <= at_ms)
            assert list(due.take(at_ms)) == [each for _, each in ready]
            model = {each: due_ms for each, due_ms in model.items() if due_ms > at_ms}
        else:
            due.no_later_than(name, at_ms)
            model[name] = min(at_ms, model.get(name, at_ms))
