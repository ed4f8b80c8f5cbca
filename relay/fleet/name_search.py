"""Searches the nodes of a tenant by words of their labels and tags, and by the beginning of their ids.

The texts of a tenant are built when they are first searched after the operator has changed a name; a search
then reads ten thousand of them in about two milliseconds. Must not know what a node offers, nor whether it is
online or still in the tenant.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from relay.fleet.node_names import NodeNames
from relay.state.labels import MIN_PREFIX, folded, id_prefix_of, typed_form

_TENANTS_KEPT = 32
_BEHIND_IDS = "~"

_Named = tuple[str, str]
"""A node, and the text that is searched."""


@dataclass(frozen=True, slots=True)
class _Texts:
    """The named nodes of one tenant: those with a label by label, then those with tags alone by id."""

    revision: int
    named: list[_Named]
    node_ids: frozenset[str]


class NameSearch:
    """Searches what ``names`` has."""

    def __init__(self, names: NodeNames) -> None:
        self._names = names
        self._kept: OrderedDict[str, _Texts] = OrderedDict()

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
        for word in words:
            found = _with_word(found, word)
        exact, starting = f" {' '.join(words)}\n", found
        for word in words:
            start = f" {word}"
            starting = [named for named in starting if start in named[1]]
        best = [node_id for node_id, text in starting if text.startswith(exact)]
        groups = (best, [node_id for node_id, _ in starting], [node_id for node_id, _ in found])
        with_id = _beginning(node_ids, words[0]) if len(words) == 1 else ()
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


def _beginning(node_ids: Sequence[str], word: str) -> Sequence[str]:
    """Return those of ``node_ids`` that begin with ``word``, if it is long enough to tell nodes apart."""
    if len(word) < MIN_PREFIX:
        return []
    return node_ids[bisect_left(node_ids, word) : bisect_left(node_ids, word + _BEHIND_IDS)]


def _text(label: str, tags: Sequence[str]) -> str:
    """Return what is searched: each word behind a space; the label ends with a line feed, as no word does."""
    typed = "" if label.isascii() else f" {typed_form(label).lower()}\n"
    return f" {folded(label)}\n{typed}{''.join(f' {tag}' for tag in tags)}"
