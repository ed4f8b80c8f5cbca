"""The session of one process of one node: what outlives its connections.

Must not send or receive: that is ``node_link``.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relay.clock import SessionClock
from relay.sessions.connection import NodeConnection
from schemas.delivery import PendingCommands
from schemas.errors import ToolError
from schemas.identity import Identity

AckPayload = Mapping[str, Any]
"""The payload of a ``cmd_ack``."""


@dataclass(slots=True)
class NodeSession:
    """A session. ``link`` is None while its connection is lost.

    Attributes:
        now_ms: the session's time, which the node measures delays by; it goes on when the session is resumed.
        identity: the leaf that the node proved last: in the handshake, or with a manifest since.
        asking: the types of the frames that wait for the certificate authority, one of each at a time.
        leaving: whether the node retires: it is told that it is done before its connection is closed.
    """

    session_id: str
    boot_id: str
    identity: Identity
    link: NodeConnection | None
    now_ms: SessionClock
    pending: PendingCommands[asyncio.Future[AckPayload]] = field(default_factory=PendingCommands)
    rejected_in_a_row: int = 0
    asking: set[str] = field(default_factory=set)
    leaving: bool = False

    def settle(self, msg_id: str, answer: AckPayload) -> None:
        """Hand ``answer`` to whoever waits for it, once."""
        waiter = self.pending.pop(msg_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(answer)

    def fail_all(self, error: ToolError) -> None:
        """End every command that is not answered with ``error``."""
        for msg_id in self.pending:
            waiter = self.pending.pop(msg_id)
            if waiter is not None and not waiter.done():
                waiter.set_exception(error)
