"""Which scope allows what: the one table for listing, calling, subscribing and reading.

A caller may use a tool of its own tenant whose safety class has a scope that the caller's token names, and
whose kind and node the token is for. Everything else is denied. Must not know where a token or a tool came
from.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from types import MappingProxyType

from schemas.kinds import Kind
from schemas.labels import NodeName, kept_form

SCOPE_OF_SAFETY_CLASS: Mapping[str, str] = MappingProxyType(
    {
        "read_only": "tools:call:read_only",
        "reversible": "tools:call:reversible",
        "physical_actuation": "tools:call:physical_actuation",
    }
)
"""The scope that a caller needs for a tool of each safety class. A class without one is never allowed."""

EXCLUDES = "!"
"""What a pattern of kinds or nodes begins with that excludes those which it matches."""
TAG = "tag:"
"""What a pattern of nodes begins with that is one of tags; one with ``=`` is too."""
SESSION_SCOPE = "sessions:message"
SCOPES = (*SCOPE_OF_SAFETY_CLASS.values(), SESSION_SCOPE)
"""Every scope. Others that a token names allow nothing."""


@dataclass(frozen=True, slots=True)
class Rights:
    """What a caller may use. Callers with equal rights see the same tools.

    Attributes:
        may_message: whether it may open sessions with nodes, and send messages in them.
        kinds, nodes: what its token says of the kinds and the nodes that it is for; None if nothing.
    """

    tenant: str
    safety_classes: frozenset[str]
    may_message: bool = False
    kinds: tuple[str, ...] | None = None
    nodes: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls,
        tenant: str,
        scopes: Collection[str],
        kinds: tuple[str, ...] | None = None,
        nodes: tuple[str, ...] | None = None,
    ) -> "Rights":
        """Return the rights of a caller of ``tenant`` whose token names these scopes, kinds and nodes."""
        reached = {name for name, scope in SCOPE_OF_SAFETY_CLASS.items() if scope in scopes}
        return cls(tenant, frozenset(reached), SESSION_SCOPE in scopes, kinds, nodes)

    def allow(self, owner: str, safety_class: str, kind: Kind) -> bool:
        """Return whether they allow a tool of this class and kind on a node of the tenant ``owner``."""
        return self.reach(owner, safety_class) and self.admit(kind)

    def reach(self, owner: str, safety_class: str) -> bool:
        """Return whether tenant and scopes allow what is of this class and tenant, whatever its kind."""
        return owner == self.tenant and safety_class in self.safety_classes

    def admit(self, kind: Kind) -> bool:
        """Return whether the token is for ``kind``: one that is sensitive it must name in full."""
        if kind.sensitive:
            return self.admit_by_name(kind.name)
        return self.kinds is None or self._admit(kind.name)

    def admit_by_name(self, kind: str) -> bool:
        """Return whether the token names the kind called ``kind`` in full, and does not exclude it."""
        return self.kinds is not None and kind in self.kinds and self._admit(kind)

    def _admit(self, kind: str) -> bool:
        fits = partial(fnmatchcase, kind)
        return _admitted(self.kinds or (), fits, fits)

    def admit_node(self, node_id: str, name: NodeName) -> bool:
        """Return whether the token is for the node of that id, which its operator calls ``name``."""
        if self.nodes is None:
            return True
        # What another relay says, and has not signed, opens nothing; but it excludes.
        return _admitted(
            self.nodes,
            lambda pattern: _fits(pattern, node_id, name.proven or name),
            lambda pattern: any(_fits(pattern, node_id, each) for each in (name, name.proven) if each),
        )

    @property
    def may_read(self) -> bool:
        """Whether they allow reading the tenant's resources: the same as calling a read-only tool."""
        return "read_only" in self.safety_classes


def _admitted(
    patterns: Collection[str], fits: Callable[[str], bool], is_excluded: Callable[[str], bool]
) -> bool:
    """Return whether one of ``patterns`` fits, and none of those that exclude does."""
    if any(is_excluded(each.removeprefix(EXCLUDES)) for each in patterns if each.startswith(EXCLUDES)):
        return False
    return any(fits(each) for each in patterns if not each.startswith(EXCLUDES))


def _fits(pattern: str, node_id: str, name: NodeName) -> bool:
    if pattern.startswith(TAG) or "=" in pattern:
        return any(_matches(tag, pattern.removeprefix(TAG)) for tag in name.tags)
    label = kept_form(name.label)
    return _matches(node_id, pattern) or (label != "" and _matches(label, pattern))


def _matches(text: str, pattern: str) -> bool:
    """Return whether ``text`` fits ``pattern``, in which ``*`` alone is special; the case does not matter."""
    return fnmatchcase(text.lower(), pattern.lower().replace("[", "[[]").replace("?", "[?]"))
