"""The session of one process of one node, which outlives its connections.

Must not send or receive: ``connection`` does.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relay.clock import SessionClock
from relay.routing.port import Command
from relay.sessions.connection import NodeConnection
from schemas.delivery import PendingCommands
from schemas.errors import ToolError
from schemas.identity import Identity
from schemas.payloads import Cmd

AckPayload = Mapping[str, Any]
"""The payload of a ``cmd_ack``."""
Answer = asyncio.Future[AckPayload | None]
"""The answer to a command; None if its deadline passed before."""


@dataclass(slots=True)
class NodeSession:
    """A session. ``connection`` is None while it is lost.

    Attributes:
        now_ms: the session's time, by which the node measures delays; it continues when it is resumed.
        identity: the leaf that the node proved last, in the handshake or with a manifest.
        ca_requests: the types of the frames that wait for the certificate authority, one of each at a time.
        is_retiring: whether the node retires: it gets the acknowledgement before its connection is closed.
    """

    session_id: str
    boot_id: str
    identity: Identity
    connection: NodeConnection | None
    now_ms: SessionClock
    pending: PendingCommands[Answer] = field(default_factory=PendingCommands)
    rejected_in_a_row: int = 0
    ca_requests: set[str] = field(default_factory=set)
    is_retiring: bool = False

    def is_resumed_by(self, boot_id: str, resume: str | None) -> bool:
        """Return whether the process ``boot_id`` resumes this session: the same process, which names it."""
        return self.boot_id == boot_id and self.session_id == resume

    def settle(self, msg_id: str, answer: AckPayload) -> None:
        """Give ``answer`` to the command that waits for it, once."""
        waiter = self.pending.pop(msg_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def fail_all(self, error: ToolError) -> None:
        """Fail every unanswered command with ``error``."""
        for msg_id in self.pending:
            waiter = self.pending.pop(msg_id)
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)


def unanswered(loop: asyncio.AbstractEventLoop) -> Answer:
    """Return what a command waits for."""
    return loop.create_future()


def expire(answer: Answer) -> None:
    """Note that the deadline has passed, unless there is an answer."""
    if not answer.done():
        answer.set_result(None)


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
