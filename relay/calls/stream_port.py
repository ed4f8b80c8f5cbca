"""The ports by which MCP reaches what streams: nodes' telemetry, and the events of callers' sessions.

``relay.streams`` implements them, and ``relay.server`` connects both. Must not know how a sample or an event
is made.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from pydantic_core import from_json

from relay.auth.agent_tokens import Principal
from schemas.error_roots import PeerError

Place = tuple[str, str | None]
"""A node, and the capability that is named; None for any."""
Notify = Callable[[], None]


class TelemetryQueryError(PeerError):
    """The query is malformed. The text says what is allowed, and nothing of what was given."""


class NodeTelemetry(Protocol):
    """The resource ``node://{node_id}/telemetry`` of every node.

    Each method raises UnknownNodeError if there is no such node for ``principal``, but for ``follow``.
    """

    def place_of(self, principal: Principal, uri: str) -> Place | None:
        """Return what ``uri`` names, however it is spelled; None if it is not one of these."""

    async def read(self, principal: Principal, uri: str) -> str | None:
        """Return the content as JSON; None if there is no stream, or ``uri`` is not one of these.

        Raises:
            TelemetryQueryError: the query is malformed.
        """

    def follow(self, principal: Principal, uri: str, notify: Notify) -> Callable[[], None] | None:
        """Call ``notify`` after every update; return what ends that, or None if there is no such resource.

        There need not be a stream yet. Ending it ends the agent's subscription, if this was its last way to
        follow the node.
        """


LOGGER = "oubliette.session"
LEVEL = "info"

SendEvent = Callable[[str], Awaitable[bool]]
"""Sends an event, which is JSON; returns whether the client wants such."""


def log_message(event: str) -> tuple[str, dict[str, Any]]:
    """Return the notification that carries an event, which is JSON: its method and its parameters."""
    return "notifications/message", {"level": LEVEL, "logger": LOGGER, "data": from_json(event)}


class SessionEvents(Protocol):
    """The events of callers' sessions, each sent on the event stream of an MCP session of the old era."""

    def attach(self, stream_id: str, send: SendEvent) -> None:
        """Note an MCP session, on whose event stream ``send`` sends."""

    def detach(self, stream_id: str) -> None:
        """Note that an MCP session has ended."""

    def opened(self, stream_id: str, principal: Principal) -> None:
        """Note that ``principal`` has opened the event stream."""

    def renewed(self, stream_id: str, principal: Principal) -> None:
        """Note that the caller uses another token in the MCP session now."""

    def closed(self, stream_id: str) -> None:
        """Note that the client has closed the event stream: a caller that has no other way is gone."""
