"""Why a tool that is named in a call does not exist. Must not reveal another tenant's nodes.

After its start a relay does not know yet what its nodes announce: that arrives with their sessions, or from
the broker. Which nodes there are it knows from the CA's ledger: a call of one of them is to be made again.
"""

from collections.abc import Callable

from relay.fleet.node_record import NodeRecord
from schemas.errors import Failure, ToolError

OFFLINE_FIX = "Call again after retry_after_ms. If the node stays offline, ask its operator to check it."
"""What the caller is told to do."""
_RETRY_MS = 1_000


class Absences:
    """The errors for calls of tools that nodes do not announce.

    ``awaited_until_ms``: until then a node that has not announced itself since the relay's start is awaited.

    Attributes:
        enrolled_tenant: returns the tenant of a node that has a leaf which is not revoked, as the CA's ledger
            has it; None of any other.
    """

    def __init__(self, now_ms: Callable[[], int], awaited_until_ms: int) -> None:
        self._now_ms = now_ms
        self.awaited_until_ms = awaited_until_ms
        self.enrolled_tenant: Callable[[str], str | None] = lambda _: None

    def error(self, node_id: str, node: NodeRecord | None, tenant: str, *, kind_known: bool) -> ToolError:
        """Return the error for a caller of ``tenant`` that named a tool that the node does not have.

        A node of another tenant is as one that exists nowhere. ``node`` is None if none is known of the id.
        """
        if tenant != (node.tenant if node is not None else self.enrolled_tenant(node_id)):
            return ToolError(Failure.SAFETY_DENIED)
        if node is not None and node.leaf_dropped:
            return ToolError(Failure.ATTESTATION_FAILED)
        if node is not None and node.manifest is not None:
            return ToolError(Failure.NAME_UNKNOWN if kind_known else Failure.KIND_UNSUPPORTED)
        if self._is_awaited(node_id, node):
            return ToolError(
                Failure.NODE_OFFLINE,
                "The node has not announced its tools since this relay was started; nothing was sent.",
                fix=OFFLINE_FIX,
                retry_after_ms=_RETRY_MS,
            )
        is_rejected = node is not None and node.rejected
        return ToolError(Failure.MANIFEST_INVALID if is_rejected else Failure.MANIFEST_NOT_FOUND)

    def _is_awaited(self, node_id: str, node: NodeRecord | None) -> bool:
        """Return whether its manifest may be on the way: what a broker retains may be one that is too old."""
        if node is not None and (node.has_announced or (node.connected and node.rejected)):
            return False  # it was there, and was withdrawn; or it was refused
        return self.enrolled_tenant(node_id) is not None and self._now_ms() < self.awaited_until_ms
