"""``relay demo --caller-tools``: one round trip of a lent tool, step by step.

Both ends are official MCP clients: of the relay, for the caller, and of ``kubelet mcp``, for the local agent.
Must not do what a user could not do.
"""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, TextContent

from relay.auth.permissions import SESSION_SCOPE
from relay.cli.demo.local_system import LocalSystem, issue_token
from schemas.text import printable

_CALLER, _TOOL = "ant", "get_memory"
_LENT = {
    "name": _TOOL,
    "description": "Retrieve stored memories",
    "inputSchema": {
        "type": "object",
        "properties": {"about": {"type": "string"}},
        "required": ["about"],
    },
}
_ARGUMENTS = {"about": "the weather"}
_RESULT = {"memories": ["It rained yesterday."]}
_TIMEOUT_S = 30
_POLL_S = 0.05
_WAIT_MS = 20_000
_MAX_SHOWN = 160

Say = Callable[[str], None]


async def show_round_trip(system: LocalSystem, say: Say) -> bool:
    """Lend a tool to this machine's node, let a local agent call it, and answer; return whether it worked."""
    token = issue_token(system.plan, _CALLER, scopes=(SESSION_SCOPE,))
    lending = replace(system, token=token)
    async with asyncio.timeout(_TIMEOUT_S), lending.client() as caller, _local_agent(system) as agent:
        say("\nAn agent lends a tool of its own to an agent on this machine's node:")
        opened = await _called(
            caller,
            "session_message",
            node_id=system.real_node,
            message="What do you remember?",
            context={"caller_id": _CALLER, "caller_tools": [_LENT]},
        )
        session = opened["session_id"]
        say(f"\n  1  the caller opens session {session} with the node, and lends {_TOOL}")
        name = f"{_CALLER}_{_TOOL}"
        names = await _until_listed(agent, name)
        say(f"  2  the local agent, a client of kubelet mcp, lists {name} beside {len(names) - 1} others")
        say(f"  3  it calls {name} {json.dumps(_ARGUMENTS)}")
        started = time.perf_counter()
        calling = asyncio.create_task(agent.call_tool(name, dict(_ARGUMENTS)))
        event = (await _called(caller, "session_events", session_id=session, wait_ms=_WAIT_MS))["events"][0]
        shown = {member: event[member] for member in ("request_id", "tool", "arguments")}
        say(f"  4  the caller gets {event['type']} {_shown(shown)}")
        ids = {"session_id": session, "request_id": event["request_id"]}
        await _called(caller, "caller_tool_response", **ids, result=_RESULT)
        say(f"  5  it answers with caller_tool_response, result {json.dumps(_RESULT)}")
        result = await calling
        took_ms = (time.perf_counter() - started) * 1000
        say(f"  6  the local agent has it after {took_ms:.1f} ms: {_shown(_value_of(result))}")
        await _called(caller, "session_message", session_id=session, end=True)
        await _until_listed(agent, None)
        say("  7  the caller ends the session; the tool is no longer listed")
    return not result.is_error and _value_of(result) == _RESULT


@asynccontextmanager
async def _local_agent(system: LocalSystem) -> AsyncIterator[Client]:
    """Hold an MCP client of this machine's ``kubelet mcp``, which logs beside the other processes."""
    server = StdioServerParameters(
        command=sys.executable,
        args=["-P", "-m", "kubelet", "mcp", "--state-dir", str(system.plan.kubelet_state)],
    )
    log = system.plan.directory / "local-agent.log"
    with log.open("a", encoding="utf-8") as errors:
        async with Client(stdio_client(server, errlog=errors), cache=None) as client:
            yield client


async def _until_listed(agent: Client, name: str | None) -> set[str]:
    """Wait until ``name``, or without it no lent tool, is listed; return what is."""
    while True:
        names = {tool.name for tool in (await agent.list_tools()).tools}
        if (name in names) if name else not any(each.startswith(f"{_CALLER}_") for each in names):
            return names
        await asyncio.sleep(_POLL_S)


async def _called(caller: Client, tool: str, **arguments: Any) -> Mapping[str, Any]:
    result = await caller.call_tool(tool, arguments)
    if result.is_error or not isinstance(result.structured_content, dict):
        raise RuntimeError(f"{tool} failed: {_text_of(result)}")
    return result.structured_content


def _value_of(result: CallToolResult) -> Any:
    return _text_of(result) if result.structured_content is None else result.structured_content


def _text_of(result: CallToolResult) -> str:
    return next((item.text for item in result.content if isinstance(item, TextContent)), "no content")


def _shown(value: object) -> str:
    return printable(json.dumps(value), _MAX_SHOWN)
