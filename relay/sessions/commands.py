"""A command on its way to a node: its payload, its frame, and how it is sent to a node that reads slowly.

Must not know sessions: ``node_sessions`` pairs commands with answers.
"""

import asyncio
from contextlib import suppress

from starlette.websockets import WebSocketDisconnect

from relay.routing.port import Command
from relay.sessions.connection import NodeConnection
from schemas.errors import Failure, ToolError
from schemas.payloads import Cmd
from schemas.session import ProtocolError


def cmd_payload(command: Command, sent_at_ms: int) -> Cmd:
    """Return the payload of the ``cmd`` for ``command``; ``sent_at_ms`` is the session's time."""
    payload: Cmd = {
        "tool": command.tool,
        "arguments": command.arguments,
        "deadline_ms": command.deadline_ms,
        "sent_at_ms": sent_at_ms,
        "correlation_id": command.correlation_id,
    }
    if command.traceparent is not None:
        payload["traceparent"] = command.traceparent
    return payload


def command_text(connection: NodeConnection, msg_id: str, payload: Cmd) -> str:
    """Return the frame of a command that is about to be sent.

    Raises:
        ToolError: INTERNAL, it does not fit one.
    """
    connection.meter.expect_answer()
    try:
        return connection.encoded("cmd", payload, msg_id)
    except ProtocolError as error:
        # Arguments within their schema fit a frame; in any case, nothing was sent.
        raise ToolError(Failure.INTERNAL, "The command does not fit a frame.") from error


async def send_text(connection: NodeConnection, text: str, deadline_ms: int) -> None:
    """Send a command, and wait for the node to read what was sent before until its deadline."""
    # Part of it may have been sent. The same process may still resume before the deadline.
    with suppress(TimeoutError, WebSocketDisconnect):
        async with asyncio.timeout(deadline_ms / 1000):
            await connection.send_text(text)
