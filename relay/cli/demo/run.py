"""``relay demo``: runs a whole system on this machine, and calls its tools through the guarded client.

Must not start processes: ``local_system`` does. Everything is removed when it ends.
"""

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from relay.cli.demo.caller_tools import show_round_trip
from relay.cli.demo.local_system import LocalSystem, start_system
from relay.cli.demo.more_relays import start_cluster_server, start_more_relays
from relay.cli.demo.plan import Plan
from relay.cli.demo.processes import Processes
from relay.cli.demo.result_view import lines_of
from relay.http.connections import Bounds
from relay.remote_tools import BearerToken, HttpServer, Permissions, RemoteToolError, RemoteTools
from schemas.addresses import KINDS_PATH, mcp_url
from schemas.error_roots import OperatorError
from schemas.files import PRIVATE, write_atomic
from schemas.process.resources import raise_open_files_limit
from schemas.projection import parse
from schemas.tls import client_context

_READY_TIMEOUT_S = 60
"""For each relay."""
_NODES_STARTED_PER_S = 25
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

    def step(text: str) -> None:
        _print(f"  {time.monotonic() - started:5.1f} s  {text}")

    timeout_s = relays * _READY_TIMEOUT_S + nodes // _NODES_STARTED_PER_S
    try:
        async with asyncio.timeout(timeout_s):
            if relays > 1:
                plan = await start_cluster_server(plan, processes)
                step("cluster     nats-server, for the relays alone")
            system = await start_system(plan, nodes, processes, step)
            more = await start_more_relays(plan, relays - 1, processes, step)
            system = replace(system, mock_nodes=[*system.mock_nodes, *(each.mock_node for each in more)])
            await processes.during(system.until_listed())
    except TimeoutError:
        raise DemoError(f"not ready after {timeout_s} s; {processes.last_lines()}") from None
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
