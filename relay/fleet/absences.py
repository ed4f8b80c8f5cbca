"""Why a tool that is named in a call does not exist. Must not reveal another tenant's nodes."""

from relay.fleet.node_record import NodeRecord
from schemas.errors import Failure, ToolError


def absence(node: NodeRecord | None, tenant: str, *, kind_known: bool) -> ToolError:
    """Return the error for a caller of ``tenant`` that named a tool that ``node`` does not have.

    A node of another tenant is as one that exists nowhere.
    """
    if node is None or node.tenant != tenant:
        return ToolError(Failure.SAFETY_DENIED)
    if node.leaf_dropped:
        return ToolError(Failure.ATTESTATION_FAILED)
    if node.manifest is None:
        return ToolError(Failure.MANIFEST_INVALID if node.rejected else Failure.MANIFEST_NOT_FOUND)
    return ToolError(Failure.NAME_UNKNOWN if kind_known else Failure.KIND_UNSUPPORTED)
