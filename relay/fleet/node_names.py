"""Finds nodes by what people call them: an id, a label, the beginning of an id, a tag.

Labels and tags are kept up to date as the operator changes them, at a cost that does not depend on how many
nodes there are. Every look-up is within one tenant: what belongs to another does not exist here, in errors
and close names as well. Must not read the ledger, nor decide what a caller may do with a node.
"""

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from itertools import chain, islice
from typing import Protocol

from attrs import define, field

from relay.auth.permissions import TAG
from schemas.error_roots import PeerError
from schemas.labels import MIN_PREFIX, NodeName, folded, id_prefix_of, legible, node_id_of, typed_form
from schemas.text import printable

MAX_CLOSE = 3
_NEIGHBOURS = 8
_SHARING_A_WORD = 24
_LONGEST = 48
_CUTOFF = 0.5


def closest(
    wanted: str, names: Sequence[str], by_word: Mapping[str, Collection[str]] | None = None
) -> list[str]:
    """Return up to ``MAX_CLOSE`` of ``names``, which are sorted, that are close to ``wanted``; best first.

    ``by_word`` has the names that contain a word. Comparing two names costs microseconds, and there may be
    ten thousand: compared are those near it in sorted order, and some that share its rarest word.
    """
    wanted = wanted[:_LONGEST]
    place = bisect_left(names, wanted)
    near = names[max(0, place - _NEIGHBOURS) : place + _NEIGHBOURS]
    known = [by_word[word] for word in dict.fromkeys(wanted.split()) if word in by_word] if by_word else []
    known.sort(key=len)
    sharing = islice(chain.from_iterable(known), _SHARING_A_WORD)
    return get_close_matches(wanted, dict.fromkeys([*near, *sharing]), MAX_CLOSE, _CUTOFF)


_MAX_SHOWN = 48
ALL = "*"
_UNNAMED = NodeName("")
Admits = Callable[[str], bool]
"""Returns whether a node of the tenant, by its id, exists for who asks."""


def _every(_node_id: str) -> bool:
    return True


def is_tag_selector(selector: str) -> bool:
    """Return whether ``selector`` means the nodes of a tag: `site=north`, or `tag:gateway`."""
    return selector.startswith(TAG) or "=" in selector


class KnownNodes(Protocol):
    """The nodes that there are."""

    def ids_of(self, tenant: str) -> Sequence[str]: ...

    def tenant_of(self, node_id: str) -> str | None: ...


class UnknownNodeError(PeerError):
    """A reference or a selector fits no node, or several. The text is one line, safe to show, and bounded.

    ``close`` returns names of the tenant that were perhaps meant, the closest first. To find them takes
    milliseconds, so it is called only for the text.

    Attributes:
        candidates: how many nodes a prefix fits.
    """

    def __init__(
        self, reference: str, close: Callable[[], Sequence[str]] = tuple, candidates: int = 0
    ) -> None:
        super().__init__(reference, candidates)
        self.reference = reference
        self.candidates = candidates
        self._close = close

    @cached_property
    def close(self) -> Sequence[str]:
        """Names that were perhaps meant."""
        return tuple(self._close())

    @property
    def headline(self) -> str:
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


@define(eq=False, repr=False)
class _TenantNames:
    """The labels and tags of one tenant's nodes.

    Attributes:
        labels: folded, sorted.
        nodes: by folded label: the label as it was given, and its node.
        tags: those of ``by_tag``, sorted.
        by_word: the folded labels that contain a word; in a dict, for its order.
        by_typed: the nodes whose label has letters beyond ASCII, by what is typed for it, in lower case.
    """

    labels: list[str] = field(init=False, factory=list)
    nodes: dict[str, tuple[str, str]] = field(init=False, factory=dict)
    tags: list[str] = field(init=False, factory=list)
    by_tag: defaultdict[str, set[str]] = field(init=False, factory=lambda: defaultdict(set))
    by_word: defaultdict[str, dict[str, None]] = field(init=False, factory=lambda: defaultdict(dict))
    by_typed: defaultdict[str, set[str]] = field(init=False, factory=lambda: defaultdict(set))


_NO_NAMES = _TenantNames()


@define(eq=False, repr=False)
class NodeNames:
    """The names of the nodes of one relay."""

    _nodes: KnownNodes
    _by_node: dict[str, NodeName] = field(init=False, factory=dict)
    _tenants: defaultdict[str, _TenantNames] = field(init=False, factory=lambda: defaultdict(_TenantNames))
    _revisions: Counter[str] = field(init=False, factory=Counter)

    def revision(self, tenant: str) -> int:
        """Return a number that grows with each change of the names of ``tenant``."""
        return self._revisions[tenant]

    def named(self, tenant: str) -> Iterator[tuple[str, NodeName]]:
        """Yield the names given in ``tenant``: by label, then those of tags alone by id.

        Those of nodes that are not in the tenant any more, or not yet, are among them.
        """
        names = self._names_in(tenant)
        labelled = [names.nodes[label][1] for label in names.labels]
        tagged = {node_id for nodes in names.by_tag.values() for node_id in nodes}
        for node_id in (*labelled, *sorted(tagged.difference(labelled))):
            yield node_id, self._by_node[node_id]

    def tagged(self, tenant: str, tag: str) -> AbstractSet[str]:
        """Return the nodes that were given ``tag`` in ``tenant``, also those that are not in it now."""
        return self._names_in(tenant).by_tag.get(tag, frozenset())

    def label_of(self, node_id: str) -> str:
        """Return the label of a node in the tenant that it is in; empty if it has none."""
        return self.name_of(node_id).label

    def label_in(self, tenant: str, node_id: str) -> str:
        name = self.name_of(node_id)
        return name.label if name.tenant == tenant else ""

    def tags_of(self, node_id: str) -> tuple[str, ...]:
        return self.name_of(node_id).tags

    def labels(self, tenant: str) -> Iterable[tuple[str, str]]:
        """Yield label and node id of the nodes of ``tenant`` that have a label, sorted without case."""
        names = self._names_in(tenant)
        for label in names.labels:
            shown, node_id = names.nodes[label]
            if self._is_of(node_id, tenant):
                yield shown, node_id

    def resolve(self, tenant: str, reference: str, admits: Admits = _every) -> str:
        """Return the node of ``tenant`` that ``reference`` names: full id, label or prefix, in that order.

        A label with letters beyond ASCII is also named by what is typed for it, unless that fits several.
        Here and below, what ``admits`` leaves out does not exist.

        Raises:
            UnknownNodeError: there is none, or a prefix fits several.
        """
        node_id = node_id_of(reference)
        if node_id is not None and self._is_known(node_id, tenant) and admits(node_id):
            return node_id
        names = self._names_in(tenant)
        labelled = names.nodes.get(folded(reference))
        if labelled is not None and self._is_of(labelled[1], tenant) and admits(labelled[1]):
            return labelled[1]
        typed = [node for node in names.by_typed.get(reference.lower(), ()) if admits(node)]
        if len(typed) == 1 and self._is_of(typed[0], tenant):
            return typed[0]
        return self._by_prefix(tenant, reference, admits)

    def beginning_of(self, tenant: str, node_id: str) -> str:
        """Return the shortest prefix of ``node_id`` that ``resolve`` takes, which no other node's id has."""
        ids = self._nodes.ids_of(tenant)
        place = bisect_left(ids, node_id)
        near = [other for other in ids[max(0, place - 1) : place + 2] if other != node_id]
        prefixes = (node_id[:length] for length in range(MIN_PREFIX, len(node_id) + 1))
        return next(prefix for prefix in prefixes if not any(other.startswith(prefix) for other in near))

    def members(self, tenant: str, selector: str, admits: Admits = _every) -> list[str]:
        """Return the nodes of ``tenant`` that ``selector`` means, by id: `*`, a tag, or one reference.

        A tag is written `site=north` or `tag:gateway`.

        Raises:
            UnknownNodeError: it means none.
        """
        if selector == ALL:
            found: Collection[str] = self._nodes.ids_of(tenant)
        elif is_tag_selector(selector):
            found = self._tagged(tenant, selector.removeprefix(TAG))
        else:
            return [self.resolve(tenant, selector, admits)]
        if not (members := sorted(filter(admits, found))):
            raise UnknownNodeError(selector, partial(self._close_tags, tenant, selector, admits))
        return members

    def change(self, changed: Mapping[str, NodeName | None]) -> set[str]:
        """Apply what the operator has changed: the nodes' new names; None for a node without any.

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

    def _names_in(self, tenant: str) -> _TenantNames:
        return self._tenants.get(tenant, _NO_NAMES)

    def name_of(self, node_id: str) -> NodeName:
        """Return what a node is called in the tenant that it is in."""
        name = self._by_node.get(node_id, _UNNAMED)
        return name if self._is_of(node_id, name.tenant) else _UNNAMED

    def _is_of(self, node_id: str, tenant: str) -> bool:
        """Return whether a node that was named in ``tenant`` is in it still; one not seen yet is."""
        return self._nodes.tenant_of(node_id) in {tenant, None}

    def _is_known(self, node_id: str, tenant: str) -> bool:
        now_in = self._nodes.tenant_of(node_id)
        return (now_in or self._by_node.get(node_id, _UNNAMED).tenant) == tenant

    def _by_prefix(self, tenant: str, reference: str, admits: Admits) -> str:
        prefix = id_prefix_of(reference)
        if prefix is None:
            raise UnknownNodeError(reference, partial(self._close_labels, tenant, reference, admits))
        fitting = list(filter(admits, _beginning(self._nodes.ids_of(tenant), prefix)))
        if len(fitting) != 1:
            close = partial(self._close_labels, tenant, reference, admits)
            raise UnknownNodeError(reference, close, candidates=len(fitting))
        return fitting[0]

    def _tagged(self, tenant: str, tag: str) -> list[str]:
        return [node_id for node_id in self.tagged(tenant, tag) if self._is_of(node_id, tenant)]

    def _close_labels(self, tenant: str, reference: str, admits: Admits) -> list[str]:
        names = self._names_in(tenant)
        found = closest(folded(reference), names.labels, names.by_word)
        shown = (names.nodes[label] for label in found)
        return [label for label, node_id in shown if self._is_of(node_id, tenant) and admits(node_id)]

    def _close_tags(self, tenant: str, selector: str, admits: Admits) -> list[str]:
        tags = closest(selector.removeprefix(TAG), self._names_in(tenant).tags)
        return [
            tag if "=" in tag else f"{TAG}{tag}"
            for tag in tags
            if any(map(admits, self._tagged(tenant, tag)))
        ]

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


_TENANTS_KEPT = 32
_BEHIND_IDS = "~"
"""Behind every character of an id."""

_Named = tuple[str, str]
"""A node, and the text that is searched."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """The named nodes of one tenant: those with a label by label, then those with tags alone by id."""

    revision: int
    named: list[_Named]
    node_ids: frozenset[str]


@define(eq=False, repr=False)
class NameSearch:
    """Searches ``names`` by words of labels and tags, and by the beginning of ids.

    The texts of a tenant are built when they are first searched after a name has changed; a search then reads
    ten thousand of them in about two milliseconds. It does not know which nodes are online or still there.
    """

    _names: NodeNames
    _kept: OrderedDict[str, _Texts] = field(init=False, factory=OrderedDict)

    def ranked(self, tenant: str, node_ids: Sequence[str], query: str) -> list[str]:
        """Return the nodes that ``query`` means, best first: of those named, and of the sorted ``node_ids``.

        Every word of the query must be in the label or a tag; one of 6 characters or more can begin the id in
        its place. First is the node whose label the query is, then those of which every word begins a word of
        the label or a tag, then the others; each group by label, and without one by id. No words mean all.
        """
        texts = self._texts(tenant)
        words = folded(query).split()
        if not words:
            unnamed = [node_id for node_id in node_ids if node_id not in texts.node_ids]
            return [node_id for node_id, _ in texts.named] + unnamed
        found = texts.named
        for word in dict.fromkeys(words):
            found = _with_word(found, word)
        exact, starting = f" {' '.join(words)}\n", found
        for word in dict.fromkeys(words):
            start = f" {word}"
            starting = [named for named in starting if start in named[1]]
        best = [node_id for node_id, text in starting if text.startswith(exact)]
        groups = (best, [node_id for node_id, _ in starting], [node_id for node_id, _ in found])
        # Shorter, it would not tell nodes apart.
        with_id = _beginning(node_ids, words[0]) if len(words) == 1 and len(words[0]) >= MIN_PREFIX else ()
        return list(dict.fromkeys([node_id for group in (*groups, with_id) for node_id in group]))

    def _texts(self, tenant: str) -> _Texts:
        revision = self._names.revision(tenant)
        texts = self._kept.get(tenant)
        if texts is None or texts.revision != revision:
            named = [(node_id, _text(name.label, name.tags)) for node_id, name in self._names.named(tenant)]
            node_ids = frozenset(node_id for node_id, _ in named)
            texts = self._kept[tenant] = _Texts(revision, named, node_ids)
        self._kept.move_to_end(tenant)
        if len(self._kept) > _TENANTS_KEPT:
            self._kept.popitem(last=False)
        return texts


def _with_word(named: Sequence[_Named], word: str) -> list[_Named]:
    if id_prefix_of(word) is None:
        return [each for each in named if word in each[1]]
    return [each for each in named if word in each[1] or each[0].startswith(word)]


def _beginning(node_ids: Sequence[str], prefix: str) -> Sequence[str]:
    """Return those of the sorted ``node_ids`` that begin with ``prefix``."""
    return node_ids[bisect_left(node_ids, prefix) : bisect_left(node_ids, prefix + _BEHIND_IDS)]


def _text(label: str, tags: Sequence[str]) -> str:
    """Return what is searched: each word behind a space; the label ends with a line feed, as no word does."""
    typed = "" if label.isascii() else f" {typed_form(label).lower()}\n"
    return f" {folded(label)}\n{typed}{''.join(f' {tag}' for tag in tags)}"
