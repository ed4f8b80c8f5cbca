"""The hops of a call behind its agent: the relay, the node's session, the node. Must not decide anything."""

from enum import StrEnum

from schemas.errors import Failure, ToolError


class Hop(StrEnum):
    """Where a call failed; the value is fit for a counter's label.

    RELAY: it was refused or failed here. SESSION: it could not be delivered. NODE: it was sent, and the node
    did not answer in time, or with an error, or with a result that is not valid.
    """

    RELAY = "relay"
    SESSION = "session"
    NODE = "node"


_HOPS = {
    Failure.NODE_OFFLINE: Hop.SESSION,
    Failure.ATTESTATION_FAILED: Hop.SESSION,
    Failure.DEADLINE_EXCEEDED: Hop.NODE,
}


def hop_of(error: BaseException) -> Hop:
    """Return where a command failed for which a ``NodeRouter`` raised ``error``."""
    return _HOPS.get(error.failure, Hop.RELAY) if isinstance(error, ToolError) else Hop.RELAY
