"""What presence changes in its relay, handed in by the composition. Must not know the bucket."""

from collections.abc import Callable
from dataclasses import dataclass

from relay.cluster.presence_entries import NodeEntry


@dataclass(frozen=True, slots=True)
class Effects:
    """What presence changes in this relay.

    Attributes:
        end_superseded: ends the session of a node that has a newer one at the relay that is named.
        show: shows in the lists whether a node is connected elsewhere; False if it is not known yet.
        moved: takes in that another relay may have sent commands to a node.
        history_unknown: takes in whether that is still to be found out: the session's entry is not written.
    """

    end_superseded: Callable[[str, str], None]
    show: Callable[[str, bool], bool]
    moved: Callable[[str], None]
    history_unknown: Callable[[str, bool], None]


ElsewhereHandler = Callable[[str, NodeEntry | None], None]
"""Is called with the entry of a node that has connected to another relay, and with None when it is lost."""
