"""The interface by which the call gateway sends commands to nodes.

The sessions of this process are the first implementation. Another could send the command over a network to
the relay that holds the node's session. Must not know agents.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Command:
    """One command to a node.

    Attributes:
        tool: the canonical name.
        deadline_ms: the budget from now.
        correlation_id: the ULID, in upper case, of the call that this command is for, and of no other.
    """

    node_id: str
    tool: str
    arguments: Mapping[str, Any]
    deadline_ms: int
    correlation_id: str
    traceparent: str | None = None


class NodeRouter(Protocol):
    """Sends commands to nodes."""

    async def run(self, command: Command) -> Mapping[str, Any]:
        """Return the payload of the node's ``cmd_ack``: ``{ok, result}`` or ``{ok, error}``.

        Cancelling cancels the command on the node.

        Raises:
            ToolError: NODE_OFFLINE or RATE_LIMITED, then it was never sent; DEADLINE_EXCEEDED, then it may
                have run.
        """
        ...
