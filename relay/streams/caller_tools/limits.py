"""The limits of callers' sessions that the relay alone keeps, and how tenants and principals share them.

Those of both ends are in the contract. Must not hold what a node needs to know: the two ends would differ.
"""

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from attrs import define, field

from relay.auth.agent_tokens import AgentName
from schemas.caller_tools import NODE_MARGIN_S

MAX_WAIT_MS = 60_000
"""The longest long poll: longer waits are cut off by clients and proxies."""
MAX_RESULT_BYTES = 256 * 1024
"""The events of one answer; one event always fits."""
MAX_EVENTS = 512
"""The events that one session keeps, besides the requests that are pending."""
MAX_TOKENS = 32
"""The tokens that are noted for one session, those that expire last."""
MAX_SESSIONS = 4096
"""The live sessions of all nodes."""
GRACE_S = 2.0
"""How soon a caller that has closed a request before its response has to make another one."""
MAX_POLLS = 64
"""The long polls that one agent has open."""
NODE_BYTES = 32 << 20
TOTAL_BYTES = 256 << 20


@dataclass(slots=True)
class Timeouts:
    """How long things last, in seconds. They may be changed.

    Attributes:
        request: how long a request waits for the caller's answer.
        unreachable: how long one that is not delivered waits for a caller that cannot be reached.
        idle: how long a session lasts without use by either end.
    """

    request: float = 60.0
    unreachable: float = 10.0
    idle: float = 1800.0

    @property
    def kept(self) -> float:
        """How long a request that has ended is known, with its answer.

        A node that resumes its session asks again for as long as it waits, and such a request must not reach
        the caller a second time.
        """
        return self.request + 2 * NODE_MARGIN_S


class Holder(NamedTuple):
    """Whose it is: the session's principal, which names its tenant, and its node."""

    principal: AgentName
    node_id: str

    @property
    def tenant(self) -> str:
        _, tenant, _ = self.principal
        return tenant


class Full(StrEnum):
    """Which bound leaves no room: that of whose sessions."""

    NODE = "The sessions of this node"
    PRINCIPAL = "Your sessions"
    TENANT = "The sessions of your tenant"


@define(eq=False, repr=False)
class SharedBudget:
    """What is in use, ``total``: ``per_node`` at most for one node, and ``in_all``.

    That is memory, as bytes of JSON text, or the number of sessions. A tenant has at most as much as is left
    free of all, and a principal at most as much as is left of that to its tenant, so that another one always
    finds room. A tenant that is alone has half of all, and a principal that is alone half of that.
    """

    _per_node: int
    _in_all: int
    _nodes: Counter[object] = field(init=False, factory=Counter)
    _tenants: Counter[object] = field(init=False, factory=Counter)
    _principals: Counter[object] = field(init=False, factory=Counter)
    total: int = field(init=False, default=0)

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
        of_tenant = (self._in_all - self.total - self._tenants[holder.tenant]) // 2
        if size > of_tenant:
            return Full.TENANT
        if size > (of_tenant - self._principals[holder.principal]) // 2:
            return Full.PRINCIPAL
        return None

    def give_back(self, holder: Holder, size: int) -> None:
        self._count(holder, -size)

    def _count(self, holder: Holder, size: int) -> None:
        self.total += size
        principal, node_id = holder
        used = (self._nodes, node_id), (self._tenants, holder.tenant), (self._principals, principal)
        for counts, whose in used:
            counts[whose] += size
            if not counts[whose]:
                del counts[whose]
