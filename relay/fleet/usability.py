"""May this node be used now? One ordered table of reasons against it, each with the error that a caller gets.

``fleet.resolve(name, rights)`` returns a tool, or raises the error of the first reason that holds; lists
leave out the nodes of every ``Decision``. After its start a relay does not know yet what its nodes announce;
which nodes there are it knows from the CA's ledger: a call of one of them is to be made again.

A new decision of the operator's is a member of ``Decision``, a row, and what applies it in
``relay.server.decisions``. A node that the caller does not reach is as one that does not exist.
"""

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Literal, NamedTuple

from relay.auth.permissions import Rights
from relay.fleet.node_record import NodeRecord
from relay.fleet.tools import Tool
from schemas.errors import Failure, ToolError
from schemas.times import ValidityClock

OFFLINE_FIX = "Call again after retry_after_ms. If the node stays offline, ask its operator to check it."
_RETRY_MS = 1_000


class Decision(StrEnum):
    """What the operator has decided of some nodes: they and their tools are in no list while it holds."""

    RETIRED = "retired"
    """All leaves of the node are revoked."""


UseKind = Literal["tool", "absent tool", "session"]
"""What a caller asks of a node: a tool that it announces, one that it does not, or a session with it."""


class NodeUse(NamedTuple):
    """A use of a node.

    Attributes:
        node: what is known of it; None if nothing is.
        rights: the caller's; for a session the node was found among those of the caller's tenant.
        tool: the one that is announced and meant.
        kind_known: whether a tool that is not announced is of a kind that the relay knows.
    """

    node_id: str
    node: NodeRecord | None
    rights: Rights
    tool: Tool | None = None
    kind_known: bool = True


class UseReason(NamedTuple):
    """A reason ``against`` some uses of a node, and its error; ``decision``: it is one of the operator's."""

    against: tuple[UseKind, ...]
    holds: "Callable[[Usability, NodeUse], bool]"
    error: Callable[[NodeUse], ToolError]
    decision: Decision | None = None


class Usability:
    """Decides by ``REASONS``.

    ``awaited_until_ms``: until then a node that has not announced itself since the relay's start is awaited.

    Attributes:
        decided: the nodes of each decision.
        admits: returns whether a node of the tenant is one that the rights of a caller are for.
        enrolled_tenant: returns the tenant of a node that has a leaf which is not revoked, as the CA's ledger
            has it; None of any other.

    Raises:
        ValueError: a decision has no reason against every use.
    """

    def __init__(
        self,
        now_ms: ValidityClock,
        awaited_until_ms: int,
        decided: Mapping[Decision, frozenset[str]],
        admits: Callable[[Rights, str], bool],
    ) -> None:
        self.now_ms = now_ms
        self.admits = admits
        self.awaited_until_ms = awaited_until_ms
        self.decided = decided
        self.enrolled_tenant: Callable[[str], str | None] = lambda _: None
        kinds: tuple[UseKind, ...] = ("tool", "absent tool", "session")
        # Each call asks: what cannot hold of an announced tool is not asked of one.
        self._against = {
            kind: [(reason.holds, reason.error) for reason in REASONS if kind in reason.against]
            for kind in kinds
        }
        for kind in ("tool", "session"):
            if missing := set(Decision) - {reason.decision for reason in REASONS if kind in reason.against}:
                raise ValueError(f"decisions without a reason: {', '.join(sorted(missing))}")

    def error(self, kind: UseKind, use: NodeUse) -> ToolError | None:
        for holds, error in self._against[kind]:
            if holds(self, use):
                return error(use)
        return None

    def is_awaited(self, use: NodeUse) -> bool:
        """Return whether its manifest may be on the way: what a broker retains may be one that is too old."""
        node = use.node
        if node is not None and (node.has_announced or (node.connected and node.rejected)):
            return False  # it was there, and was withdrawn; or it was refused
        return self.enrolled_tenant(use.node_id) is not None and self.now_ms() < self.awaited_until_ms


def _is_not_reached(state: Usability, use: NodeUse) -> bool:
    """Return whether it is of another tenant, or none of the nodes that the caller's token is for."""
    tenant = use.node.tenant if use.node is not None else state.enrolled_tenant(use.node_id)
    return tenant != use.rights.tenant or not state.admits(use.rights, use.node_id)


def _is_not_permitted(_: Usability, use: NodeUse) -> bool:
    return use.tool is None or not use.rights.allow(
        use.rights.tenant, use.tool.safety_class, use.tool.surface.kind
    )


def _has_ended(state: Usability, use: NodeUse) -> bool:
    return use.node is None or use.node.in_force_until_ms <= state.now_ms()


def _is_offline(_: Usability, use: NodeUse) -> bool:
    return use.node is None or not use.node.connected or not use.node.identities


def _failure(failure: Failure, text: str | None = None) -> Callable[[NodeUse], ToolError]:
    return lambda _: ToolError(failure, text)


def _awaited_error(_: NodeUse) -> ToolError:
    return ToolError(
        Failure.NODE_OFFLINE,
        "The node has not announced its tools since this relay was started; nothing was sent.",
        fix=OFFLINE_FIX,
        retry_after_ms=_RETRY_MS,
    )


_TOOL: tuple[UseKind, ...] = ("tool",)
_ABSENT: tuple[UseKind, ...] = ("absent tool",)
_SESSION: tuple[UseKind, ...] = ("session",)
_ANY_TOOL = _TOOL + _ABSENT


def _decided(decision: Decision, failure: Failure) -> UseReason:
    return UseReason(
        _TOOL + _SESSION,
        lambda state, use: use.node_id in state.decided[decision],
        _failure(failure),
        decision,
    )


REASONS = (
    UseReason(_ANY_TOOL, _is_not_reached, _failure(Failure.SAFETY_DENIED)),
    UseReason(
        _ANY_TOOL,
        lambda _, use: use.node is not None and use.node.leaf_dropped,
        _failure(Failure.ATTESTATION_FAILED),
    ),
    UseReason(
        _ABSENT,
        lambda _, use: use.node is not None and use.node.manifest is not None,
        lambda use: ToolError(Failure.NAME_UNKNOWN if use.kind_known else Failure.KIND_UNSUPPORTED),
    ),
    UseReason(_ABSENT, Usability.is_awaited, _awaited_error),
    UseReason(
        _ABSENT,
        lambda _, use: use.node is not None and use.node.rejected,
        _failure(Failure.MANIFEST_INVALID),
    ),
    UseReason(_ABSENT, lambda *_: True, _failure(Failure.MANIFEST_NOT_FOUND)),
    UseReason(_TOOL, _is_not_permitted, _failure(Failure.SAFETY_DENIED)),
    UseReason(_TOOL, _has_ended, _failure(Failure.MANIFEST_INVALID)),
    # A call of a node that is not connected fails where its session is held, and says since when.
    UseReason(
        _SESSION, _is_offline, _failure(Failure.NODE_OFFLINE, "The node is not connected; nothing was sent.")
    ),
    # Its manifest was dropped with its leaves, so that a reason above holds: this is the second bar.
    _decided(Decision.RETIRED, Failure.ATTESTATION_FAILED),
)
"""In the order in which they are asked; the first that holds is the answer."""
