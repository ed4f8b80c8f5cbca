"""The labels and tags that the operator gave to nodes, in a ledger of the relay's state.

| action | members besides ``ts_ms`` and ``node_id`` |
|---|---|
| `name` | `tenant`, `label` (null: none; in its kept form), `tags`: all that the node has from now on |
| `forget` | none: its names are gone, and it is not listed until it is issued a certificate again |

Either may have `shared`, true: the other relays of the fleet have it too. Without that it was decided here.

Commands append, and so does the relay when a node enrols with a token that carries names; a running relay
reads. An entry is for the node while it is in that tenant: another tenant must not read its names. Must not
know which nodes exist.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType

from relay.state.labels import (
    NameRuleError,
    check_kept,
    check_tags,
    folded,
    kept_form,
    label_of,
    look_of,
    shown_form,
    tag_key,
)
from relay.state.ledger import Entry, Ledger
from relay.state.merging import LazyEntries, SharedForm
from schemas.error_roots import OperatorError
from schemas.projection import is_node_id


class LabelTakenError(OperatorError):
    """Another node of the tenant has the label, or one that looks the same; the text names it."""

    def __init__(self, label: str, node_id: str) -> None:
        super().__init__(
            f"{label!r} is, or looks like, the label of {node_id}: choose another, or label that node anew"
        )
        self.label = label
        self.node_id = node_id


@dataclass(frozen=True, slots=True)
class NodeName:
    """What the operator calls a node of ``tenant``: by a label (empty: none) and tags, sorted."""

    tenant: str
    label: str = ""
    tags: tuple[str, ...] = ()


class Names:
    """The names of all nodes: what the entries add up to."""

    def __init__(self) -> None:
        self._by_node: dict[str, NodeName] = {}
        self._by_label: dict[tuple[str, str], str] = {}
        self._by_look: dict[tuple[str, str], str] = {}
        self._forgotten: set[str] = set()
        self._unshared: dict[str, NodeName | None] = {}

    @property
    def unshared(self) -> Mapping[str, NodeName | None]:
        """What was decided here last of each node, if no other relay has been told; None: to forget it."""
        return MappingProxyType(self._unshared)

    @property
    def forgotten(self) -> AbstractSet[str]:
        """The nodes that were forgotten and not named since."""
        return self._forgotten

    @property
    def by_node(self) -> Mapping[str, NodeName]:
        return MappingProxyType(self._by_node)

    def copy(self) -> "Names":
        other = Names()
        other._by_node, other._by_label = self._by_node.copy(), self._by_label.copy()
        other._by_look = self._by_look.copy()
        other._forgotten, other._unshared = self._forgotten.copy(), self._unshared.copy()
        return other

    def holder(self, tenant: str, label: str) -> str | None:
        """Return the node of ``tenant`` that has ``label``, without regard to case."""
        return self._by_label.get((tenant, folded(label)))

    def taken_by(self, tenant: str, label: str) -> str | None:
        """Return the node of ``tenant`` that has ``label``, or one that people would take for it.

        Two nodes have such labels only if two relays gave them at once, or one of an older version did.
        """
        look = (tenant, look_of(label))
        return self.holder(tenant, label) or self._by_look.get(look) or self._by_label.get(look)

    def apply(self, entry: Entry) -> None:
        """Apply the next entry.

        Raises:
            KeyError, ValueError, TypeError: it is none, or would give one label to two nodes.
        """
        node_id = entry["node_id"]
        if not is_node_id(node_id):
            raise ValueError(node_id)
        match entry["action"]:
            case "name":
                said: NodeName | None = name_in(entry)
                self._put(node_id, said)
                self._forgotten.discard(node_id)
            case "forget":
                said = None
                self._put(node_id, None)
                self._forgotten.add(node_id)
            case other:
                raise ValueError(other)
        if entry.get("shared") is True:
            self._unshared.pop(node_id, None)
        else:
            self._unshared[node_id] = said

    def _put(self, node_id: str, name: NodeName | None) -> None:
        if name is not None and name.label:
            holder = self.holder(name.tenant, name.label)
            if holder not in {None, node_id}:
                raise ValueError(name.label)
        former = self._by_node.pop(node_id, None)
        if former is not None and former.label:
            del self._by_label[former.tenant, folded(former.label)]
            if self._by_look.get(look := (former.tenant, look_of(former.label))) == node_id:
                del self._by_look[look]
        if name is None or not (name.label or name.tags):
            return
        self._by_node[node_id] = name
        if name.label:
            self._by_label[name.tenant, folded(name.label)] = node_id
            if not name.label.isascii():  # the look of another is its folded form
                self._by_look[name.tenant, look_of(name.label)] = node_id


class NameLedger:
    """The ledger in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used. Writing waits for
    the ledger's lock and for the disk: call it on a thread, not on the event loop.
    """

    def __init__(self, path: Path, now_ms: Callable[[], int]) -> None:
        self.ledger = Ledger(path, Names())
        self._now_ms = now_ms

    def read(self) -> Names:
        """Return the names of all nodes, which do not change afterwards."""
        return self.ledger.read()

    def label(self, node_id: str, tenant: str, label: str) -> str:
        """Give the node of ``tenant`` a label, and return it as it is shown; an empty one takes it away.

        Raises:
            NameRuleError: it is no label.
            LabelTakenError: another node of the tenant has it.
        """
        label = label and label_of(label)
        with self.ledger.locked() as names:
            former = _of(names, node_id, tenant)
            self._append(names, node_id, NodeName(tenant, label, former.tags))
        return label

    def tag(self, node_id: str, tenant: str, add: Iterable[str] = (), remove: Iterable[str] = ()) -> None:
        """Set tags of the node of ``tenant``, by their keys, and remove those of other keys.

        Raises:
            NameRuleError: a tag is malformed, or there would be too many.
        """
        added, removed = tuple(add), {tag_key(tag) for tag in remove}
        check_tags(added)
        with self.ledger.locked() as names:
            former = _of(names, node_id, tenant)
            gone = removed | {tag_key(tag) for tag in added}
            tags = sorted({*(tag for tag in former.tags if tag_key(tag) not in gone), *added})
            check_tags(tags)
            self._append(names, node_id, NodeName(tenant, former.label, tuple(tags)))

    def name_new(self, node_id: str, tenant: str, label: str, tags: Sequence[str]) -> bool:
        """Name a node that enrols, unless it has names; return whether it has the label.

        A label that another node of the tenant has by now is left out, so that the node can enrol. So are
        names that are malformed: an entry with them would damage the ledger.
        """
        try:
            label = label and label_of(label)
            check_tags(tags)
        except NameRuleError:
            return False
        with self.ledger.locked() as names:
            former = _of(names, node_id, tenant)
            if former.label or former.tags:
                return former.label == label  # it lost the answer to the same enrolment
            is_free = not label or names.taken_by(tenant, label) in {None, node_id}
            name = NodeName(tenant, label if is_free else "", tuple(sorted(tags)))
            self._append(names, node_id, name)
            return is_free

    def forget(self, node_id: str) -> None:
        """Remove the names of a node, and record that it is not to be listed."""
        with self.ledger.locked() as names:
            if node_id not in names.forgotten:
                self.ledger.append(_line(node_id, None, self._now_ms()))

    def _append(self, names: Names, node_id: str, name: NodeName) -> None:
        if name == _of(names, node_id, name.tenant):
            return
        holder = names.taken_by(name.tenant, name.label) if name.label else None
        if holder is not None and holder != node_id:
            raise LabelTakenError(name.label, holder)
        self.ledger.append(_line(node_id, name, self._now_ms()))


def _of(names: Names, node_id: str, tenant: str) -> NodeName:
    """Return the node's name in ``tenant``: what another tenant called it does not count."""
    name = names.by_node.get(node_id)
    return name if name is not None and name.tenant == tenant else NodeName(tenant)


def name_in(entry: Entry) -> NodeName:
    """Return the name in ``tenant``, ``label`` and ``tags`` of ``entry``.

    Raises:
        KeyError, ValueError, TypeError: there is none.
    """
    tenant, label, tags = entry["tenant"], entry["label"], entry["tags"]
    if not isinstance(tenant, str) or not isinstance(tags, list):
        raise TypeError(entry)
    try:
        if label is not None:
            check_kept(label)
        check_tags(tags)
    except NameRuleError as error:
        raise ValueError(str(error)) from None
    return NodeName(tenant, shown_form(label or ""), tuple(sorted(tags)))


def _line(node_id: str, said: NodeName | None, now_ms: int) -> Entry:
    """Return the line that names a node from now on, or forgets it."""
    line: Entry = {"action": "forget", "ts_ms": now_ms, "node_id": node_id}
    if said is not None:
        line |= {
            "action": "name",
            "tenant": said.tenant,
            "label": kept_form(said.label) or None,
            "tags": list(said.tags),
        }
    return line


# --- as the relays of a fleet have them in common: in the order of the stream: a label is one node's ---


def _said_in(entry: Entry) -> NodeName | None:
    return None if "forgotten" in entry else name_in(entry)


def _key_of(entry: Entry) -> str:
    _said_in(entry)  # raises where a label or a tag is none
    return str(entry["node_id"])


def _shared(node_id: str, said: NodeName | None) -> Entry:
    if said is None:
        return {"node_id": node_id, "forgotten": True}
    names = {"tenant": said.tenant, "label": kept_form(said.label) or None, "tags": list(said.tags)}
    return {"node_id": node_id, **names}


def _decided(names: Names) -> Mapping[str, Entry]:
    nodes = chain(names.forgotten, names.by_node)
    return LazyEntries(nodes, lambda node_id: _shared(node_id, names.by_node.get(node_id)))


def _has(names: Names, entry: Entry) -> bool:
    node_id, said = entry["node_id"], _said_in(entry)
    if said is None or node_id in names.forgotten:
        return said is None and node_id in names.forgotten
    has = names.by_node.get(node_id)
    return has == said if said.label or said.tags else has is None


def _without_its_label(names: Names, entry: Entry) -> Iterable[Entry]:
    """Yield the name of the node that has the label of ``entry``, without it: the first one has it."""
    said = _said_in(entry)
    holder = names.holder(said.tenant, said.label) if said is not None and said.label else None
    if holder not in {None, entry["node_id"]}:
        yield _shared(holder, replace(names.by_node[holder], label=""))


NAMES = SharedForm(
    key_of=_key_of,
    entries=_decided,
    has=_has,
    line=lambda _names, entry, now_ms: _line(entry["node_id"], _said_in(entry), now_ms),
    unshared=lambda names: LazyEntries(
        names.unshared, lambda node_id: _shared(node_id, names.unshared[node_id])
    ),
    displaced=_without_its_label,
    displaced_event="label taken: another node has it",
)
