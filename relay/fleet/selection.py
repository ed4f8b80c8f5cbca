"""What a client's URL selects of the fleet: a view, and some of the nodes, kinds and tags.

It narrows what is listed and what can be called by that URL. It is no permission: the same token is good for
any URL. Must not read a URL.
"""

from dataclasses import dataclass

from relay.config import View
from relay.fleet.node_names import NodeNames, UnknownNodeError

TAG_SELECTOR = "tag:"


@dataclass(frozen=True, slots=True)
class Selection:
    """A view, and what it is narrowed to; an empty member narrows nothing.

    A node must fit one of ``nodes`` and have one of ``tags``; a tool must be of one of ``kinds``.

    Attributes:
        nodes: ids, labels or prefixes, as the client wrote them.
        kinds: the first tokens of tool names.
        tags: such as ``site=north`` or ``gateway``.
    """

    view: View = View.TOOLS
    nodes: tuple[str, ...] = ()
    kinds: frozenset[str] = frozenset()
    tags: tuple[str, ...] = ()

    @property
    def has_nodes(self) -> bool:
        """Whether it is narrowed to some of the nodes."""
        return bool(self.nodes or self.tags)

    @property
    def is_narrowed(self) -> bool:
        """Whether it leaves anything out."""
        return bool(self.nodes or self.tags or self.kinds)

    def admits_kind(self, kind_short: str) -> bool:
        """Return whether tools of a kind are selected."""
        return not self.kinds or kind_short in self.kinds

    def admits_node(self, names: NodeNames, tenant: str, node_id: str) -> bool:
        """Return whether a node of ``tenant`` is selected. A reference that fits no node selects none."""
        if self.tags and not set(self.tags) & set(names.tags_of(node_id)):
            return False
        return not self.nodes or any(_is_named(names, tenant, name, node_id) for name in self.nodes)

    def node_ids(self, names: NodeNames, tenant: str) -> frozenset[str] | None:
        """Return the nodes of ``tenant`` that are selected; None for all of them.

        Raises:
            UnknownNodeError: a reference or a tag fits no node.
        """
        if not self.has_nodes:
            return None
        tagged = {node_id for tag in self.tags for node_id in names.members(tenant, f"{TAG_SELECTOR}{tag}")}
        named = {names.resolve(tenant, name) for name in self.nodes}
        return frozenset(tagged & named if self.tags and self.nodes else tagged | named)


WHOLE_FLEET = Selection()


def _is_named(names: NodeNames, tenant: str, reference: str, node_id: str) -> bool:
    try:
        return names.resolve(tenant, reference) == node_id
    except UnknownNodeError:
        return False
