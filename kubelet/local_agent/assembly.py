"""``kubelet mcp`` put together: the one place where its parts meet the clock, the disk and the socket.

Must not hold behaviour of its own.
"""

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TextIO

from structlog.typing import FilteringBoundLogger

from kubelet.backoff import NodeBackoff
from kubelet.handlers.base import Handler
from kubelet.local_agent.agent_tools import AgentTools, OwnTools
from kubelet.local_agent.daemon_client import DaemonClient
from kubelet.local_agent.mcp_server import McpServer
from kubelet.local_agent.toolbox import Toolbox
from kubelet.process import now_ms
from schemas.files import read_state
from schemas.identity_files import IdentityFiles
from schemas.process.logs import fatal_errors_logged, opened
from schemas.projection import is_node_id
from schemas.registry import Contract
from schemas.ulids import UlidSource

_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 5.0

MakeHandlers = Callable[[str, FilteringBoundLogger, Contract], Sequence[Handler]]


async def run_local_agent(  # noqa: PLR0913, PLR0917 - what comes in from outside
    socket: Path,
    session_id: str | None,
    state_dir: Path,
    make_handlers: MakeHandlers,
    contract: Contract,
    stream: TextIO,
) -> None:
    """Serve MCP on standard input and output until the input ends. ``contract`` has the node's own kinds.

    Raises:
        FailedError: it has failed.
    """
    with opened("kubelet", stream) as (log, _lines), fatal_errors_logged(log):
        ulids = UlidSource(now_ms, os.urandom)

        def make_own(node_id: str) -> OwnTools:
            handlers = make_handlers(node_id, log, contract)
            return OwnTools(node_id, handlers, contract.registry, contract.kinds, ulids, now_ms, log)

        toolbox = Toolbox(log)
        tools = AgentTools(toolbox, make_own, ulids.new)
        backoff = NodeBackoff(random.Random(), _FIRST_WAIT_S, _LONGEST_WAIT_S)  # noqa: S311 - jitter, not a secret
        daemon = DaemonClient(socket, session_id, tools, backoff, log)
        server = McpServer(
            toolbox.entries,
            lambda name, arguments: tools.call(daemon, name, arguments),
            version("edge-kubelet"),
        )
        toolbox.on_change(server.list_changed)
        # Without the daemon, and without any network: the node's own tools are there at once.
        if (node_id := _own_node_id(state_dir)) is not None:
            tools.node_known(node_id)
        connecting = asyncio.create_task(daemon.run())
        serving = asyncio.create_task(server.run())
        try:
            await asyncio.wait([connecting, serving], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (connecting, serving):
                task.cancel()
            await asyncio.gather(connecting, serving, return_exceptions=True)
            await tools.close()
        for task in (connecting, serving):
            if not task.cancelled():
                task.result()


def _own_node_id(state_dir: Path) -> str | None:
    """Return the id of the node whose state this is, if this user may read it; else the daemon knows it."""
    try:
        node_id = read_state(IdentityFiles(state_dir).node_id).decode("ascii", "replace").strip()
    except OSError:
        return None
    return node_id if is_node_id(node_id) else None
