"""Names nodes as the operator does, and forgets those that are retired. Must not decide who is retired."""

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from relay.fleet.fleet import Fleet
from relay.fleet.name_ledger import NameLedger, NodeName
from relay.fleet.shared_names import SharedNames


class NameChanges(NamedTuple):
    """What the ledger of names says.

    Attributes:
        names: of the nodes whose names differ from those in effect; None is no name.
        forgotten: the nodes that are to be forgotten once they are retired.
    """

    names: Mapping[str, NodeName | None]
    forgotten: AbstractSet[str]


class WatchedNames:
    """The nodes' names as a ``relay.watched_ledger.WatchedLedger``."""

    name = "names"
    kinds = (SharedNames.kind,)

    def __init__(self, ledger: NameLedger, fleet: Fleet, log: FilteringBoundLogger) -> None:
        self._ledger = ledger
        self._fleet = fleet
        self._log = log
        self._forgotten: AbstractSet[str] = frozenset()
        self._retired: frozenset[str] = frozenset()

    def stamp(self) -> object:
        """Return what differs after every change."""
        return self._ledger.stamp

    def read(self) -> NameChanges:
        """Return what has changed: comparing the names of thousands of nodes takes a millisecond or more."""
        names = self._ledger.read()
        return NameChanges(self._fleet.names.differences(names.by_node), names.forgotten)

    def begin(self, changes: NameChanges) -> None:
        """Take the names that were given before the relay was started."""
        self._forgotten = changes.forgotten
        self._fleet.rename(changes.names)
        self.retire(self._retired)

    def apply(self, changes: NameChanges) -> None:
        """Take the names that were given since, and log them."""
        self.begin(changes)
        for node_id, name in changes.names.items():
            self._log.info("node named", node_id=node_id, tags=name.tags if name is not None else ())

    def retire(self, retired: frozenset[str]) -> None:
        """List the nodes that are ``retired`` no longer, and forget those that are to be forgotten."""
        self._retired = retired
        # A node that was issued another leaf since it was forgotten is not retired.
        self._fleet.retire(retired, retired & self._forgotten)
