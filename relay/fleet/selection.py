"""What a client's URL selects of the fleet: a view, and some of the nodes, kinds and tags.

It narrows what is listed and what can be called by that URL. It is no permission: the same token is good for
any URL. Must not read a URL.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from relay.fleet.node_names import NodeNames, UnknownNodeError
from relay.settings.config import View
from relay.state.labels import tag_key

TAG_SELECTOR = "tag:"


@dataclass(frozen=True, slots=True)
class Selection:
    """A view, and what it is narrowed to; an empty member narrows nothing.

    A node must fit one of ``nodes`` and have, of each key in ``tags``, one of its values; a tool must be of
    one of ``kinds``.

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
        if self.tags and not has_tags(names.tags_of(node_id), self.tags):
            return False
        return not self.nodes or any(_is_named(names, tenant, name, node_id) for name in self.nodes)

    def node_ids(self, names: NodeNames, tenant: str) -> frozenset[str] | None:
        """Return the nodes of ``tenant`` that are selected; None for all of them.

        Raises:
            UnknownNodeError: a reference or a tag fits no node.
        """
        if not self.has_nodes:
            return None
        sets = [
            {node_id for tag in tags for node_id in names.members(tenant, f"{TAG_SELECTOR}{tag}")}
            for tags in by_key(self.tags)
        ]
        if self.nodes:
            sets.append({names.resolve(tenant, name) for name in self.nodes})
        return frozenset(set.intersection(*sets))


WHOLE_FLEET = Selection()


def has_tags(tags: Collection[str], wanted: Iterable[str]) -> bool:
    """Return whether ``tags`` have one of the values wanted of each key: `site=a`, `site=b` and `gateway`."""
    return all(any(tag in tags for tag in group) for group in by_key(wanted))


def by_key(tags: Iterable[str]) -> list[list[str]]:
    """Return ``tags`` in groups of one key each."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for tag in tags:
        groups[tag_key(tag)].append(tag)
    return list(groups.values())


def _is_named(names: NodeNames, tenant: str, reference: str, node_id: str) -> bool:
    try:
        return names.resolve(tenant, reference) == node_id
    except UnknownNodeError:
        return False
