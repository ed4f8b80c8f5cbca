from dataclasses import replace

import pytest

from relay.streams.caller_tools.session import (
    MAX_TOKENS,
    CallerSession,
    EventBuffer,
    EventsFullError,
    EventType,
    Full,
    Holder,
    PendingRequest,
    SessionRequests,
    SharedBudget,
)
from schemas.payloads import CallerToolResult
from tests.fakes.caller_stage import CallerStage

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


KIB = 1024


def request(number: int) -> PendingRequest:
    return PendingRequest(f"r{number}", "tool", "correlation", arrived=0.0)


def ended(count: int, size: int) -> SessionRequests:
    requests = SessionRequests()
    for number in range(count):
        requests.add(request(number))
        payload: CallerToolResult = {"session_id": "s", "request_id": f"r{number}", "result": number}
        requests.end(f"r{number}", payload, size, float(number))
    return requests


def test_answers_are_kept_in_order_until_they_are_old() -> None:
    requests = ended(3, 10)
    assert [answer["result"] for answer in requests.kept_answers()] == [0, 1, 2]
    requests.forget_before(2.0)
    assert not requests.is_known("r1")
    assert [answer["result"] for answer in requests.kept_answers()] == [2]


def test_the_oldest_answers_make_space_for_newer_ones_and_stay_known() -> None:
    requests = ended(3, 200 * KIB)
    assert [answer["result"] for answer in requests.kept_answers()] == [1, 2]
    assert requests.is_known("r0")


def test_a_bounded_number_is_known() -> None:
    requests = ended(300, 10)
    assert not requests.is_known("r43")
    assert requests.is_known("r44")


def test_a_bounded_number_of_requests_that_a_node_withdraws_is_known() -> None:
    requests = SessionRequests()
    for number in range(300):
        requests.add(request(number))
        requests.withdraw(f"r{number}")
    assert not requests.is_known("r43")
    assert requests.is_known("r44")


@pytest.fixture
async def session(stage: CallerStage) -> CallerSession:
    await stage.open()
    (session,) = stage.hub.caller_sessions
    return session


async def test_of_many_tokens_those_that_expire_last_are_noted(
    stage: CallerStage, session: CallerSession
) -> None:
    principal = stage.hub.authenticator.identify(stage.token)
    for number in range(MAX_TOKENS + 2):
        expires_s = principal.expires_s + 1 + number
        session.use(replace(principal, jti=f"jti-{number}", expires_s=expires_s), now=5.0)
    assert len(session.tokens) == MAX_TOKENS
    assert principal.jti not in session.tokens
    assert f"jti-{MAX_TOKENS + 1}" in session.tokens
    assert session.last_used == 5.0


def holder(sub: str = "ant", tenant: str = "acme", node: str = "a") -> Holder:
    return Holder(("https://relay.example", tenant, sub), node)


def filled(budget: SharedBudget, sub: str, tenant: str = "acme") -> tuple[int, Full]:
    """Take all that the principal can have, one byte after another; return how much, and what ended it."""
    taken = 0
    while (full := budget.take(holder(sub, tenant, f"{tenant}-{sub}"), 1)) is None:
        taken += 1
    return taken, full


def test_a_node_cannot_take_what_is_for_all() -> None:
    budget = SharedBudget(per_node=10, in_all=1000)
    assert budget.take(holder(), 10) is None
    assert budget.take(holder("bee"), 1) is Full.NODE
    assert budget.take(holder(node="b"), 1) is None
    assert budget.total == 11


def test_who_comes_later_finds_room_whatever_one_principal_has_taken() -> None:
    budget = SharedBudget(per_node=1000, in_all=1000)
    alone, full = filled(budget, "ant")
    assert (alone, full) == (250, Full.PRINCIPAL)
    second, full = filled(budget, "bee")
    assert (second, full) == (125, Full.PRINCIPAL)
    other, full = filled(budget, "ant", "globex")
    assert other > second
    assert full is Full.PRINCIPAL
    # Whole tenants: what one has taken with all its principals leaves more than that to the next.
    for number in range(50):
        filled(budget, f"bee-{number}")
    assert budget.take(holder("last"), 100) is Full.TENANT
    assert filled(budget, "ant", "initech")[0] > 50


def test_what_is_given_back_can_be_taken_again() -> None:
    budget = SharedBudget(per_node=10, in_all=40)
    assert budget.take(holder(), 10) is None
    budget.give_back(holder(), 4)
    assert budget.take(holder(), 5) is Full.NODE
    assert budget.take(holder(), 4) is None
    budget.give_back(holder(), 10)
    assert budget.total == 0
    assert budget.take(holder("bee"), 10) is None
