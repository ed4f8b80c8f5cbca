"""The events of callers' sessions by every way of both eras: the official client, and a node by hand."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import pytest_asyncio

from relay.streams.caller_tools.session import GRACE_S
from tests.fakes.agents import LEGACY, NEW, LendingCaller
from tests.fakes.caller_stage import SCOPE, request_id
from tests.fakes.mcp_wire import NEW as WIRE_NEW
from tests.fakes.mcp_wire import OLD, McpWire
from tests.fakes.node_end import NodeEnd
from tests.fakes.polling import until
from tests.fakes.served_relay import ServedRelay
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.asyncio(loop_scope="module")

BOUND_S = 30
ERAS = [pytest.param(LEGACY, id="2025"), pytest.param(NEW, id="2026")]


@pytest_asyncio.fixture(loop_scope="module")
async def node(relay: ServedRelay) -> AsyncIterator[NodeEnd]:
    async with relay.session(relay.hub.ca.issue()) as node:
        yield node


def calling(
    relay: ServedRelay, mode: str, log_level: str | None = "info"
) -> AbstractAsyncContextManager[LendingCaller]:
    token = relay.hub.token([SCOPE])
    return LendingCaller.open(f"http://{relay.address}/mcp", token, mode, log_level)


async def ask(node: NodeEnd, session_id: str, number: int = 0) -> None:
    payload = {"session_id": session_id, "request_id": request_id(number), "tool": "get_memory"}
    await node.send("caller_tool", {**payload, "arguments": {"about": "the weather"}})


@pytest.mark.parametrize("mode", ERAS)
async def test_a_caller_that_only_polls_gets_and_answers_requests(
    relay: ServedRelay, node: NodeEnd, mode: Any
) -> None:
    async with calling(relay, mode, None) as caller:
        session_id = await caller.lend(NODE_ID)
        await node.receive("session_open")
        polling = asyncio.create_task(caller.call("session_events", session_id=session_id, wait_ms=20_000))
        await ask(node, session_id)
        (event,) = (await polling)["events"]
        await caller.call(
            "caller_tool_response", session_id=session_id, request_id=event["request_id"], result=[1]
        )
        answer = await node.receive("caller_tool_result")
        assert answer.payload["result"] == [1]


@pytest.mark.holds("CALLER-TOOLS/sdk/log-event")
async def test_the_old_era_has_events_on_its_event_stream(relay: ServedRelay, node: NodeEnd) -> None:
    async with calling(relay, LEGACY) as caller:
        session_id = await caller.lend(NODE_ID)
        await ask(node, session_id)
        message = await caller.log()
        assert (message.level, message.logger) == ("info", "oubliette.session")
        assert message.data == {
            "type": "caller_tool_request",
            "session_id": session_id,
            "cursor": 1,
            "request_id": request_id(),
            "tool": "get_memory",
            "arguments": {"about": "the weather"},
        }


@pytest.mark.filterwarnings("ignore:The logging capability is deprecated")
async def test_a_client_of_the_old_era_can_switch_log_messages_off(relay: ServedRelay, node: NodeEnd) -> None:
    async with calling(relay, LEGACY) as caller:
        session_id = await caller.lend(NODE_ID)
        await caller.client.set_logging_level("warning")
        await ask(node, session_id, 1)
        polled = await caller.call("session_events", session_id=session_id)
        await caller.client.set_logging_level("info")
        await ask(node, session_id, 2)
        assert [event["request_id"] for event in polled["events"]] == [request_id(1)]
        assert (await caller.log()).data["request_id"] == request_id(2)


@pytest.mark.holds("CALLER-TOOLS/sdk/log-event")
async def test_the_new_era_has_events_on_the_response_of_an_open_call(
    relay: ServedRelay, node: NodeEnd
) -> None:
    async with calling(relay, NEW) as caller:
        session_id = await caller.lend(NODE_ID)
        call = caller.call("session_events", session_id=session_id, wait_ms=60_000, stream=True)
        streaming = asyncio.create_task(call)
        for number in range(2):
            await ask(node, session_id, number)
            message = await caller.log()
            assert (message.level, message.logger) == ("info", "oubliette.session")
            assert message.data["request_id"] == request_id(number)
        await caller.call("session_message", session_id=session_id, end=True)
        assert (await streaming)["ended"] is True


async def test_the_new_era_has_no_log_messages_without_opting_in(relay: ServedRelay, node: NodeEnd) -> None:
    async with calling(relay, NEW, None) as caller:
        session_id = await caller.lend(NODE_ID)
        call = caller.call("session_events", session_id=session_id, wait_ms=60_000, stream=True)
        streaming = asyncio.create_task(call)
        await ask(node, session_id)
        assert len((await streaming)["events"]) == 1
        assert caller.logs.empty()


@pytest.mark.parametrize("mode", ERAS)
async def test_a_caller_whose_connection_ends_with_a_request_on_it_is_disconnected(
    relay: ServedRelay, node: NodeEnd, mode: Any
) -> None:
    async with calling(relay, mode) as caller:
        session_id = await caller.lend(NODE_ID)
        await node.receive("session_open")
        streaming = None
        if mode == NEW:
            call = caller.call("session_events", session_id=session_id, wait_ms=60_000, stream=True)
            streaming = asyncio.create_task(call)
        await ask(node, session_id)
        await caller.log()
        if streaming is not None:
            streaming.cancel()
    answer = await node.receive("caller_tool_result")
    assert answer.payload["error"]["code"] == "caller_disconnected"


async def lent(wire: McpWire) -> str:
    """Open a session that lends a tool, and return its id."""
    context = {"caller_id": "ant", "caller_tools": [{"name": "get_memory"}]}
    answer = await wire.ask(wire.request("session_message", {"node_id": NODE_ID, "context": context}))
    return str(answer["result"]["structuredContent"]["session_id"])


class Reading:
    """A caller by hand, which has read one request by ``session_events``."""

    def __init__(self, wire: McpWire, node: NodeEnd, session_id: str) -> None:
        self.wire = wire
        self.session_id = session_id
        self._node = node

    @classmethod
    async def opened(cls, node: NodeEnd, wire: McpWire) -> "Reading":
        session_id = await lent(wire)
        await node.receive("session_open")
        await ask(node, session_id)
        reading = cls(wire, node, session_id)
        polled = await reading.poll(wait_ms=20_000)
        (event,) = polled["result"]["structuredContent"]["events"]
        assert event["request_id"] == request_id()
        return reading

    async def poll(self, **arguments: int) -> dict[str, Any]:
        return await self.wire.ask(
            self.wire.request("session_events", {"session_id": self.session_id, **arguments})
        )

    async def is_gone(self) -> None:
        """Wait until the request has ended because its caller is gone."""
        result = await self._node.receive("caller_tool_result")
        assert result.payload["error"]["code"] == "caller_disconnected"


@pytest.mark.parametrize("era", [pytest.param(OLD, id="2025"), pytest.param(WIRE_NEW, id="2026")])
async def test_a_caller_that_closes_its_poll_for_good_is_gone_after_the_grace(
    relay: ServedRelay, node: NodeEnd, era: str
) -> None:
    async with McpWire.open(relay.address, era, relay.hub.token([SCOPE])) as wire:
        reading = await Reading.opened(node, wire)
        (session,) = relay.hub.caller_sessions
        polling = asyncio.create_task(reading.poll(after=1, wait_ms=60_000))
        await until(lambda: session.polls == 1)
        polling.cancel()
        await until(lambda: session.polls == 0)
        expiry = relay.hub.expiry
        expiry.sweep_requests()
        assert len(session.requests) == 1
        relay.hub.seconds.now += GRACE_S
        expiry.sweep_requests()
        await reading.is_gone()
        assert (await node.receive("session_end")).payload["session_id"] == reading.session_id


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
async def test_a_caller_of_the_old_era_that_deletes_its_mcp_session_is_gone_at_once(
    relay: ServedRelay, node: NodeEnd
) -> None:
    async with McpWire.open(relay.address, OLD, relay.hub.token([SCOPE])) as wire:
        reading = await Reading.opened(node, wire)
        assert (await wire.delete()).status_code == 200
        await reading.is_gone()


async def test_a_caller_of_the_old_era_that_closes_its_event_stream_is_gone_whatever_it_has_read(
    relay: ServedRelay, node: NodeEnd
) -> None:
    async with McpWire.open(relay.address, OLD, relay.hub.token([SCOPE])) as wire:
        async with wire.event_stream():
            reading = await Reading.opened(node, wire)
        await reading.is_gone()


async def test_the_event_stream_of_the_old_era_follows_by_the_token_that_is_used_now(
    relay: ServedRelay, node: NodeEnd
) -> None:
    first, second = (relay.hub.token([SCOPE]) for _ in range(2))
    async with McpWire.open(relay.address, OLD, first) as wire, wire.event_stream() as lines:
        session_id = await lent(wire)
        relay.hub.authenticator.revoke(frozenset({relay.hub.authenticator.identify(first).jti}))
        await wire.ask({"jsonrpc": "2.0", "id": 2, "method": "ping"}, Authorization=f"Bearer {second}")
        await ask(node, session_id)
        events = (line async for line in lines if line.startswith("data: {"))
        assert request_id() in await asyncio.wait_for(anext(events), BOUND_S)
