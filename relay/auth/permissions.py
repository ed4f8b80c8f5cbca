"""Which scope allows what: the one table for listing, calling, subscribing and reading.

A caller may use a tool of its own tenant whose safety class has a scope that the caller's token names.
Everything else is denied. Must not know where a token or a tool came from.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType

SCOPE_OF_SAFETY_CLASS: Mapping[str, str] = MappingProxyType(
    {
        "read_only": "tools:call:read_only",
        "reversible": "tools:call:reversible",
        "physical_actuation": "tools:call:physical_actuation",
    }
)
"""The scope that a caller needs for a tool of each safety class. A class without one is never allowed."""

SESSION_SCOPE = "sessions:message"
SCOPES = (*SCOPE_OF_SAFETY_CLASS.values(), SESSION_SCOPE)
"""Every scope. Others that a token names allow nothing."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a caller may use. Callers with equal rights see the same tools.

    Attributes:
        may_message: whether it may open sessions with nodes, and send messages in them.
    """

    tenant: str
    safety_classes: frozenset[str]
    may_message: bool = False

    @classmethod
    def of(cls, tenant: str, scopes: Collection[str]) -> "Rights":
        """Return the rights of a caller of ``tenant`` whose token names ``scopes``."""
        reached = {name for name, scope in SCOPE_OF_SAFETY_CLASS.items() if scope in scopes}
        return cls(tenant, frozenset(reached), SESSION_SCOPE in scopes)

    def allow(self, owner: str, safety_class: str) -> bool:
        """Return whether they allow a tool of ``safety_class`` on a node of the tenant ``owner``."""
        return owner == self.tenant and safety_class in self.safety_classes

    @property
    def may_read(self) -> bool:
        """Whether they allow reading the tenant's resources: the same as calling a read-only tool."""
        return "read_only" in self.safety_classes
