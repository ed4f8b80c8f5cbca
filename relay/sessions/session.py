"""The session of one process of one node, which outlives its connections.

Must not send or receive: ``connection`` does.
"""

from dataclasses import dataclass, field

from relay.routing.answer import CommandAnswer
from relay.sessions.connection import NodeConnection
from relay.settings.environment import SessionClock
from schemas.delivery import PendingCommands
from schemas.errors import ToolError
from schemas.identity import Identity
from schemas.payloads import CmdAck


@dataclass(slots=True)
class NodeSession:
    """A session. ``connection`` is None while it is lost.

    Attributes:
        now_ms: the session's time, by which the node measures delays; it continues when it is resumed.
        identity: the leaf that the node proved last, in the handshake or with a manifest.
        heartbeat_interval_ms: what the node was last asked for.
        ca_requests: the types of the frames that wait for the certificate authority, one of each at a time.
        is_retiring: whether the node retires: it gets the acknowledgement before its connection is closed.
    """

    session_id: str
    boot_id: str
    identity: Identity
    connection: NodeConnection | None
    now_ms: SessionClock
    pending: PendingCommands[CommandAnswer] = field(default_factory=PendingCommands)
    rejected_in_a_row: int = 0
    heartbeat_interval_ms: int = 0
    ca_requests: set[str] = field(default_factory=set)
    is_retiring: bool = False

    def is_resumed_by(self, boot_id: str, resume: str | None) -> bool:
        """Return whether the process ``boot_id`` resumes this session: the same process, which names it."""
        return self.boot_id == boot_id and self.session_id == resume

    def settle(self, msg_id: str, answer: CmdAck) -> None:
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
