"""15. An agent lends its tools to the local agent of a node, and each request ends in one way.

Steps: a caller opens a session and declares tools · the local agent, an MCP client of ``kubelet mcp``, sees
and calls them · the caller answers, fails, answers late, disconnects · the node or the relay is killed in
between. Over a real relay, a real WebSocket and a real Unix socket, for callers and agents of both eras.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from relay.cli.demo.local_system import LocalSystem, issue_token, kubelet_command, relay_command, start_system
from relay.cli.demo.processes import Processes
from schemas.addresses import BrokerAddress, mcp_url
from tests.fakes.agents import LEGACY, NEW, LendingCaller, NodeAgent, SocketClient, error_of, text_of
from tests.fakes.caller_stage import SCOPE, TOOLS
from tests.fakes.demo import plan_below
from tests.fakes.fault_proxy import FaultProxy
from tests.fakes.polling import before_asking_again
from tests.fakes.ports import unused_port

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.long]

BOUND_S = 60
ERAS = [pytest.param(LEGACY, id="2025"), pytest.param(NEW, id="2026")]
HELLO = {"message": "Hello from the node", "recipients": ["+1234567890"]}


class World:
    """One relay and one node, who uses them, and the proxy by which the node reaches the relay.

    Attributes:
        agents: a local agent of each era, which is bound to no session.
    """

    def __init__(self, system: LocalSystem, proxy: FaultProxy, port: int) -> None:
        self.system = system
        self.node = system.real_node
        self.proxy = proxy
        self.port = port
        self.agents: dict[str, NodeAgent] = {}

    @property
    def state(self) -> Path:
        return self.system.plan.kubelet_state

    @asynccontextmanager
    async def caller(self, mode: str, sub: str = "ant") -> AsyncIterator[LendingCaller]:
        """Hold a caller; the sessions that it leaves are ended by another connection."""
        token = issue_token(self.system.plan, sub, scopes=[SCOPE])
        url = mcp_url(f"http://127.0.0.1:{self.port}")
        left: set[str] = set()
        try:
            async with LendingCaller.open(url, token, mode) as caller:
                left = caller.sessions
                yield caller
        finally:  # a test that fails must not leave the next ones a second session
            if left:
                async with LendingCaller.open(url, token, NEW) as cleaner:
                    for session in left:
                        await cleaner.try_call("session_message", session_id=session, end=True)

    @asynccontextmanager
    async def lent(self, mode: str) -> AsyncIterator[tuple[LendingCaller, NodeAgent, str]]:
        """Hold a caller, the local agent that has its two tools, and the session, which a test may end."""
        async with self.caller(mode) as caller:
            session = await caller.lend(self.node)
            await self.agents[mode].lent("ant_send_response", "ant_get_memory")
            yield caller, self.agents[mode], session
            if session in caller.sessions:
                await caller.end(session)

    async def until_connected(self, caller: LendingCaller) -> None:
        """Return when the node is connected to the relay, which takes a session with it then."""
        opened = {"node_id": self.node, "context": {"caller_id": "ant"}}
        async with asyncio.timeout(BOUND_S):
            while (answer := await caller.try_call("session_message", **opened)).is_error:
                await before_asking_again()
        await caller.end(answer.structured_content["session_id"])

    def at_socket(self) -> AbstractAsyncContextManager[SocketClient]:
        return SocketClient.connected(self.state / "relay.sock")

    def relay_command(self, *options: str) -> list[str]:
        return [*relay_command(self.system.plan), *options]

    async def restart(self, name: str, command: list[str]) -> None:
        """Kill a part, and start it again."""
        await self.system.processes.kill(name)
        await self.system.processes.start(name, command)
        async with asyncio.timeout(BOUND_S):
            await self.system.processes.until_listening(self.port)
            await self.system.until_listed()


@asynccontextmanager
async def held(context: AbstractAsyncContextManager[NodeAgent]) -> AsyncIterator[NodeAgent]:
    """Hold ``context`` in a task of its own: a client has to be closed by the task that opened it."""
    ready: asyncio.Future[NodeAgent] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()

    async def hold() -> None:
        async with context as agent:
            ready.set_result(agent)
            await stop.wait()

    holding = asyncio.create_task(hold())
    try:
        yield await asyncio.wait_for(ready, BOUND_S)
    finally:
        stop.set()
        await holding


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    directory = tmp_path_factory.mktemp("lent")
    port = unused_port()
    async with (
        FaultProxy(BrokerAddress("127.0.0.1", port)).running() as proxy,
        Processes.running(directory) as processes,
    ):
        plan = replace(
            plan_below(directory),
            relay_port=proxy.address.port,
            relay_options=("--listen", f"127.0.0.1:{port}"),
        )
        system = await start_system(plan, 0, processes, lambda _text: None)
        async with asyncio.timeout(BOUND_S):
            await processes.until_listening(port)
            await system.until_listed()
        world = World(system, proxy, port)
        async with (
            held(NodeAgent.running(world.state, mode=LEGACY)) as old,
            held(NodeAgent.running(world.state, mode=NEW)) as new,
        ):
            world.agents = {LEGACY: old, NEW: new}
            yield world


@pytest.mark.holds("CALLER-TOOLS/sdk/dynamic-tools", "CALLER-TOOLS/architecture/round-trip")
@pytest.mark.parametrize("era", ERAS)
async def test_a_local_agent_uses_the_tools_of_the_agent_that_called_it(world: World, era: str) -> None:
    async with world.caller(era) as caller:
        agent = world.agents[era]
        session = await caller.lend(world.node, message="What is the weather?")
        tools = await agent.lent("ant_send_response", "ant_get_memory")
        assert tools["ant_send_response"].input_schema == TOOLS[0]["inputSchema"]
        assert tools["ant_get_memory"].input_schema == {"type": "object"}
        calling = asyncio.create_task(agent.call("ant_send_response", **HELLO))
        event = await caller.event(session)
        assert {name: event[name] for name in ("type", "tool", "arguments")} == {
            "type": "caller_tool_request",
            "tool": "send_response",
            "arguments": HELLO,
        }
        await caller.answer(event, {"sent": True})
        assert '"sent": true' in text_of(await calling) or '"sent":true' in text_of(await calling)
        own = await agent.call(f"sysecho-{world.node}-echo-invoke", message="local")
        assert not own.is_error
        await caller.end(session)
        await agent.lent()


@pytest.mark.holds("CALLER-TOOLS/sdk/dynamic-tools")
@pytest.mark.parametrize("era", ERAS)
async def test_tools_that_are_declared_again_replace_those_before(world: World, era: str) -> None:
    async with world.lent(era) as (caller, agent, session):
        context: dict[str, Any] = {"caller_tools": [{"name": "other"}]}
        await caller.call("session_message", session_id=session, context=context)
        await agent.lent("ant_other")
        gone = await agent.call("ant_get_memory")
        assert error_of(gone)["code"] == "E_VERB_UNSUPPORTED"
        await caller.call("session_message", session_id=session, context={"caller_tools": []})
        await agent.lent()


@pytest.mark.holds("CALLER-TOOLS/errors/tool-failed")
@pytest.mark.parametrize("era", ERAS)
async def test_the_error_of_a_caller_is_an_error_for_the_local_agent(world: World, era: str) -> None:
    async with world.lent(era) as (caller, agent, session):
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        event = await caller.event(session)
        ids = {"session_id": session, "request_id": event["request_id"]}
        await caller.call("caller_tool_response", **ids, error="no memories today")
        result = await calling
        assert result.is_error
        assert "no memories today" in text_of(result)
        assert "The tool of the caller failed." in text_of(result)


@pytest.mark.holds("CALLER-TOOLS/errors/invalid-request-id")
@pytest.mark.parametrize("era", ERAS)
async def test_a_second_and_an_unknown_answer_are_ignored_and_the_caller_is_told(
    world: World, era: str
) -> None:
    async with world.lent(era) as (caller, agent, session):
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        event = await caller.event(session)
        unknown = await caller.try_call(
            "caller_tool_response", session_id=session, request_id="never", result=1
        )
        await caller.answer(event, "the first")
        ids = {"session_id": session, "request_id": event["request_id"]}
        second = await caller.try_call("caller_tool_response", **ids, result="the second")
        assert "no such pending request" in error_of(second)["message"]
        assert error_of(unknown)["message"] == error_of(second)["message"]
        assert "the first" in text_of(await calling)


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
@pytest.mark.parametrize("era", ERAS)
async def test_a_caller_that_disconnects_is_disconnected_at_once(world: World, era: str) -> None:
    agent = world.agents[era]
    async with world.caller(era) as caller:
        session = await caller.lend(world.node)
        await agent.lent("ant_send_response", "ant_get_memory")
        streaming = None
        if era == NEW:
            call = caller.call("session_events", session_id=session, wait_ms=60_000, stream=True)
            streaming = asyncio.create_task(call)
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        await caller.log()
        if streaming is not None:
            streaming.cancel()
    assert error_of(await calling)["message"].startswith("The caller disconnected")


@pytest.mark.parametrize("era", ERAS)
async def test_a_caller_that_has_read_a_request_and_leaves_is_gone_and_hides_no_other_callers_tools(
    world: World, era: str
) -> None:
    agent = world.agents[era]
    async with world.caller(era, "bee") as bee:
        async with world.caller(era) as caller:
            session = await caller.lend(world.node)
            await agent.lent("ant_send_response", "ant_get_memory")
            first = asyncio.create_task(agent.call("ant_get_memory"))
            read = await caller.call("session_events", session_id=session, wait_ms=20_000)
            assert [event["type"] for event in read["events"]] == ["caller_tool_request"]
            following = {"session_id": session, "after": read["next"], "wait_ms": 60_000, "stream": True}
            streaming = asyncio.create_task(caller.call("session_events", **following))
            second = asyncio.create_task(agent.call("ant_get_memory"))
            await caller.log()
            other = await bee.lend(world.node, caller_id="bee")
            await agent.lent()
            caller.sessions.clear()  # nothing ends it but that its caller is gone
            streaming.cancel()
        for calling in (first, second):
            assert error_of(await calling)["message"].startswith("The caller disconnected")
        await agent.lent("bee_send_response", "bee_get_memory")
        await bee.end(other)


@pytest.mark.parametrize("era", ERAS)
async def test_a_call_that_the_local_agent_cancels_ends_for_the_caller(world: World, era: str) -> None:
    async with world.lent(era) as (caller, agent, session):
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        event = await caller.event(session)
        calling.cancel()
        cancelled = await caller.event(session, "caller_tool_cancelled")
        assert cancelled["request_id"] == event["request_id"]
        ids = {"session_id": session, "request_id": event["request_id"]}
        late = await caller.try_call("caller_tool_response", **ids, result=1)
        assert "no such pending request" in error_of(late)["message"]


async def test_a_local_agent_does_not_wait_for_a_daemon_that_is_stopped(world: World) -> None:
    async with world.lent(NEW) as (caller, agent, _):
        daemon = world.system.processes.pid("kubelet")
        os.kill(daemon, signal.SIGSTOP)
        try:
            error = error_of(await asyncio.wait_for(agent.call("ant_get_memory"), BOUND_S / 2))
        finally:
            os.kill(daemon, signal.SIGCONT)
        assert error["message"].startswith("The daemon of this node was lost")
        await agent.lent("ant_send_response", "ant_get_memory")
        await world.until_connected(caller)  # the relay may have ended the connection meanwhile


@pytest.mark.holds("CALLER-TOOLS/errors/disconnected")
@pytest.mark.parametrize("era", ERAS)
async def test_a_session_that_its_caller_ends_has_no_caller_any_more(world: World, era: str) -> None:
    async with world.lent(era) as (caller, agent, session):
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        await caller.event(session)
        await caller.end(session)
        assert error_of(await calling)["message"].startswith("The caller disconnected")


@pytest.mark.parametrize("era", ERAS)
async def test_messages_go_both_ways(world: World, era: str) -> None:
    async with world.caller(era) as caller, world.at_socket() as local:
        session = await caller.lend(world.node)
        assert (await local.notification("caller_tools_config"))["caller_id"] == "ant"
        await caller.call("session_message", session_id=session, message="How are you?")
        assert (await local.notification("session_message"))["message"] == "How are you?"
        assert (await local.ask("session_reply", message="Warm."))["result"] == {}
        assert (await caller.event(session, "session_event"))["message"] == "Warm."
        await caller.end(session)


@pytest.mark.holds("CALLER-TOOLS/security/only-the-caller")
@pytest.mark.parametrize("era", ERAS)
async def test_a_second_caller_has_no_part_in_the_session(world: World, era: str) -> None:
    async with world.lent(era) as (caller, agent, session), world.caller(era, "mallory") as mallory:
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        event = await caller.event(session)
        never = "gogol_20261122_021500_00000000"
        for name, arguments in (
            ("session_events", {"wait_ms": 0}),
            ("session_message", {"message": "Hello"}),
            ("session_message", {"end": True}),
            ("caller_tool_response", {"request_id": event["request_id"], "result": "mallory's"}),
        ):
            own = await mallory.try_call(name, session_id=session, **arguments)
            absent = await mallory.try_call(name, session_id=never, **arguments)
            assert without_correlation(error_of(own)) == without_correlation(error_of(absent))
        await caller.answer(event, "the caller's")
        assert text_of(await calling) in {"the caller's", '"the caller\'s"'}


@pytest.mark.holds("CALLER-TOOLS/data/socket-protocol")
async def test_two_callers_that_lend_the_same_name_are_told_apart(world: World) -> None:
    async with world.caller(NEW, "ant") as ant, world.caller(LEGACY, "bee") as bee:
        sessions = [await ant.lend(world.node), await bee.lend(world.node, caller_id="bee")]
        async with world.at_socket() as unbound, world.at_socket() as of_ant, world.at_socket() as of_bee:
            refused = await unbound.ask("caller_tool", tool="get_memory", arguments={})
            assert "More than one session" in refused["error"]["message"]
            for client, session in zip((of_ant, of_bee), sessions, strict=True):
                await client.ask("session_attach", session_id=session)
            calls = [
                asyncio.create_task(client.ask("caller_tool", tool="get_memory", arguments={}))
                for client in (of_ant, of_bee)
            ]
            await bee.answer(await bee.event(sessions[1]), "of bee")
            await ant.answer(await ant.event(sessions[0]), "of ant")
            assert [(await call)["result"] for call in calls] == ["of ant", "of bee"]
        await ant.end(sessions[0])
        await bee.end(sessions[1])


@pytest.mark.holds("CALLER-TOOLS/architecture/round-trip")
@pytest.mark.parametrize("era", ERAS)
async def test_two_hundred_requests_are_in_flight_and_are_answered_in_any_order(
    world: World, era: str
) -> None:
    count = 200
    async with world.caller(era) as caller, world.at_socket() as local:
        session = await caller.lend(world.node)
        await local.notification("caller_tools_config")
        asked = [
            asyncio.create_task(local.ask("caller_tool", tool="get_memory", arguments={"n": number}))
            for number in range(count)
        ]
        answered = 0
        while answered < count:
            # As many as the relay has pending: the newest first.
            events = [await caller.event(session) for _ in range(min(100, count - answered))]
            for event in reversed(events):
                await caller.answer(event, event["arguments"]["n"])
            answered += len(events)
        assert [(await each)["result"] for each in asked] == list(range(count))
        await caller.end(session)


@pytest.mark.parametrize("era", ERAS)
async def test_a_node_that_drops_and_resumes_gets_its_answer(world: World, era: str) -> None:
    async with world.caller(era) as caller, world.at_socket() as local:
        session = await caller.lend(world.node)
        await local.notification("caller_tools_config")
        calls = [
            asyncio.create_task(local.ask("caller_tool", tool="get_memory", arguments={"n": number}))
            for number in range(2)
        ]
        events = [await caller.event(session) for _ in calls]
        world.proxy.cut()
        # One answer while the node is away, or nearly so; one when it is back.
        await caller.answer(events[0], events[0]["arguments"]["n"])
        async with asyncio.timeout(BOUND_S):
            await world.system.until_listed()
        await caller.answer(events[1], events[1]["arguments"]["n"])
        assert [(await call)["result"] for call in calls] == [0, 1]
        await caller.end(session)


@pytest.mark.holds("CALLER-TOOLS/timeout")
async def test_a_relay_that_restarts_has_no_sessions_and_the_local_agent_learns_of_it(world: World) -> None:
    async with world.lent(NEW) as (caller, agent, session):
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        await caller.event(session)
        caller.sessions.clear()
        await world.restart("relay", world.relay_command("--caller-timeout", "1s"))
        assert error_of(await calling)["message"].startswith("The caller disconnected")
        await agent.lent()
        unknown = await caller.try_call("session_events", session_id=session, wait_ms=0)
        assert error_of(unknown)["code"] == "E_SAFETY_DENIED"
    # It has another timeout now.
    for era in (LEGACY, NEW):
        async with world.lent(era) as (caller, agent, session):
            calling = asyncio.create_task(agent.call("ant_get_memory"))
            event = await caller.event(session)
            assert error_of(await calling)["code"] == "E_DEADLINE_EXCEEDED"
            ids = {"session_id": session, "request_id": event["request_id"]}
            late = await caller.try_call("caller_tool_response", **ids, result=1)
            assert "no such pending request" in error_of(late)["message"]
    await world.restart("relay", world.relay_command())


async def test_a_kubelet_that_restarts_has_its_callers_again(world: World) -> None:
    async with world.caller(NEW) as caller:
        session = await caller.lend(world.node)
        await world.restart("kubelet", kubelet_command(world.system.plan))
        agent = world.agents[NEW]
        await agent.lent("ant_send_response", "ant_get_memory")
        calling = asyncio.create_task(agent.call("ant_get_memory"))
        await caller.answer(await caller.event(session), "still here")
        assert "still here" in text_of(await calling)
        await caller.end(session)


async def test_a_hostile_local_process_harms_itself_alone(world: World) -> None:
    async with world.caller(NEW) as caller, world.at_socket() as hostile, world.at_socket() as local:
        session = await caller.lend(world.node)
        await local.notification("caller_tools_config")
        for line in (b"{", b"[]", b'{"jsonrpc":"2.0","id":1,"method":"take_over"}', b"x" * 300_000):
            hostile.send_raw(line + b"\n")
        for arguments in (
            {"tool": "not_lent"},
            {"tool": "get_memory", "arguments": 7},
            {"session_id": session},
        ):
            assert "error" in await hostile.ask("caller_tool", **arguments)
        unknown = await hostile.ask("session_attach", session_id="gogol_20261122_021500_00000000")
        assert "error" in unknown
        flood = [
            asyncio.create_task(hostile.ask("caller_tool", tool="get_memory", arguments={"flood": True}))
            for _ in range(100)
        ]
        asking = asyncio.create_task(local.ask("caller_tool", tool="get_memory", arguments={}))
        while (event := await caller.event(session))["arguments"]:
            continue
        await caller.answer(event, "for the honest one")
        assert (await asking)["result"] == "for the honest one"
        for task in flood:
            task.cancel()
        await caller.end(session)


def without_correlation(envelope: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in envelope.items() if name != "correlation_id"}
