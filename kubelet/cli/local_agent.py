"""``kubelet mcp``: the command that an agent on this machine starts as its MCP server.

Must not import the MCP SDK before the command runs: it is in an extra that a daemon does without.
"""

import re
import signal
import sys
from typing import Annotated

import typer

from kubelet.cli.options import Socket, StateDir, agent_socket, contract_of_settings, directory_of
from kubelet.process import fail
from schemas.process.command_errors import EXIT_CANNOT_RUN, EXIT_USAGE
from schemas.text import printable

_SHOWN = 64


def mcp(
    socket: Socket = None,
    session: Annotated[
        str | None, typer.Option(metavar="ID", help="The one session whose tools to show.")
    ] = None,
    state_dir: StateDir = None,
) -> None:
    """Serve MCP to an agent on this machine: its own tools, and those that a caller lends.

    Speaks MCP on standard input and output, and connects to the daemon's socket: by default the one beside
    the state directory, or else that of the service. The agent's user has to be a member of the group
    edge-kubelet.

    A lent tool is named CALLER_TOOL, and is listed while its caller has a session with this node. Without
    --session the tools are those of the one live session; while there are two, none is listed.

    Needs an extra: pip install 'edge-kubelet[agent]'.
    """
    from schemas.caller_tools import SESSION_ID_PATTERN  # noqa: PLC0415 - for this command alone

    if session is not None and re.fullmatch(SESSION_ID_PATTERN, session) is None:
        wanted = "the id of a session, for example gogol_20261122_093000_1a2b3c4d"
        fail(f"--session {printable(session, _SHOWN)!r} is not {wanted}", EXIT_USAGE)
    try:
        from kubelet.local_agent.assembly import run_local_agent  # noqa: PLC0415
    except ModuleNotFoundError as error:
        remedy = "pip install 'edge-kubelet[agent]', or kubelet-mcp of the Debian package edge-kubelet-agent"
        fail(f"{error.name} is not installed: {remedy}", EXIT_CANNOT_RUN)
    import asyncio  # noqa: PLC0415

    from kubelet.daemon.composition import make_handlers  # noqa: PLC0415

    directory = directory_of(state_dir)
    # The system's default ends the process at once: a read of standard input cannot be interrupted.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    place, contract = agent_socket(socket, directory), contract_of_settings(directory)
    asyncio.run(run_local_agent(place, session, directory, make_handlers, contract, sys.stderr))
