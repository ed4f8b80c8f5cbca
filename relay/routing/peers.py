"""The interface by which packages above ask other relays of the fleet. ``relay.cluster`` implements it.

Must not know what is asked, nor how it travels.
"""

from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Protocol

from schemas.error_roots import PeerError

PeerHandler = Callable[[str, Mapping[str, Any]], Awaitable[Mapping[str, Any]]]
"""Answers a body that fits the document of its kind, from the relay named first. It may raise ToolError."""


class NoResponderError(PeerError):
    """No relay answers a subject, or there is no connection: the request was never delivered."""


class Peers(Protocol):
    """The other relays of the fleet, each by the id of its process: a ULID, in upper case.

    Attributes:
        relay: this relay's own.
    """

    relay: str

    def running(self) -> Collection[str]:
        """Return the other relays that run, as far as is known."""
        ...

    def relay_of(self, node_id: str) -> str | None:
        """Return the relay that a node is connected to, this one included; None if to none that is known."""
        ...

    def answer(self, kind: str, handler: PeerHandler) -> None:
        """Answer by ``handler`` what others ask of that kind.

        Raises:
            ValueError: the kind has a handler.
        """
        ...

    async def ask(
        self, relay: str, kind: str, body: Mapping[str, Any], timeout_s: float
    ) -> Mapping[str, Any]:
        """Return what ``relay`` answers. Cancelling cancels it there.

        Raises:
            NoResponderError: it was not delivered: there is no such relay, or no connection.
            TimeoutError: no answer in time; it may have been delivered.
            ToolError: as the handler there has raised it, without its text; INTERNAL, if it was no answer;
                ARGUMENTS_INVALID, if ``body`` is too large to be sent.
        """
        ...
