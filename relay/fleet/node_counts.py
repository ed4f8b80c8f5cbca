"""How many nodes are in which state: kept as nodes change, so that to read a number costs nothing.

What ends by time changes when the index settles. Must not change a node.
"""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import TypeVar

from relay.fleet.node_record import NodeState, Standing

KeyT = TypeVar("KeyT", bound=Hashable)


class NodeCounts:
    """The numbers of nodes by their states.

    Attributes:
        expected: how many have announced themselves and are not retired.
    """

    def __init__(self) -> None:
        self.expected = 0
        self._announced: Counter[int] = Counter()
        self._of_tenants: dict[Standing, Counter[str]] = {standing: Counter() for standing in Standing}

    def change(self, before: NodeState | None, after: NodeState | None) -> None:
        """Take in that the state of a node has changed; None: it was not counted, or is no longer."""
        if before != after:
            self._add(before, -1)
            self._add(after, 1)

    def announced_in(self, subscription: int) -> int:
        """Return of how many of those expected the broker has sent an announce in ``subscription``."""
        return self._announced[subscription]

    def of_tenants(self, standing: Standing) -> Mapping[str, int]:
        """Return how many nodes of each tenant are in ``standing``; tenants without any are not in it."""
        return self._of_tenants[standing]

    def _add(self, state: NodeState | None, by: int) -> None:
        if state is None:
            return
        if state.standing is not None:
            _add(self._of_tenants[state.standing], state.tenant, by)
        if state.announced_in is not None:
            self.expected += by
            _add(self._announced, state.announced_in, by)


def _add(counts: Counter[KeyT], key: KeyT, by: int) -> None:
    counts[key] += by
    if not counts[key]:
        del counts[key]  # else each tenant and each subscription that ever was would stay
