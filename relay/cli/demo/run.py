"""``relay demo``: runs a whole system on this machine, and calls its tools through the guarded client.

Must not start processes: ``local_system`` does. Everything is removed when it ends.
"""

import asyncio
import json
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import CallToolResult, TextContent, Tool

from relay.auth.permissions import SESSION_SCOPE
from relay.cli.demo.local_system import (
    TENANT,
    LocalSystem,
    Plan,
    issue_token,
    start_cluster_server,
    start_more_relays,
    start_system,
)
from relay.cli.demo.processes import Processes
from relay.cli.demo.proofs import show_proofs
from relay.http.connections import Bounds
from relay.remote_tools import RemoteToolError
from schemas.addresses import KINDS_PATH, mcp_url
from schemas.error_roots import OperatorError
from schemas.files import PRIVATE, write_atomic
from schemas.process.resources import raise_open_files_limit
from schemas.projection import ToolName, parse
from schemas.registry import read_contract
from schemas.text import printable
from schemas.tls import client_context

_READY_TIMEOUT_S = 60
"""For each relay, after the last step: certificates for thousands of nodes take minutes by themselves."""
_NODES_STARTED_PER_S = 10
"""On a slow machine: a thousand mock nodes take longer than two."""
_NODES_CALLED = 32
"""A caller has at most 256 subscriptions, and no reader for the answers of more."""
# Those of the relay that are no mock node's: of this machine's node, and of the clients.
_OTHER_CONNECTIONS = 16


class DemoError(OperatorError):
    """The demo cannot go on; the text says why."""


async def run_demo(
    *,
    nodes: int,
    relays: int = 1,
    once: bool,
    ready_file: Path | None,
    caller_tools: bool = False,
    kinds: tuple[str, ...] = (),
    called: tuple[str, ...] = (),
) -> bool:
    """Start everything with ``nodes`` mock nodes, call their tools, and keep serving unless ``once``.

    Of several ``relays``, each further one has a mock node of its own; every tool is called by the first.

    This machine's node has ``kinds`` besides RFC-0001's. Of them the tools of those in ``called`` are called.
    Then it tries what is refused (``proofs``). With ``caller_tools`` it shows how an agent lends a tool
    instead. Returns whether all of it worked.

    Raises:
        DemoError: too few open files are allowed, or not everything was ready in time.
        TlsFilesError: SSL_CERT_FILE names no roots.
        StartError: something could not be started, or a part of it ended by itself.
    """
    if ready_file is not None and not ready_file.parent.is_dir():
        # Before anything is started: it is written when all of it is up.
        raise DemoError(f"--ready-file {ready_file}: there is no directory {ready_file.parent}")
    _require_open_files(nodes)
    client_context()  # the client that calls the tools needs the roots of this machine
    with tempfile.TemporaryDirectory(prefix="edge-kubelet-demo-") as name:
        directory = Path(name)
        async with AsyncExitStack() as stack:
            processes = await stack.enter_async_context(Processes.running(directory))
            # At a name, where passkeys can be made.
            plan = replace(Plan.below(directory, processes.ports, kinds), public_host="localhost")
            system, tools = await _started(plan, nodes, relays, processes)
            if ready_file is not None:
                write_atomic(ready_file, json.dumps(_ready_facts(system)) + "\n", PRIVATE)
                stack.callback(ready_file.unlink, missing_ok=True)
            shown = _show_caller_tools(system) if caller_tools else _show_calls(system, tools, called)
            worked = await processes.during(shown)
            if not caller_tools:
                worked &= await processes.during(show_proofs(system, _print))
            if not once:
                _show_how_to_connect(system)
                await processes.during(asyncio.Event().wait())
    return worked


def _require_open_files(nodes: int) -> None:
    """Raise the limit of open files; the relay, which needs most of them, inherits it."""
    need, limit = Bounds.descriptors_for(nodes + _OTHER_CONNECTIONS), raise_open_files_limit()
    if limit < need:
        raise DemoError(
            f"{nodes} mock nodes need {need} open files, and {limit} are allowed:"
            f" raise the limit with `ulimit -n {need}`, or give fewer --nodes"
        )


async def _show_caller_tools(system: LocalSystem) -> bool:
    if not system.plan.socket.exists():
        raise DemoError(f"no agent can connect at {system.plan.socket}: set TMPDIR to a shorter path")
    try:
        return await show_round_trip(system, _print)
    except TimeoutError:
        text = system.processes.last_lines()
        raise DemoError(f"the round trip did not end in time; {text}") from None


async def _started(
    plan: Plan, nodes: int, relays: int, processes: Processes
) -> tuple[LocalSystem, list[Tool]]:
    last = time.monotonic()
    _print("Starting an edge of its own on this machine; this took:")
    for line in plan.moved():
        _print(f"  {line}")

    timeout_s = relays * _READY_TIMEOUT_S + nodes // _NODES_STARTED_PER_S
    limit = asyncio.timeout(timeout_s)

    def step(text: str) -> None:
        nonlocal last
        limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
        last, before = time.monotonic(), last
        _print(f"  {last - before:5.1f} s  {text}")

    try:
        async with limit:
            if relays > 1:
                plan = await start_cluster_server(plan, processes)
                step("cluster     nats-server, for the relays alone")
            system = await start_system(plan, nodes, processes, step)
            more = await start_more_relays(plan, relays - 1, processes, step)
            system = replace(system, mock_nodes=[*system.mock_nodes, *(each.real_node for each in more)])
            tools = await processes.during(system.until_listed())
            step(f"tools       {len(tools)} are listed, and their nodes connected")
    except TimeoutError:
        raise DemoError(f"not ready {timeout_s} s after the last step; {processes.last_lines()}") from None
    return system, tools


_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "invoke": {"message": "hello from the demo"},
    "subscribe": {"interval_ms": 1000},
}
"""What the demo calls each verb with."""


async def _show_calls(system: LocalSystem, tools: Sequence[Tool], called: tuple[str, ...]) -> bool:
    """Call the tools of each node as an agent runtime would that does not trust the relay."""
    # This machine first: its values are the ones that a user can check.
    nodes = [system.real_node, *system.mock_nodes[: _NODES_CALLED - 1]]
    required = {name: tool.input_schema.get("required", ()) for tool in tools if (name := parse(tool.name))}
    shorts = {kind.short for kind in read_contract(called).kinds}
    chosen = sorted((name for name in required if name.kind_short in shorts), key=_after_health)
    worked = True
    async with system.remote_tools(system.plan.directory / "calls.jsonl") as client:
        several = f"{len(nodes)} nodes" if len(nodes) > 1 else "one node"
        _print(f"\nThe guarded client verifies each node's manifest first. Calling tools of {several}:")
        for name in (name for node in nodes for name in chosen if name.node_id == node):
            tool = f"{name.kind_short}-{name.verb}"
            arguments = {"node": name.node_id, **_ARGUMENTS.get(name.verb, {})}
            if needed := [each for each in required[name] if each not in arguments]:
                _print(f"\n  {tool} is not called: it takes {', '.join(needed)}")
                continue
            started = time.perf_counter()
            try:
                result = await client.execute(tool, arguments)
                lines = [(f"{label:<8}", line) for label, line in lines_of(result.structured)]
            except RemoteToolError as error:
                worked, lines = False, [("FAILED", str(error))]
            took_ms = (time.perf_counter() - started) * 1000
            where = "this machine" if name.node_id == system.real_node else "mock node"
            _print(f"\n  {tool} {json.dumps(arguments)}\n    {where}, {took_ms:.1f} ms")
            for label, line in lines:
                _print(f"    {label}  {line}")
    if rest := len(required) - len(chosen):
        _print(f"\n  {rest} more tools of this machine are not called: --kinds all calls them.")
    return worked


def _after_health(name: ToolName) -> bool:
    """Return the key by which what is wrong comes first."""
    return name.kind_short != "health"


def _show_how_to_connect(system: LocalSystem) -> None:
    plan, signs_in = system.plan, system.plan.fleet_url is None
    url = _agents_url(plan)
    header = "" if signs_in else f' --header "Authorization: Bearer {system.token}"'
    _print(f"\nServing until Ctrl-C.\n\n  MCP URL  {url}\n  token    {system.token}\n")
    if signs_in:
        program = sys.argv[0] if Path(sys.argv[0]).name == "relay" else "relay"
        state = shlex.quote(str(plan.state.root))
        _print("Open the link that this prints, and make a passkey:\n")
        _print(f"  {program} people invite me --role operator --tenant {TENANT} --state-dir {state}\n")
    _print(
        "Paste this to give Claude Code these tools" + ("; then sign in by /mcp:\n" if signs_in else ":\n")
    )
    _print(f"  claude mcp add --transport http edge {url}{header}\n")
    _print(f"The node's own status: curl http://127.0.0.1:{plan.loopback_port}/readyz")


def _agents_url(plan: Plan) -> str:
    """Return where agents connect: the public URL, unless nothing listens there."""
    return mcp_url(plan.public_url if plan.fleet_url is None else plan.url, KINDS_PATH)


def _ready_facts(system: LocalSystem) -> dict[str, object]:
    plan = system.plan
    return {
        "mcp_url": _agents_url(plan),
        "token": system.token,
        "broker": plan.broker,
        "ca_root": str(plan.state.ca / "root.pem"),
        "audit": str(plan.state.audit),
        "nodes": [
            {"node_id": system.real_node, "real": True},
            *({"node_id": node_id, "real": False} for node_id in system.mock_nodes),
        ],
        "loopback_url": f"http://127.0.0.1:{plan.loopback_port}",
        "socket": str(plan.socket) if plan.socket.exists() else None,
        "relay_pid": system.processes.pid("relay"),
        "kubelet_pid": system.processes.pid("kubelet"),
    }


def _print(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - the demo's output


_GIB = 1024**3
_MAX_OTHER = 80
_WORDED = frozenset(
    {"node_id", "ts_ms", "ts", "message", "received_at_ms", "received_at"}
    | {"uptime_s", "cpu", "mem", "load", "disk"}
)


def lines_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ``(label, text)`` for each line of a result; every text is printable.

    An echo, a metrics sample and findings are worded; a member of another kind is shown as it is.
    """
    if "message" in result:
        yield "message", printable(result["message"])
    if "received_at_ms" in result:
        received = datetime.fromtimestamp(result["received_at_ms"] / 1000, UTC)
        yield "received", received.isoformat(sep=" ", timespec="milliseconds")
    if "uptime_s" in result:
        yield "uptime", str(timedelta(seconds=result["uptime_s"]))
    if "cpu" in result:
        yield "cpu", f"{result['cpu']['usage_pct']:.1f} % of {result['cpu']['cores']} cores"
    if "mem" in result:
        memory = result["mem"]
        yield "memory", f"{_gib(memory['available_bytes'])} available of {_gib(memory['total_bytes'])}"
    if "load" in result:
        load = result["load"]
        yield "load", f"{load['one']:.2f}  {load['five']:.2f}  {load['fifteen']:.2f}"
    for disk in result.get("disk", ()):
        free = f"{_gib(disk['available_bytes'])} available of {_gib(disk['total_bytes'])}"
        yield "disk", f"{printable(disk['mount'], 40)} ({printable(disk['fs_type'], 12)})  {free}"
    for name, value in result.items():
        if name not in _WORDED:
            yield ("worst", _worst(value)) if name == "findings" else (name, _shown_as_is(value))


def _worst(findings: Sequence[Mapping[str, Any]]) -> str:
    """Return the first of ``findings``, which come sorted."""
    if not findings:
        return "no finding"
    facts = (findings[0][name] for name in ("severity", "code", "subject", "evidence"))
    return printable(" ".join(_shown_as_is(fact) for fact in facts if fact), _MAX_OTHER)


def _shown_as_is(value: object) -> str:
    return printable(
        value if isinstance(value, str) else json.dumps(value, separators=(",", ":")), _MAX_OTHER
    )


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"


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
_LENT_ARGUMENTS = {"about": "the weather"}
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
        say(f"  3  it calls {name} {json.dumps(_LENT_ARGUMENTS)}")
        started = time.perf_counter()
        calling = asyncio.create_task(agent.call_tool(name, dict(_LENT_ARGUMENTS)))
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
