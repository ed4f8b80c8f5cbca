"""What the presence bucket has of a node, and what is known by it of another relay."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NodeEntry:
    """What the bucket has of one node: the ``session_id`` that began last, at which ``relay``."""

    relay: str
    session_id: str
    connected: bool
    revision: int


@dataclass(frozen=True, slots=True)
class OtherRelay:
    """Another relay that runs.

    Attributes:
        nodes: how many are connected to it.
        seen_s: how long ago its lease was renewed, in seconds in which leases were read.
    """

    relay: str
    nodes: int
    seen_s: float
