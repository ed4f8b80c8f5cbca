"""Finds nodes by what people call them: an id, a label, the beginning of an id, a tag.

Labels and tags are kept up to date as the operator changes them, at a cost that does not depend on how many
nodes there are. Every look-up is within one tenant: what belongs to another does not exist here, in errors
and close names as well. Must not read the ledger, nor decide what a caller may do with a node.
"""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Protocol

from relay.fleet.close_names import closest
from relay.state.labels import MIN_PREFIX, folded, id_prefix_of, legible, node_id_of, typed_form
from relay.state.names import NodeName
from schemas.error_roots import PeerError
from schemas.text import printable

_MAX_SHOWN = 48
ALL = "*"
_TAG_SELECTOR = "tag:"
_UNNAMED = NodeName("")


def is_tag_selector(selector: str) -> bool:
    """Return whether ``selector`` means the nodes of a tag: `site=north`, or `tag:gateway`."""
    return selector.startswith(_TAG_SELECTOR) or "=" in selector


class KnownNodes(Protocol):
    """The nodes that there are."""

    def ids_of(self, tenant: str) -> Sequence[str]:
        """Return the ids of the nodes of ``tenant``, sorted."""
        ...

    def tenant_of(self, node_id: str) -> str | None:
        """Return the tenant of a node; None if there is none of that id."""
        ...


class UnknownNodeError(PeerError):
    """A reference or a selector fits no node, or several. The text is one line, safe to show, and bounded.

    Attributes:
        close: names of the tenant that were perhaps meant, the closest first.
        candidates: how many nodes a prefix fits.
    """

    def __init__(self, reference: str, close: Sequence[str] = (), candidates: int = 0) -> None:
        super().__init__(reference, close, candidates)
        self.reference = reference
        self.close = tuple(close)
        self.candidates = candidates

    @property
    def headline(self) -> str:
        """What is wrong, as a sentence of a few words."""
        shown = f"'{printable(self.reference, _MAX_SHOWN)}'"
        if self.candidates:
            return f"{self.candidates} nodes have an id that begins with {shown}."
        return (
            f"No node has the tag {shown}."
            if is_tag_selector(self.reference)
            else f"No node is called {shown}."
        )

    def __str__(self) -> str:
        shown = f"'{legible(self.reference, _MAX_SHOWN)}'"
        if self.candidates:
            return f"{shown} fits {self.candidates} nodes: give more characters of the id"
        hint = f"; close: {', '.join(self.close)}" if self.close else ""
        if is_tag_selector(self.reference):
            return f"no node has the tag {shown}{hint}"
        return f"{shown} is no node's id, label or prefix of at least {MIN_PREFIX} characters{hint}"


class _TenantNames:
    """The labels and tags of one tenant's nodes."""

    __slots__ = ("by_tag", "by_typed", "by_word", "labels", "nodes", "tags")

    def __init__(self) -> None:
        self.labels: list[str] = []
        """Folded, sorted."""
        self.nodes: dict[str, tuple[str, str]] = {}
        """By folded label: the label as it was given, and its node."""
        self.tags: list[str] = []
        """Those of ``by_tag``, sorted."""
        self.by_tag: defaultdict[str, set[str]] = defaultdict(set)
        self.by_word: defaultdict[str, dict[str, None]] = defaultdict(dict)
        """The folded labels that contain a word; in a dict, for its order."""
        self.by_typed: defaultdict[str, set[str]] = defaultdict(set)
        """The nodes whose label has letters beyond ASCII, by what is typed for it, in lower case."""


class NodeNames:
    """The names of the nodes of one relay."""

    def __init__(self, nodes: KnownNodes) -> None:
        self._nodes = nodes
        self._by_node: dict[str, NodeName] = {}
        self._tenants: defaultdict[str, _TenantNames] = defaultdict(_TenantNames)
        self._revisions: Counter[str] = Counter()

    def revision(self, tenant: str) -> int:
        """Return a number that grows with each change of the names of ``tenant``."""
        return self._revisions[tenant]

    def named(self, tenant: str) -> Iterator[tuple[str, NodeName]]:
        """Yield the names given in ``tenant``: by label, then those of tags alone by id.

        Those of nodes that are not in the tenant any more, or not yet, are among them.
        """
        names = self._tenants.get(tenant)
        if names is None:
            return
        labelled = [names.nodes[label][1] for label in names.labels]
        tagged = {node_id for nodes in names.by_tag.values() for node_id in nodes}
        for node_id in (*labelled, *sorted(tagged.difference(labelled))):
            yield node_id, self._by_node[node_id]

    def tagged(self, tenant: str, tag: str) -> AbstractSet[str]:
        """Return the nodes that were given ``tag`` in ``tenant``, also those that are not in it now."""
        names = self._tenants.get(tenant)
        return names.by_tag.get(tag, frozenset()) if names is not None else frozenset()

    def label_of(self, node_id: str) -> str:
        """Return the label of a node in the tenant that it is in; empty if it has none."""
        return self._name_of(node_id).label

    def label_in(self, tenant: str, node_id: str) -> str:
        """Return the label that a node has in ``tenant``; empty if it has none there."""
        name = self._name_of(node_id)
        return name.label if name.tenant == tenant else ""

    def tags_of(self, node_id: str) -> tuple[str, ...]:
        """Return the tags of a node in the tenant that it is in, sorted."""
        return self._name_of(node_id).tags

    def labels(self, tenant: str) -> Iterable[tuple[str, str]]:
        """Yield label and node id of the nodes of ``tenant`` that have a label, sorted without case."""
        names = self._tenants.get(tenant)
        if names is None:
            return
        for label in names.labels:
            shown, node_id = names.nodes[label]
            if self._is_of(node_id, tenant):
                yield shown, node_id

    def resolve(self, tenant: str, reference: str) -> str:
        """Return the node of ``tenant`` that ``reference`` names: full id, label or prefix, in that order.

        A label with letters beyond ASCII is also named by what is typed for it, unless that fits several.

        Raises:
            UnknownNodeError: there is none, or a prefix fits several.
        """
        node_id = node_id_of(reference)
        if node_id is not None and self._is_known(node_id, tenant):
            return node_id
        names = self._tenants.get(tenant)
        labelled = names.nodes.get(folded(reference)) if names is not None else None
        if labelled is not None and self._is_of(labelled[1], tenant):
            return labelled[1]
        typed = names.by_typed.get(reference.lower(), ()) if names is not None else ()
        if len(typed) == 1 and self._is_of(node := next(iter(typed)), tenant):
            return node
        return self._by_prefix(tenant, reference)

    def beginning_of(self, tenant: str, node_id: str) -> str:
        """Return the shortest prefix of ``node_id`` that ``resolve`` takes, which no other node's id has."""
        ids = self._nodes.ids_of(tenant)
        place = bisect_left(ids, node_id)
        near = [other for other in ids[max(0, place - 1) : place + 2] if other != node_id]
        prefixes = (node_id[:length] for length in range(MIN_PREFIX, len(node_id) + 1))
        return next(prefix for prefix in prefixes if not any(other.startswith(prefix) for other in near))

    def members(self, tenant: str, selector: str) -> list[str]:
        """Return the nodes of ``tenant`` that ``selector`` means, by id: `*`, a tag, or one reference.

        A tag is written `site=north` or `tag:gateway`.

        Raises:
            UnknownNodeError: it means none.
        """
        if selector == ALL:
            found: Collection[str] = self._nodes.ids_of(tenant)
        elif is_tag_selector(selector):
            found = self._tagged(tenant, selector.removeprefix(_TAG_SELECTOR))
        else:
            return [self.resolve(tenant, selector)]
        if not found:
            raise UnknownNodeError(selector, self._close_tags(tenant, selector))
        return sorted(found)

    def change(self, changed: Mapping[str, NodeName | None]) -> set[str]:
        """Take in what the operator has changed: the nodes' new names; None for a node without any.

        Returns the tenants whose names have changed.
        """
        # All former names first: two nodes may have swapped their labels.
        former = {node_id: self._by_node.pop(node_id, _UNNAMED) for node_id in changed}
        for node_id, name in former.items():
            self._remove(node_id, name)
        for node_id, new in changed.items():
            if new is not None:
                self._add(node_id, new)
        names = (*former.values(), *changed.values())
        tenants = {name.tenant for name in names if name is not None and name is not _UNNAMED}
        self._revisions.update(tenants)
        return tenants

    def differences(self, names: Mapping[str, NodeName]) -> dict[str, NodeName | None]:
        """Return what ``change`` needs to arrive at ``names``, which are those of all nodes."""
        changed: dict[str, NodeName | None] = {
            node_id: name for node_id, name in names.items() if self._by_node.get(node_id) != name
        }
        return changed | dict.fromkeys(self._by_node.keys() - names.keys())

    def _name_of(self, node_id: str) -> NodeName:
        name = self._by_node.get(node_id, _UNNAMED)
        return name if self._is_of(node_id, name.tenant) else _UNNAMED

    def _is_of(self, node_id: str, tenant: str) -> bool:
        """Return whether a node that was named in ``tenant`` is in it still; one not seen yet is."""
        return self._nodes.tenant_of(node_id) in {tenant, None}

    def _is_known(self, node_id: str, tenant: str) -> bool:
        now_in = self._nodes.tenant_of(node_id)
        return (now_in or self._by_node.get(node_id, _UNNAMED).tenant) == tenant

    def _by_prefix(self, tenant: str, reference: str) -> str:
        prefix = id_prefix_of(reference)
        if prefix is None:
            raise UnknownNodeError(reference, self._close_labels(tenant, reference))
        ids = self._nodes.ids_of(tenant)
        start = bisect_left(ids, prefix)
        # "~" is behind every character of an id.
        end = bisect_left(ids, prefix + "~", start)
        if end - start != 1:
            raise UnknownNodeError(reference, self._close_labels(tenant, reference), candidates=end - start)
        return ids[start]

    def _tagged(self, tenant: str, tag: str) -> list[str]:
        names = self._tenants.get(tenant)
        tagged = names.by_tag.get(tag, ()) if names is not None else ()
        return [node_id for node_id in tagged if self._is_of(node_id, tenant)]

    def _close_labels(self, tenant: str, reference: str) -> list[str]:
        names = self._tenants.get(tenant)
        if names is None:
            return []
        found = closest(folded(reference), names.labels, names.by_word)
        shown = (names.nodes[label] for label in found)
        return [label for label, node_id in shown if self._is_of(node_id, tenant)]

    def _close_tags(self, tenant: str, selector: str) -> list[str]:
        names = self._tenants.get(tenant)
        if names is None:
            return []
        tags = closest(selector.removeprefix(_TAG_SELECTOR), names.tags)
        return [tag if "=" in tag else f"{_TAG_SELECTOR}{tag}" for tag in tags if self._tagged(tenant, tag)]

    def _add(self, node_id: str, name: NodeName) -> None:
        self._by_node[node_id] = name
        names = self._tenants[name.tenant]
        for tag in name.tags:
            if tag not in names.by_tag:
                insort(names.tags, tag)
            names.by_tag[tag].add(node_id)
        if name.label:
            insort(names.labels, folded(name.label))
            names.nodes[folded(name.label)] = (name.label, node_id)
            for word in folded(name.label).split():
                names.by_word[word][folded(name.label)] = None
            if not name.label.isascii():
                names.by_typed[typed_form(name.label).lower()].add(node_id)

    def _remove(self, node_id: str, name: NodeName) -> None:
        names = self._tenants[name.tenant]
        for tag in name.tags:
            names.by_tag[tag].discard(node_id)
            if not names.by_tag[tag]:
                del names.by_tag[tag], names.tags[bisect_left(names.tags, tag)]
        if name.label:
            label = folded(name.label)
            del names.labels[bisect_left(names.labels, label)]
            del names.nodes[label]
            for word in set(label.split()):
                del names.by_word[word][label]
                if not names.by_word[word]:
                    del names.by_word[word]
            if not name.label.isascii():
                typed = typed_form(name.label).lower()
                names.by_typed[typed].discard(node_id)
                if not names.by_typed[typed]:
                    del names.by_typed[typed]
        if not names.labels and not names.by_tag:
            del self._tenants[name.tenant]
