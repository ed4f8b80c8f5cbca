"""Sessions of callers in a fleet of two relays: opened at one, with a node of the other, used at either."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relay.streams.caller_tools.session import GRACE_S
from schemas.frames import OneWayType
from schemas.registry import SchemaRegistry
from tests.fakes.caller_stage import SCOPE, TOOLS, CallerStage, ResponseStream, answer_to, request_id
from tests.fakes.cluster import JoinedHub
from tests.fakes.cluster_server import NatsServer
from tests.fakes.polling import until
from tests.fakes.signer import SimulatedCa

pytestmark = pytest.mark.integration

STREAMED: Mapping[str, Any] = {"io.modelcontextprotocol/logLevel": "info"}


@dataclass
class Fleet:
    """Sessions are opened at the relay ``near``, one of them is ``session``; ``far`` has the node."""

    near: CallerStage
    far: CallerStage
    stack: AsyncExitStack
    session: str = ""

    async def until_sent(self, type_: str) -> Mapping[str, Any]:
        """Return the payload of the next frame to the node, which is of that type."""
        sent, payload = await self.far.next_sent()
        assert sent == type_
        return payload


@pytest.fixture
async def fleet(nats: NatsServer, tmp_path: Path, registry: SchemaRegistry) -> AsyncIterator[Fleet]:
    ca = SimulatedCa()
    async with AsyncExitStack() as stack, AsyncExitStack() as near_stack:
        far = await stack.enter_async_context(JoinedHub.joined(nats.config, tmp_path / "far", registry, ca))
        near = await near_stack.enter_async_context(
            JoinedHub.joined(nats.config, tmp_path / "near", registry, ca)
        )
        stage = CallerStage(far, far.ulids.new())
        asking = CallerStage(near, None, stage.node)
        await until(lambda: near.part.presence.nodes_elsewhere() == 1)
        found = Fleet(asking, stage, near_stack)
        found.session = await asking.open()
        assert (await found.until_sent("session_open"))["tools"] == list(TOOLS)
        yield found


async def test_a_request_of_a_node_elsewhere_is_read_and_answered_at_any_relay(fleet: Fleet) -> None:
    fleet.far.request(fleet.session, about="bread")
    read = await fleet.far.result("session_events", session_id=fleet.session)
    (event,) = read["events"]
    assert event["arguments"] == {"about": "bread"}
    assert (await fleet.near.events(fleet.session)) == [event]
    answer = answer_to(fleet.session, result={"found": 2})
    answered = await fleet.far.result("caller_tool_response", **answer)
    assert answered == {"session_id": fleet.session, "request_id": request_id(), "accepted": True}
    assert (await fleet.until_sent("caller_tool_result"))["result"] == {"found": 2}
    error = await fleet.far.error("caller_tool_response", **answer | {"result": {"found": 3}})
    assert error["code"] == "E_MANIFEST_INVALID"  # once


async def test_a_message_and_the_end_go_by_way_of_any_relay(fleet: Fleet) -> None:
    await fleet.far.result("session_message", session_id=fleet.session, message="hello")
    assert (await fleet.until_sent("session_message"))["message"] == "hello"
    ended = await fleet.far.result("session_message", session_id=fleet.session, end=True)
    assert ended["ended"]
    assert (await fleet.until_sent("session_end"))["reason"] == "ended"
    error = await fleet.far.error("session_events", session_id=fleet.session)
    assert error["code"] == "E_SAFETY_DENIED"


async def test_a_long_poll_at_another_relay_wakes_up_and_ends_with_its_call(fleet: Fleet) -> None:
    (session,) = fleet.near.hub.caller_sessions

    def is_polled() -> bool:
        return session.unreachable_s(fleet.near.hub.seconds.now + 1) == 0

    waiting = asyncio.create_task(fleet.far.events(fleet.session, wait_ms=60_000))
    await until(is_polled)
    fleet.far.send(OneWayType.SESSION_EVENT, fleet.session, message="It rains.")
    (event,) = await waiting
    assert event["message"] == "It rains."
    waiting = asyncio.create_task(fleet.far.events(fleet.session, after=1, wait_ms=60_000))
    await until(is_polled)
    waiting.cancel()
    await until(lambda: not is_polled())


async def test_events_are_streamed_by_way_of_another_relay_until_their_reader_leaves(fleet: Fleet) -> None:
    stream = ResponseStream()
    members: dict[str, Any] = {"session_id": fleet.session, "wait_ms": 60_000, "stream": True}
    streamed = fleet.far.call("session_events", emit=stream.emit, meta=STREAMED, **members)
    call = asyncio.create_task(streamed)
    for number in range(3):
        fleet.far.request(fleet.session, number)
        assert (await stream.next())["request_id"] == request_id(number)
    (session,) = fleet.near.hub.caller_sessions
    await until(lambda: all(request.has_reached_caller for request in session.requests))
    call.cancel()
    codes = {(await fleet.until_sent("caller_tool_result"))["error"]["code"] for _ in range(3)}
    assert codes == {"caller_disconnected"}


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
async def test_a_caller_that_closes_its_poll_at_another_relay_for_good_is_gone(fleet: Fleet) -> None:
    (session,) = fleet.near.hub.caller_sessions

    async def closes_a_poll() -> None:
        waiting = asyncio.create_task(fleet.far.events(fleet.session, after=1, wait_ms=60_000))
        await until(lambda: session.polls == 1)
        waiting.cancel()
        await until(lambda: session.is_abandoned(fleet.near.hub.seconds.now + GRACE_S))

    fleet.far.request(fleet.session)
    await fleet.far.result("session_events", session_id=fleet.session, wait_ms=10_000)
    await closes_a_poll()
    assert not session.is_abandoned(fleet.near.hub.seconds.now)
    await fleet.far.events(fleet.session, after=1)  # a request at any relay shows that it is there
    assert not session.is_abandoned(fleet.near.hub.seconds.now + GRACE_S)
    await fleet.near.events(fleet.session, after=1)
    await closes_a_poll()
    fleet.near.later(GRACE_S)
    assert (await fleet.until_sent("caller_tool_result"))["error"]["code"] == "caller_disconnected"
    assert (await fleet.until_sent("session_end"))["session_id"] == fleet.session


async def test_a_poll_that_the_other_relay_ends_is_not_closed_by_its_caller(fleet: Fleet) -> None:
    (session,) = fleet.near.hub.caller_sessions
    polling = asyncio.create_task(fleet.far.call("session_events", session_id=fleet.session, wait_ms=60_000))
    await until(lambda: session.polls == 1)
    await fleet.far.hub.executor.drain(0)
    _, error = await polling
    assert error is not None
    await until(lambda: session.polls == 0)
    assert not session.is_abandoned(fleet.near.hub.seconds.now + GRACE_S)


async def test_an_mcp_session_that_ends_at_another_relay_ends_the_way_of_its_caller(fleet: Fleet) -> None:
    async def send(_event: str) -> bool:
        return True

    streams = fleet.far.hub.event_streams
    streams.attach("M1", send)
    fleet.far.request(fleet.session)
    await fleet.far.call("session_events", session_id=fleet.session, wait_ms=10_000, stream_id="M1")
    streams.detach("M1")
    assert (await fleet.until_sent("caller_tool_result"))["error"]["code"] == "caller_disconnected"


async def test_at_another_relay_too_a_session_is_unknown_to_others(fleet: Fleet) -> None:
    other = fleet.far.hub.token([SCOPE], sub="agent-2")
    unknown = await fleet.far.error("session_events", other, session_id=fleet.session)
    missing = await fleet.far.error("session_events", other, session_id=fleet.session[:-1] + "x")
    assert unknown == missing


async def test_a_token_that_the_keeping_relay_does_not_accept_reads_nothing_there(fleet: Fleet) -> None:
    principal = fleet.far.hub.authenticator.identify(fleet.far.token)
    fleet.near.hub.authenticator.revoke(frozenset({principal.jti}))
    error = await fleet.far.error("session_events", session_id=fleet.session)
    assert error["code"] == "E_SAFETY_DENIED"


async def test_a_session_lasts_when_its_node_begins_another_session_elsewhere(fleet: Fleet) -> None:
    fleet.far.lose()
    fleet.far.link(fleet.far.hub.ulids.new())
    assert (await fleet.until_sent("session_open"))["session_id"] == fleet.session
    fleet.far.request(fleet.session, 5)
    await until(lambda: len(fleet.near.hub.caller_sessions) == 1)
    read = await fleet.near.result("session_events", session_id=fleet.session, wait_ms=10_000)
    assert [event["request_id"] for event in read["events"]] == [request_id(5)]


async def test_with_the_relay_that_keeps_it_a_session_ends(fleet: Fleet) -> None:
    await fleet.stack.aclose()
    assert (await fleet.until_sent("session_end"))["reason"] == "unknown"
    error = await fleet.far.error("session_events", session_id=fleet.session)
    assert error["code"] in {"E_SAFETY_DENIED", "E_NODE_OFFLINE"}
