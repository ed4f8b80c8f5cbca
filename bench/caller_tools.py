"""What it takes a node's local agent to call a tool that a caller lends, beside two plain tool calls.

A request passes the relay twice, as two plain calls do: to the caller, and back with the answer. The caller
answers at once; it and the local agent speak raw bytes, since client libraries would measure themselves.
"""

import asyncio
import json
import statistics
import time
from collections.abc import Mapping
from typing import Any

from bench.demo_system import demo_system
from bench.load import KeptConnection, Target, latencies_ms, tool_call
from bench.results import Figure
from relay.auth.permissions import SESSION_SCOPE
from relay.cli.demo.local_system import LocalSystem, issue_token

MOCK_NODES = 60  # each echoes ten times a second
_ROUNDS = 5
_CALLS = 200
_WARM_UP = 20
_WAIT_MS = 20_000
_TOOL = {"name": "get_memory"}
_ATTACH = -1
_ATTACH_TIMEOUT_S, _ATTACH_RETRY_S = 10, 0.005


async def measure_caller_tools() -> Figure:
    """Return ``caller_tool_p50_ms``."""
    async with demo_system(MOCK_NODES) as system:
        plain = await _plain_calls(system)
        lent: list[float] = []
        called: list[float] = []
        for number in range(_ROUNDS):
            lent += await _round_trips_ms(system, f"ant-{number}")
            called += await latencies_ms(plain, _CALLS)
    return Figure(
        name="caller_tool_p50_ms",
        value=statistics.median(lent),
        unit="ms",
        reference="two plain tool calls",
        reference_value=2 * statistics.median(called),
        wanted="ratio <= 2.5",
    )


async def _plain_calls(system: LocalSystem) -> Target:
    names = [tool.name for tool in await system.until_listed()]
    mocked = [name for name in names if ".echo." in name and system.real_node not in name]
    port = system.plan.relay_port
    return Target(port, [tool_call(port, name, system.token) for name in mocked])


async def _attached(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, session: str) -> None:
    """Attach to the session, once the node has been told of it: its relay answers the caller before that."""
    async with asyncio.timeout(_ATTACH_TIMEOUT_S):
        while True:
            params = {"session_id": session}
            request = {"jsonrpc": "2.0", "id": _ATTACH, "method": "session_attach", "params": params}
            writer.write(json.dumps(request).encode("ascii") + b"\n")
            if "result" in await _answer(reader, _ATTACH):
                return
            await asyncio.sleep(_ATTACH_RETRY_S)


async def _round_trips_ms(system: LocalSystem, caller_id: str) -> list[float]:
    """Return how long each request of a local agent took, one after the other, in a session of its own."""
    # A caller of its own for each round: what one agent may call a second is bounded.
    caller = _Caller(system, caller_id)
    session = await caller.open()
    answering = asyncio.create_task(caller.answer_all(session))
    reader, writer = await asyncio.open_unix_connection(str(system.plan.socket))
    await _attached(reader, writer, session)
    took = []
    for number in range(_WARM_UP + _CALLS):
        params = {"tool": "get_memory", "arguments": {"about": "the weather"}}
        request = {"jsonrpc": "2.0", "id": number, "method": "caller_tool", "params": params}
        started = time.perf_counter()
        writer.write(json.dumps(request).encode("ascii") + b"\n")
        answer = await _answer(reader, number)
        took.append((time.perf_counter() - started) * 1000)
        if "result" not in answer:
            raise RuntimeError(f"a request failed: {answer}")
    writer.close()
    answering.cancel()
    await caller.call("session_message", session_id=session, end=True)
    return took[_WARM_UP:]


async def _answer(reader: asyncio.StreamReader, number: int) -> dict[str, Any]:
    while True:
        message: dict[str, Any] = json.loads(await reader.readline())
        if message.get("id") == number:
            return message


class _Caller:
    """One caller, with a connection to poll on and one to call on."""

    def __init__(self, system: LocalSystem, caller_id: str) -> None:
        self._system = system
        self._port = system.plan.relay_port
        self._caller_id = caller_id
        self._token = issue_token(system.plan, caller_id, scopes=(SESSION_SCOPE,))
        self._polls = KeptConnection(self._port)
        self._calls = KeptConnection(self._port)

    async def open(self) -> str:
        """Lend a tool, and return the session."""
        context = {"caller_id": self._caller_id, "caller_tools": [_TOOL]}
        opened = await self.call("session_message", node_id=self._system.real_node, context=context)
        return str(opened["session_id"])

    async def answer_all(self, session: str) -> None:
        """Answer every request until cancelled."""
        after = 0
        while True:
            read = await self._ask(
                self._polls, "session_events", session_id=session, after=after, wait_ms=_WAIT_MS
            )
            after = read["next"]
            for event in read["events"]:
                ids = {"session_id": session, "request_id": event["request_id"]}
                await self.call("caller_tool_response", **ids, result=1)

    async def call(self, tool: str, **arguments: Any) -> Mapping[str, Any]:
        """Call a tool of the relay."""
        return await self._ask(self._calls, tool, **arguments)

    async def _ask(self, connection: KeptConnection, tool: str, **arguments: Any) -> Mapping[str, Any]:
        body = await connection.ask(tool_call(self._port, tool, self._token, arguments))
        result: Mapping[str, Any] = json.loads(body)["result"]
        if result["isError"]:
            raise RuntimeError(f"{tool} failed: {result['content']}")
        content: Mapping[str, Any] = result["structuredContent"]
        return content
