"""The interfaces by which the packages above the sessions reach nodes: commands, and one-way frames.

The sessions of this process are the first implementation. ``relay.cluster.commands`` is the second: it sends
a command over a network to the relay that holds the node's session. Must not know agents.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from relay.routing.answer import CommandAnswer
from schemas.frame_types import OneWayType
from schemas.payloads import CmdAck


@dataclass(frozen=True, slots=True)
class Idempotency:
    """The idempotency key of a call, for the relay that keeps the keys of the node's calls.

    Attributes:
        caller: issuer, tenant and subject of the agent that chose the key.
        key: the SHA-256 of the key, hex.
        arguments: the SHA-256 of the arguments in canonical form, hex.
        repeatable: whether the tool is idempotent: it may be sent again while its outcome is not known.
    """

    caller: tuple[str, str, str]
    key: str
    arguments: str
    repeatable: bool


class Command(NamedTuple):
    """One command to a node.

    Attributes:
        tool: the canonical name.
        deadline_ms: the budget from now.
        correlation_id: the ULID, in upper case, of the call that this command is for, and of no other.
        cost: how much it counts towards the rate of its capability.
        idempotency: None if the call has no idempotency key.
        caller: the digest of the agent whose call it is; None if that is not known.
    """

    node_id: str
    tool: str
    arguments: Mapping[str, Any]
    deadline_ms: int
    correlation_id: str
    traceparent: str | None = None
    cost: float = 1.0
    idempotency: Idempotency | None = None
    caller: str | None = None


class NodeRouter(Protocol):
    """Sends commands to nodes."""

    async def run(self, command: Command) -> CmdAck:
        """Return the payload of the node's ``cmd_ack``.

        Cancelling cancels the command on the node.

        Raises:
            ToolError: NODE_OFFLINE or RATE_LIMITED, then it was never sent; DEADLINE_EXCEEDED, then it may
                have run.
        """
        ...


class LocalRouter(ABC):
    """A ``NodeRouter`` of this process's own nodes, which need not be awaited."""

    @abstractmethod
    def start(self, command: Command) -> CommandAnswer:
        """Send ``command`` and return what its answer will be.

        Raises:
            ToolError: it was not sent; other errors are the answer's.
        """

    async def run(self, command: Command) -> CmdAck:
        """Send ``command`` and return the node's answer, as ``NodeRouter`` describes."""
        return await self.start(command)


@dataclass(frozen=True, slots=True)
class NodeRef:
    """A node by the session that it has: of two references that differ in it, the later one is current."""

    tenant: str
    node_id: str
    session_id: str


FrameHandler = Callable[[NodeRef, Any], None]
"""Handles the payload of a frame, which has the type in ``payloads`` named for it. Must not block."""
ConnectionHandler = Callable[[NodeRef, bool], None]
"""Is called with True when a node has connected, and with False when its connection is lost."""
AnnounceHandler = Callable[[NodeRef], None]
"""Is called when a manifest of a connected node was accepted over its session."""


class NodeFrames(Protocol):
    """Sends one-way frames to nodes, and hands over those that nodes send."""

    def send(self, node_id: str, frame_type: OneWayType, payload: Mapping[str, Any]) -> None:
        """Queue a frame for the node. It is lost with the connection: nothing is sent again.

        Raises:
            ToolError: NODE_OFFLINE if there is no connection; RATE_LIMITED if the node does not read, or the
                frame exceeds the rate of its type; INTERNAL if it is larger than its type allows.
        """
        ...

    def on_frame(self, frame_type: OneWayType, handler: FrameHandler) -> None:
        """Call ``handler`` with every frame of that type.

        Raises:
            ValueError: the type has a handler.
        """
        ...

    def on_connection(self, handler: ConnectionHandler) -> None:
        """Call ``handler`` whenever a node connects, a resumed session included, and when it is lost.

        A node that reconnects before its loss was noticed is connected twice in a row.
        """
        ...

    def on_announce(self, handler: AnnounceHandler) -> None:
        """Call ``handler`` whenever a manifest was accepted over a session, after it was acknowledged."""
        ...
