import asyncio
import gc
import json
import weakref
from typing import Any

import pytest

from relay.streams.caller_tools.event_streams import EventStreams
from relay.streams.caller_tools.session import GRACE_S, CallerSession
from schemas.frames import OneWayType
from tests.fakes.caller_stage import SCOPE, CallerStage, request_id
from tests.fakes.polling import until

BOUND_S = 30


class Client:
    """The event stream of one MCP session.

    Attributes:
        wants: whether it takes log messages.
        takes: set while it reads.
    """

    def __init__(self) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.wants = True
        self.takes = asyncio.Event()
        self.takes.set()

    async def send(self, event: str) -> bool:
        await self.takes.wait()
        if self.wants:
            self.sent.put_nowait(json.loads(event))
        return self.wants

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.sent.get(), BOUND_S)


class Stage:
    """One session whose caller has an event stream."""

    def __init__(self, stage: CallerStage, session_id: str) -> None:
        self.stage = stage
        self.session_id = session_id
        self.client = Client()
        self.principal = stage.hub.authenticator.identify(stage.token)

    @property
    def streams(self) -> EventStreams:
        return self.stage.hub.event_streams

    @property
    def session(self) -> CallerSession:
        (session,) = self.stage.hub.caller_sessions
        return session

    async def use(self, stream_id: str = "M1", token: str | None = None) -> None:
        """Use the session in the MCP session of that id."""
        members: dict[str, Any] = {"session_id": self.session_id, "wait_ms": 0, "after": 1 << 40}
        await self.stage.call("session_events", token, stream_id=stream_id, **members)

    async def followed(self) -> None:
        self.streams.attach("M1", self.client.send)
        self.streams.opened("M1", self.principal)
        await self.use()


@pytest.fixture
async def own(stage: CallerStage) -> Stage:
    return Stage(stage, await stage.open())


async def test_events_are_sent_on_the_stream_of_the_mcp_session_that_uses_the_session(own: Stage) -> None:
    own.stage.request(own.session_id)
    await own.followed()
    assert (await own.client.next())["request_id"] == request_id()
    own.stage.send(OneWayType.SESSION_EVENT, own.session_id, message="Hello")
    assert (await own.client.next())["message"] == "Hello"


async def test_a_stream_that_is_opened_after_the_session_was_used_gets_what_there_is(own: Stage) -> None:
    own.streams.attach("M1", own.client.send)
    await own.use()
    own.stage.request(own.session_id)
    own.streams.opened("M1", own.principal)
    assert (await own.client.next())["request_id"] == request_id()


async def test_a_stream_that_is_never_opened_keeps_no_session_that_has_ended(own: Stage) -> None:
    own.streams.attach("M1", own.client.send)
    await own.use()
    session = weakref.ref(own.session)
    await own.stage.call("session_message", session_id=own.session_id, end=True)
    gc.collect()
    assert session() is None


async def test_a_stream_that_is_opened_again_continues(own: Stage) -> None:
    await own.followed()
    own.stage.send(OneWayType.SESSION_EVENT, own.session_id, message="a")
    await own.client.next()
    own.streams.closed("M1")
    own.stage.send(OneWayType.SESSION_EVENT, own.session_id, message="b")
    own.streams.opened("M1", own.principal)
    assert (await own.client.next())["message"] == "b"
    assert own.client.sent.empty()


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
@pytest.mark.parametrize("end", ["closed", "detach"])
@pytest.mark.parametrize("is_read_too", [False, True])
async def test_a_caller_whose_stream_or_mcp_session_ends_is_gone_at_once_whatever_it_has_read(
    own: Stage, end: str, *, is_read_too: bool
) -> None:
    await own.followed()
    own.stage.request(own.session_id)
    await own.client.next()
    if is_read_too:
        await own.stage.events(own.session_id)
    getattr(own.streams, end)("M1")
    own.stage.request(own.session_id, 1)
    gone = "caller_disconnected"
    assert own.stage.results() == {request_id(): gone, request_id(1): gone}
    own.stage.later(GRACE_S)
    assert ("session_end", {"session_id": own.session_id, "reason": "ended"}) in own.stage.sent()


async def test_a_caller_without_an_event_stream_is_gone_with_its_mcp_session(own: Stage) -> None:
    own.streams.attach("M1", own.client.send)
    await own.use()
    own.stage.request(own.session_id)
    await own.stage.events(own.session_id)
    own.streams.detach("M1")
    assert own.stage.results() == {request_id(): "caller_disconnected"}


async def test_a_caller_with_another_mcp_session_or_with_an_open_poll_is_not_gone(own: Stage) -> None:
    for stream_id in ("M1", "M2"):
        own.streams.attach(stream_id, own.client.send)
        await own.use(stream_id)
    own.stage.request(own.session_id)
    await own.stage.events(own.session_id)
    own.streams.detach("M1")
    call = own.stage.call("session_events", session_id=own.session_id, after=1, wait_ms=60_000)
    polling = asyncio.create_task(call)
    await until(lambda: own.session.polls == 1)
    own.streams.detach("M2")
    own.stage.later(GRACE_S)
    assert own.stage.results() == {}
    polling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await polling
    assert own.stage.results() == {request_id(): "caller_disconnected"}


async def test_a_stream_that_is_opened_again_within_the_grace_keeps_the_session(own: Stage) -> None:
    await own.followed()
    own.streams.closed("M1")
    own.stage.later(GRACE_S - 0.1)
    own.streams.opened("M1", own.principal)
    own.stage.later(10)
    own.stage.request(own.session_id)
    assert (await own.client.next())["request_id"] == request_id()
    assert own.stage.results() == {}


async def test_what_was_sent_on_two_streams_ends_with_the_last(own: Stage) -> None:
    await own.followed()
    other = Client()
    own.streams.attach("M2", other.send)
    own.streams.opened("M2", own.principal)
    await own.use("M2")
    own.stage.request(own.session_id)
    await own.client.next()
    await other.next()
    own.streams.closed("M1")
    assert own.stage.results() == {}
    own.streams.closed("M2")
    assert own.stage.results() == {request_id(): "caller_disconnected"}


async def test_a_client_that_wants_no_log_messages_is_not_reached_by_them(own: Stage) -> None:
    own.client.wants = False
    await own.followed()
    own.stage.request(own.session_id)
    await until(lambda: own.session.events.newest == 1)
    await own.use()
    assert not any(request.has_reached_caller for request in own.session.requests)


async def test_a_client_that_does_not_read_holds_up_no_one(own: Stage) -> None:
    own.client.takes.clear()
    await own.followed()
    for number in range(3):
        own.stage.request(own.session_id, number)
    assert len(await own.stage.events(own.session_id)) == 3
    own.client.takes.set()
    assert (await own.client.next())["request_id"] == request_id()


@pytest.mark.holds("CALLER-TOOLS/security/only-the-caller")
async def test_the_stream_of_another_principal_gets_nothing(own: Stage) -> None:
    hub = own.stage.hub
    other = hub.authenticator.identify(hub.token([SCOPE], sub="agent-2"))
    own.streams.attach("M1", own.client.send)
    own.streams.opened("M1", other)
    await own.use()
    own.stage.request(own.session_id)
    assert own.session.unreachable_s(hub.seconds.now + 1) == 1
    own.streams.closed("M1")
    own.streams.opened("M1", own.principal)
    await own.use()
    assert (await own.client.next())["request_id"] == request_id()
    own.streams.closed("M1")
    own.streams.opened("M1", other)
    own.stage.request(own.session_id, 1)
    await own.use("M1")
    assert own.session.unreachable_s(hub.seconds.now + 1) == 1
    assert own.client.sent.empty()


async def test_a_stream_ends_with_its_token(own: Stage) -> None:
    await own.followed()
    own.stage.hub.authenticator.revoke(frozenset({own.principal.jti}))
    own.stage.request(own.session_id)
    await until(lambda: own.session.unreachable_s(own.stage.hub.seconds.now + 1) == 1)
    assert own.client.sent.empty()
    # And goes on by the next one of the same caller.
    own.streams.renewed("M1", own.stage.hub.authenticator.identify(own.stage.hub.token([SCOPE])))
    assert (await own.client.next())["request_id"] == request_id()


async def test_a_session_that_ends_is_sent_to_the_end(own: Stage) -> None:
    await own.followed()
    await own.stage.result("session_message", session_id=own.session_id, end=True)
    assert (await own.client.next())["type"] == "session_ended"
    own.streams.closed("M1")
    own.streams.opened("M1", own.principal)
    own.streams.detach("M1")
    own.streams.detach("M1")
    own.streams.closed("M1")


async def test_a_bug_in_sending_is_logged_and_ends_one_stream(own: Stage) -> None:
    async def fails(_event: str) -> bool:
        raise ZeroDivisionError

    own.streams.attach("M2", fails)
    own.streams.opened("M2", own.principal)
    await own.use("M2")
    await own.followed()
    own.stage.request(own.session_id)
    assert (await own.client.next())["request_id"] == request_id()
    await own.stage.hub.lines.until("events not sent")
