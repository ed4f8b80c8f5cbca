"""What can happen in the model, and how often a random walk lets it happen."""

from enum import Enum, auto
from typing import NamedTuple


class Action(Enum):
    """What can happen."""

    CALL = auto()
    CANCEL = auto()
    TO_NODE = auto()
    TO_RELAY = auto()
    SEND_AGAIN = auto()
    FINISH = auto()
    WAIT = auto()
    CONNECT = auto()
    HEARTBEAT = auto()
    CUT = auto()
    NODE_NOTICES = auto()
    RELAY_NOTICES = auto()
    FORGE = auto()
    NODE_CRASHES = auto()
    RELAY_CRASHES = auto()
    SHUT_OUT = auto()
    COME_TO_REST = auto()


class Choice(NamedTuple):
    """What happens next; ``pick`` chooses among several to which it can happen."""

    action: Action
    pick: int


WEIGHTS = {
    Action.CALL: 14,
    Action.CANCEL: 0.5,
    Action.TO_NODE: 36,
    Action.TO_RELAY: 30,
    Action.SEND_AGAIN: 10,
    Action.FINISH: 8,
    Action.WAIT: 5,
    Action.CONNECT: 10,
    Action.HEARTBEAT: 2,
    Action.CUT: 2,
    Action.NODE_NOTICES: 6,
    Action.RELAY_NOTICES: 4,
    Action.FORGE: 3,
    Action.NODE_CRASHES: 0.3,
    Action.RELAY_CRASHES: 0.1,
    Action.SHUT_OUT: 0.2,
    Action.COME_TO_REST: 0.5,
}
"""By hand: a world that mostly crashes shows little of what it would do."""
