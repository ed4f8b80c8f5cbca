"""Bounds what callers' sessions take: per node, and shared among tenants and their principals.

That is memory, and their number. What is kept is JSON text, which takes as many bytes as it has. A tenant has
at most as much as is left free of all, and a principal at most as much as is left of that to its tenant, so
that another one always finds room. A tenant that is alone has half of all, and a principal that is alone half
of that. Must not know what it counts.
"""

from collections import Counter
from enum import StrEnum
from typing import NamedTuple

from relay.auth.agent_tokens import AgentName


class Holder(NamedTuple):
    """Whose it is: the session's principal, which names its tenant, and its node."""

    principal: AgentName
    node_id: str

    @property
    def tenant(self) -> str:
        """The tenant of both."""
        _, tenant, _ = self.principal
        return tenant


class Full(StrEnum):
    """Which bound leaves no room: that of whose sessions."""

    NODE = "The sessions of this node"
    PRINCIPAL = "Your sessions"
    TENANT = "The sessions of your tenant"


class SharedBudget:
    """What is in use: ``per_node`` at most for one node, and ``in_all``."""

    def __init__(self, per_node: int, in_all: int) -> None:
        self._per_node = per_node
        self._in_all = in_all
        self._nodes: Counter[str] = Counter()
        self._tenants: Counter[str] = Counter()
        self._principals: Counter[AgentName] = Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """What is in use."""
        return self._total

    def take(self, holder: Holder, size: int) -> Full | None:
        """Count ``size`` for ``holder``, or count nothing and return what leaves no room for it."""
        if (full := self.full(holder, size)) is None:
            self._count(holder, size)
        return full

    def full(self, holder: Holder, size: int) -> Full | None:
        """Return what leaves no room for ``size`` more of ``holder``, if anything does."""
        if self._nodes[holder.node_id] + size > self._per_node:
            return Full.NODE
        # What it takes is also taken from what is free, so that it may take half of the difference.
        of_tenant = (self._in_all - self._total - self._tenants[holder.tenant]) // 2
        if size > of_tenant:
            return Full.TENANT
        if size > (of_tenant - self._principals[holder.principal]) // 2:
            return Full.PRINCIPAL
        return None

    def give_back(self, holder: Holder, size: int) -> None:
        """Count ``size`` less."""
        self._count(holder, -size)

    def _count(self, holder: Holder, size: int) -> None:
        self._total += size
        self._nodes[holder.node_id] += size
        self._tenants[holder.tenant] += size
        self._principals[holder.principal] += size
        if not self._principals[holder.principal]:
            del self._principals[holder.principal]
        if not self._tenants[holder.tenant]:
            del self._tenants[holder.tenant]
        if not self._nodes[holder.node_id]:
            del self._nodes[holder.node_id]
