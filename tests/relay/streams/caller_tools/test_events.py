import json

import pytest

from relay.streams.caller_tools.limits import Holder, SharedBudget
from relay.streams.caller_tools.session import EventBuffer, EventsFullError, EventType

SESSION = "gogol_20261122_021500_00c0ffee"
HOLDER = Holder(("https://relay.example", "acme", "ant"), "node")


def buffer(max_events: int = 3, max_bytes: int = 100_000) -> tuple[EventBuffer, SharedBudget]:
    budget = SharedBudget(max_bytes, 4 * max_bytes)
    return EventBuffer(SESSION, HOLDER, budget, max_events), budget


def say(events: EventBuffer, *messages: str) -> None:
    for message in messages:
        events.append(EventType.MESSAGE, {"message": message})


def ask(events: EventBuffer, request_id: str, size: int = 0) -> None:
    members = {"request_id": request_id, "tool": "t", "arguments": {"x": "y" * size}}
    events.append(EventType.REQUEST, members, request_id)


def test_an_event_has_its_type_its_session_and_the_next_cursor() -> None:
    events, _ = buffer()
    say(events, "a", "b")
    assert [json.loads(event.text) for event in events.after(0, 1 << 20)] == [
        {"type": "session_event", "session_id": SESSION, "cursor": 1, "message": "a"},
        {"type": "session_event", "session_id": SESSION, "cursor": 2, "message": "b"},
    ]
    assert [event.cursor for event in events.after(1, 1 << 20)] == [2]
    assert events.after(2, 1 << 20) == []
    assert events.newest == 2


def test_one_answer_holds_as_much_as_fits_and_one_event_at_least() -> None:
    events, _ = buffer()
    say(events, "a" * 100, "b" * 100, "c")
    size = len(events.after(0, 1)[0].text)
    assert [event.cursor for event in events.after(0, 1)] == [1]
    assert [event.cursor for event in events.after(0, 2 * size)] == [1, 2]
    assert [event.cursor for event in events.after(0, 1 << 20)] == [1, 2, 3]


def test_the_oldest_is_dropped_and_a_reader_that_was_behind_it_learns_of_that() -> None:
    events, _ = buffer(max_events=2)
    say(events, "a", "b")
    assert not events.has_missed(0)
    say(events, "c")
    assert [event.cursor for event in events.after(0, 1 << 20)] == [2, 3]
    assert events.has_missed(0)
    assert not events.has_missed(1)


def test_a_pending_request_is_never_dropped() -> None:
    events, _ = buffer(max_events=2)
    ask(events, "r1")
    say(events, "a", "b", "c")
    assert [event.cursor for event in events.after(0, 1 << 20)] == [1, 3, 4]
    events.discard("r1")
    assert [event.cursor for event in events.after(0, 1 << 20)] == [3, 4]
    events.discard("r1")


def test_a_request_that_does_not_fit_is_refused_and_takes_nothing() -> None:
    events, budget = buffer(max_bytes=600)
    ask(events, "r1", 200)
    used = budget.total
    with pytest.raises(EventsFullError):
        ask(events, "r2", 200)
    assert budget.total == used
    assert [event.request_id for event in events.after(0, 1 << 20)] == ["r1"]


def test_messages_make_space_for_a_request() -> None:
    events, budget = buffer(max_events=10, max_bytes=600)
    say(events, "a" * 100, "b" * 100)
    ask(events, "r1", 300)
    assert [event.request_id for event in events.after(0, 1 << 20)] == ["r1"]
    assert events.has_missed(0)
    assert budget.total == events.size


def test_a_message_that_does_not_fit_is_a_gap() -> None:
    events, _ = buffer(max_bytes=600)
    ask(events, "r1", 300)
    say(events, "a" * 300)
    assert [event.cursor for event in events.after(0, 1 << 20)] == [1]
    assert events.has_missed(1)
    assert not events.has_missed(2)
    say(events, "b")
    assert [event.cursor for event in events.after(2, 1 << 20)] == [3]
