"""``relay demo``: runs a whole system on this machine, and calls its tools through the guarded client.

Must not start processes: ``local_system`` does. Everything is removed when it ends.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from relay.ascii_json import encoded
from relay.cli.demo.caller_tools import show_round_trip
from relay.cli.demo.local_system import LocalSystem, Plan, start_system
from relay.cli.demo.more_relays import start_cluster_server, start_more_relays
from relay.cli.demo.processes import Processes
from relay.http.connections import Bounds
from relay.remote_tools import BearerToken, HttpServer, Permissions, RemoteToolError, RemoteTools
from schemas.addresses import KINDS_PATH, mcp_url
from schemas.error_roots import OperatorError
from schemas.files import PRIVATE, write_atomic
from schemas.process.resources import raise_open_files_limit
from schemas.projection import parse
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
) -> bool:
    """Start everything with ``nodes`` mock nodes, call each tool, and keep serving unless ``once``.

    Of several ``relays``, each further one has a mock node of its own; every tool is called by the first.

    This machine's node has the ``kinds`` of installed packages too.
    With ``caller_tools`` it shows how an agent lends a tool instead. Returns whether every call worked.

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
            plan = Plan.below(directory, processes.ports, kinds)
            system = await _started(plan, nodes, relays, processes)
            if ready_file is not None:
                write_atomic(ready_file, json.dumps(_ready_facts(system)) + "\n", PRIVATE)
                stack.callback(ready_file.unlink, missing_ok=True)
            shown = _show_caller_tools(system) if caller_tools else _show_calls(system)
            worked = await processes.during(shown)
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


async def _started(plan: Plan, nodes: int, relays: int, processes: Processes) -> LocalSystem:
    started = time.monotonic()
    _print("Starting an edge of its own on this machine:")
    for line in plan.moved():
        _print(f"  {line}")

    timeout_s = relays * _READY_TIMEOUT_S + nodes // _NODES_STARTED_PER_S
    limit = asyncio.timeout(timeout_s)

    def step(text: str) -> None:
        limit.reschedule(asyncio.get_running_loop().time() + timeout_s)
        _print(f"  {time.monotonic() - started:5.1f} s  {text}")

    try:
        async with limit:
            if relays > 1:
                plan = await start_cluster_server(plan, processes)
                step("cluster     nats-server, for the relays alone")
            system = await start_system(plan, nodes, processes, step)
            more = await start_more_relays(plan, relays - 1, processes, step)
            system = replace(system, mock_nodes=[*system.mock_nodes, *(each.mock_node for each in more)])
            await processes.during(system.until_listed())
    except TimeoutError:
        raise DemoError(f"not ready {timeout_s} s after the last step; {processes.last_lines()}") from None
    return system


_ARGUMENTS: Mapping[str, Mapping[str, Any]] = {
    "invoke": {"message": "hello from the demo"},
    "subscribe": {"interval_ms": 1000},
}
"""What the demo calls each verb with."""


async def _show_calls(system: LocalSystem) -> bool:
    """Call each tool of each node as an agent runtime would that does not trust the relay."""
    # This machine first: its values are the ones that a user can check.
    nodes = [system.real_node, *system.mock_nodes[: _NODES_CALLED - 1]]
    offered = [name for tool in await system.until_listed() if (name := parse(tool.name))]
    worked = True
    async with _guarded(system) as tools:
        several = f"{len(nodes)} nodes" if len(nodes) > 1 else "one node"
        _print(f"\nThe guarded client verifies each node's manifest first. Calling each tool of {several}:")
        for name in (name for node in nodes for name in offered if name.node_id == node):
            tool = f"{name.kind_short}-{name.verb}"
            arguments = {"node": name.node_id, **_ARGUMENTS.get(name.verb, {})}
            started = time.perf_counter()
            try:
                result = await tools.execute(tool, arguments)
                lines = [(f"{label:<8}", line) for label, line in lines_of(result.structured)]
            except RemoteToolError as error:
                worked, lines = False, [("FAILED", str(error))]
            took_ms = (time.perf_counter() - started) * 1000
            where = "this machine" if name.node_id == system.real_node else "mock node"
            _print(f"\n  {tool} {json.dumps(arguments)}\n    {where}, {took_ms:.1f} ms")
            for label, line in lines:
                _print(f"    {label}  {line}")
    return worked


def _guarded(system: LocalSystem) -> RemoteTools:
    plan = system.plan
    return RemoteTools(
        HttpServer(mcp_url(plan.url, KINDS_PATH), BearerToken(system.token)),
        permissions=Permissions(allow=("*",), scopes=frozenset({"tools:call:read_only"})),
        verify_manifests=plan.state.ca / "root.pem",
        kinds=plan.kinds,
        audit=plan.directory / "calls.jsonl",
    )


def _show_how_to_connect(system: LocalSystem) -> None:
    url = mcp_url(system.plan.url, KINDS_PATH)
    header = f"Authorization: Bearer {system.token}"
    _print(f"\nServing until Ctrl-C.\n\n  MCP URL  {url}\n  token    {system.token}\n")
    _print("Paste this to give Claude Code these tools:\n")
    _print(f'  claude mcp add --transport http edge {url} --header "{header}"\n')
    _print(f"The node's own status: curl http://127.0.0.1:{system.plan.loopback_port}/readyz")


def _ready_facts(system: LocalSystem) -> dict[str, object]:
    plan = system.plan
    return {
        "mcp_url": mcp_url(plan.url, KINDS_PATH),
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
_MAX_OTHER = 96
_WORDED = frozenset(
    {"node_id", "ts_ms", "ts", "message", "received_at_ms", "received_at"}
    | {"uptime_s", "cpu", "mem", "load", "disk"}
)


def lines_of(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield ``(label, text)`` for each line of a result; every text is printable.

    An echo and a metrics sample are worded; a member of another kind is shown as it is.
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
            yield name, printable(value if isinstance(value, str) else encoded(value), _MAX_OTHER)


def _gib(count: int) -> str:
    return f"{count / _GIB:.1f} GiB"
