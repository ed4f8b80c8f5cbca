from dataclasses import replace

import pytest

from relay.streams.caller_tools.limits import MAX_TOKENS
from relay.streams.caller_tools.session import CallerSession, EventType, PendingRequest
from tests.fakes.caller_stage import CallerStage


@pytest.fixture
async def session(stage: CallerStage) -> CallerSession:
    await stage.open()
    (session,) = stage.hub.caller_sessions
    return session


def asked(session: CallerSession, number: int = 0) -> PendingRequest:
    request = PendingRequest(f"r{number}", "tool", "correlation", arrived=0.0)
    session.requests.add(request)
    session.push(EventType.REQUEST, {"request_id": request.request_id}, request.request_id)
    return request


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


async def test_a_caller_is_unreachable_from_when_its_last_way_has_ended(session: CallerSession) -> None:
    first, second = object(), object()
    session.open_stream(first)
    session.open_stream(second)
    session.close_stream(first, 10.0)
    assert session.unreachable_s(20.0) == 0
    session.close_stream(second, 20.0)
    assert session.unreachable_s(25.0) == 5
    with session.polled(lambda: 30.0):
        assert session.unreachable_s(28.0) == 0
    assert session.unreachable_s(31.0) == 1


async def test_a_stream_that_has_ended_loses_what_was_sent_on_it_alone(session: CallerSession) -> None:
    stream, other = object(), object()
    session.open_stream(stream)
    session.open_stream(other)
    requests = [asked(session, number) for number in range(4)]
    events = session.events.after(0, 1 << 20)
    for event in events[:3]:
        session.sent(event, stream)
    session.sent(events[1], other)
    requests[2].delivered = True
    assert session.close_stream(stream, 1.0) == requests[:1]
    assert session.close_stream(stream, 2.0) == []
    session.sent(events[3], stream)
    assert not requests[3].has_reached_caller


async def test_every_change_sets_what_was_taken_before(session: CallerSession) -> None:
    before = session.changed()
    session.push(EventType.MESSAGE, {"message": "Hello"})
    assert before.is_set()
    after = session.changed()
    assert not after.is_set()
    session.end()
    assert after.is_set()
