"""What an operator sees of the connection to the relay. Must not decide what follows from it."""

from enum import Enum


class LinkState(Enum):
    """What an operator sees of the connection."""

    CONNECTING = "connecting"
    OPEN = "open"
    ANNOUNCED = "announced"
    WRONG_AUDIENCE = "the relay has another name than the one pinned: check the first --relay"
    REFUSED = "the relay does not accept this node's identity: install a certificate"
    REVOKED = "revoked: an operator must enrol this node again"
    SUPERSEDED = "another machine uses this identity"
