"""``kubelet mcp`` as a process, driven by the official MCP client over its standard input and output."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import mcp_types as types
import pytest
from mcp.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from schemas.caller_tools import MAX_PENDING
from schemas.registry import SchemaRegistry
from schemas.times import dated
from tests.fakes.caller_tools import ANT, BEE, MEMORY, SEND, served
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.integration

ERAS = ["legacy", "2026-07-28"]
BOUND_S = 30
OWN = {f"sysecho-{NODE_ID}-echo-invoke", f"sys-{NODE_ID}-sysmetrics-snapshot"}
MESSAGES = {"caller-messages", "caller-reply"}


class Agent:
    """A local agent: an MCP client that counts what it is notified of."""

    def __init__(self) -> None:
        self.client: Client
        self._changed = asyncio.Event()

    async def notified(self, message: Any) -> None:
        if isinstance(message, types.ToolListChangedNotification):
            self._changed.set()

    async def tools(self) -> dict[str, types.Tool]:
        """Return the tools that are listed now."""
        listed = await self.client.list_tools(cache_mode="bypass")
        return {tool.name: tool for tool in listed.tools}

    async def until_listed(self, *names: str) -> dict[str, types.Tool]:
        """Wait, by notifications alone, until the tools beside the node's own are ``names``."""
        async with asyncio.timeout(BOUND_S):
            while True:
                tools = await self.tools()
                if tools.keys() - OWN - MESSAGES == set(names) and tools.keys() >= OWN:
                    return tools
                await self._changed.wait()
                self._changed.clear()

    async def follow(self) -> None:
        """Follow the list as the new era does."""
        async with self.client.listen(tools_list_changed=True) as subscription:
            self._changed.set()
            async for _ in subscription:
                self._changed.set()


@asynccontextmanager
async def local_agent(era: str, path: Path, *options: str) -> AsyncIterator[Agent]:
    python, *command = [sys.executable, "-P", "-m", "kubelet", "mcp", "--socket", str(path)]
    command += ["--state-dir", str(path.parent), *options]
    program = StdioServerParameters(command=python, args=command, cwd=Path.cwd())
    agent = Agent()
    async with Client(stdio_client(program), mode=era, message_handler=agent.notified) as agent.client:
        following = asyncio.create_task(agent.follow()) if era != "legacy" else None
        yield agent
        if following is not None:
            following.cancel()
            await asyncio.wait([following])


def error_of(result: types.CallToolResult) -> Any:
    """Return the error envelope, which a failed call has twice."""
    assert result.is_error
    assert isinstance(result.content[0], types.TextContent)
    envelope = json.loads(result.content[0].text)
    assert (result.meta or {})["edge-kubelet/error"] == envelope
    assert result.structured_content is None
    return envelope


@pytest.mark.parametrize("era", ERAS)
async def test_a_local_agent_sees_lent_tools_calls_one_and_has_the_result(
    era: str, path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, local_agent(era, path) as agent:
        await agent.until_listed()
        relay.open(ANT, "ant", SEND, MEMORY)
        tools = await agent.until_listed("ant_send_response", "ant_get_memory")
        assert tools["ant_send_response"].input_schema == SEND["inputSchema"]
        assert tools["ant_get_memory"].input_schema == {"type": "object"}
        assert "data and no instruction" in (tools["ant_get_memory"].description or "")
        call = asyncio.create_task(agent.client.call_tool("ant_send_response", {"message": "Hello"}))
        [request] = await relay.requests()
        assert (request["tool"], request["arguments"]) == ("send_response", {"message": "Hello"})
        relay.answer(request, {"sent": True})
        result = await call
        assert isinstance(result, types.CallToolResult)
        assert (result.is_error, result.structured_content) == (False, {"sent": True})
        # Declared again, the old ones are withdrawn; the session's end withdraws all.
        relay.open(ANT, "ant", MEMORY)
        await agent.until_listed("ant_get_memory")
        relay.end()
        await agent.until_listed()


@pytest.mark.parametrize("era", ERAS)
async def test_what_fails_is_an_error_envelope(
    era: str, path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, local_agent(era, path) as agent:
        relay.open(ANT, "ant", SEND)
        await agent.until_listed("ant_send_response")
        invalid = await agent.client.call_tool("ant_send_response", {"message": 1})
        assert error_of(invalid)["code"] == "E_MANIFEST_INVALID"
        assert relay.sent == []
        assert error_of(await agent.client.call_tool("ant_nothing", {}))["code"] == "E_VERB_UNSUPPORTED"
        call = asyncio.create_task(agent.client.call_tool("ant_send_response", {"message": "Hello"}))
        relay.fail((await relay.requests())[0], "tool_failed", "no signal\x1b[31m")
        failed = await call
        assert error_of(failed)["code"] == "E_INTERNAL"
        assert isinstance(failed.content[1], types.TextContent)
        assert failed.content[1].text == "no signal\\x1b[31m"
        call = asyncio.create_task(agent.client.call_tool("ant_send_response", {"message": "Hello"}))
        await relay.requests(2)
        relay.end()
        assert "disconnected" in error_of(await call)["message"]


@pytest.mark.parametrize("era", ERAS)
async def test_calls_that_the_agent_cancels_reach_the_caller_and_hold_up_no_other(
    era: str, path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log) as relay, local_agent(era, path) as agent:
        relay.open(ANT, "ant", SEND)
        await agent.until_listed("ant_send_response")
        count = MAX_PENDING + 2
        calls = [
            asyncio.create_task(agent.client.call_tool("ant_send_response", {"message": "Hello"}))
            for _ in range(count)
        ]
        await relay.requests(MAX_PENDING)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        await until(lambda: len(relay.of("caller_tool_cancel")) == len(relay.of("caller_tool")))
        call = asyncio.create_task(agent.client.call_tool("ant_send_response", {"message": "last"}))
        await until(lambda: relay.of("caller_tool")[-1]["arguments"] == {"message": "last"})
        relay.answer(relay.of("caller_tool")[-1], {"sent": True})
        assert not (await call).is_error


@pytest.mark.parametrize("era", ERAS)
async def test_the_nodes_own_tools_are_served_without_any_network(era: str, path: Path) -> None:
    (path.parent / "node_id").write_text(NODE_ID + "\n")
    async with local_agent(era, path) as agent:
        await agent.until_listed()
        echoed = await agent.client.call_tool(f"sysecho-{NODE_ID}-echo-invoke", {"message": "hello"})
        [content] = echoed.content
        assert isinstance(content, types.TextContent)
        assert json.loads(content.text) == dated(echoed.structured_content)
        assert "received_at" in json.loads(content.text)
        assert (echoed.structured_content or {})["message"] == "hello"
        sample = await agent.client.call_tool(f"sys.{NODE_ID}.sysmetrics.snapshot", {"include": ["mem"]})
        assert (sample.structured_content or {})["mem"]["total_bytes"] > 0
        invalid = await agent.client.call_tool(f"sysecho-{NODE_ID}-echo-invoke", {})
        assert error_of(invalid)["code"] == "E_MANIFEST_INVALID"


async def test_a_daemon_that_restarts_takes_the_tools_away_and_brings_them_back(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with local_agent("2026-07-28", path) as agent:
        async with served(path, registry, log) as relay:
            relay.open()
            await agent.until_listed("ant_get_memory")
        await agent.until_listed()
        offline = await agent.client.call_tool("caller-reply", {"message": "hello"})
        assert error_of(offline)["code"] == "E_NODE_OFFLINE"
        async with served(path, registry, log) as relay:
            relay.open()
            await agent.until_listed("ant_get_memory")


async def test_an_agent_is_told_when_no_lent_tool_is_listed(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with served(path, registry, log), local_agent("legacy", path) as agent:
        assert "only where `kubelet mcp` was started with --session ID" in (agent.client.instructions or "")


async def test_two_sessions_show_none_and_an_attached_agent_its_own(
    path: Path, registry: SchemaRegistry, log: LogLines
) -> None:
    async with (
        served(path, registry, log) as relay,
        local_agent("2026-07-28", path) as free,
        local_agent("2026-07-28", path, "--session", BEE) as bound,
    ):
        relay.open()
        await free.until_listed("ant_get_memory")
        relay.open(BEE, "bee", MEMORY)
        await free.until_listed()
        await bound.until_listed("bee_get_memory")
        relay.end()
        await free.until_listed("bee_get_memory")


async def test_messages_and_replies_travel(path: Path, registry: SchemaRegistry, log: LogLines) -> None:
    async with served(path, registry, log) as relay, local_agent("2026-07-28", path) as agent:
        relay.open()
        relay.give("session_message", {"session_id": ANT, "message": "what is up"})
        read = await agent.client.call_tool("caller-messages", {"wait_ms": 10_000})
        assert read.structured_content == {"messages": ["what is up"]}
        await agent.client.call_tool("caller-reply", {"message": "not much"})
        assert relay.of("session_event") == [{"session_id": ANT, "message": "not much"}]


INITIALIZE = {
    "protocolVersion": "2025-11-25",
    "capabilities": {},
    "clientInfo": {"name": "agent", "version": "1"},
}


def request_line(id_: str, params: str) -> bytes:
    return f'{{"jsonrpc":"2.0","id":{id_},"method":"tools/call","params":{params}}}\n'.encode()


@pytest.mark.parametrize(
    ("line", "id_", "code"),
    [
        pytest.param(b"hello\n", None, -32700, id="no JSON"),
        pytest.param(b"\xff\n", None, -32700, id="no UTF-8"),
        pytest.param(request_line("7", '{"name":"ok \\ud83d"}'), 7, -32700, id="a lone surrogate"),
        pytest.param(request_line('"\\ud83d"', "{}"), None, -32700, id="a lone surrogate as id"),
        pytest.param(request_line("7", '{"x":' + "[" * 300 + "]" * 300 + "}"), 7, -32700, id="deep"),
        pytest.param(request_line("7", "[" * 200_000), None, -32700, id="too deep for its id"),
        pytest.param(request_line("null", "{}"), None, -32600, id="null as id"),
        pytest.param(request_line("1.5", "{}"), None, -32600, id="a fraction as id"),
        pytest.param(request_line("7", "[]"), 7, -32600, id="params of another form"),
        pytest.param(b'[{"jsonrpc":"2.0","id":7,"method":"ping"}]\n', None, -32600, id="a batch"),
        pytest.param(b'{"jsonrpc":"2.0","id":7,"result":[]}\n', None, -32600, id="a malformed response"),
    ],
)
async def test_what_is_no_message_is_answered_by_an_error_and_the_next_is_served(
    path: Path, line: bytes, id_: int | None, code: int
) -> None:
    options = ["--socket", str(path), "--state-dir", str(path.parent)]
    program = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "kubelet", "mcp"), *options, stdin=PIPE, stdout=PIPE
    )
    assert program.stdin is not None
    assert program.stdout is not None
    opening = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": INITIALIZE}
    ping = {"jsonrpc": "2.0", "id": 2, "method": "ping"}
    async with asyncio.timeout(BOUND_S):
        program.stdin.write(json.dumps(opening).encode() + b"\n")
        assert json.loads(await program.stdout.readline())["id"] == 1
        program.stdin.write(line + json.dumps(ping).encode() + b"\n")
        refused = json.loads(await program.stdout.readline())
        assert (refused["id"], refused["error"]["code"]) == (id_, code)
        assert json.loads(await program.stdout.readline()) == {"jsonrpc": "2.0", "id": 2, "result": {}}
        program.stdin.close()
        assert await program.wait() == 0
