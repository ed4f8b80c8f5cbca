"""Finds the node that a caller names, and whether a session's node is still the one that it was opened with.

Must not decide what a caller may do: a token without the scope does not reach this package.
"""

from dataclasses import dataclass

from relay.fleet.fleet import Fleet
from relay.fleet.node_names import UnknownNodeError
from relay.fleet.node_record import NodeRecord
from relay.fleet.selection import Selection
from schemas.errors import Failure, ToolError

_NOT_SELECTED = "The URL of this connection leaves the node out."


@dataclass(frozen=True, slots=True)
class SessionNode:
    """A node with which a session can be opened; ``key`` is its public key."""

    node_id: str
    key: bytes


class Nodes:
    """The nodes of one relay, as sessions need them."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def find(self, tenant: str, reference: str, selection: Selection) -> SessionNode:
        """Return the connected node of ``tenant`` that ``reference`` names: an id, a label or a prefix.

        One that ``selection`` leaves out does not exist.

        Raises:
            ToolError: SAFETY_DENIED for one of another tenant as for one that does not exist; NODE_OFFLINE.
        """
        try:
            node_id = self._fleet.names.resolve(tenant, reference)
        except UnknownNodeError as error:
            text = "There is no such node."
            raise ToolError(Failure.SAFETY_DENIED, text, told=error.headline, fix=f"{error}.") from None
        if not selection.admits_node(self._fleet.names, tenant, node_id):
            raise ToolError(Failure.SAFETY_DENIED, _NOT_SELECTED)
        record = self._fleet.session_node(tenant, node_id)
        newest = max(record.identities.values(), key=lambda leaf: leaf.not_before_ms)
        return SessionNode(node_id, newest.public_key)

    def is_trusted(self, tenant: str, node_id: str, key: bytes) -> bool:
        """Return whether the node is still of ``tenant``, with a trusted leaf of the same key."""
        record = self._fleet.node_of(tenant, node_id)
        return record is not None and key in _keys(record) and not self._fleet.is_hidden(node_id)


def _keys(record: NodeRecord) -> set[bytes]:
    return {leaf.public_key for leaf in record.identities.values()}
