"""The labels and tags that the operator gave to nodes, in a ledger of the relay's state.

| action | members besides ``ts_ms`` and ``node_id`` |
|---|---|
| `name` | `tenant`, `label` (null: none; in its kept form), `tags`: all that the node has from now on |
| `forget` | none: its names are gone, and it is not listed until it is issued a certificate again |

Either may have `shared`, true: the other relays of the fleet have it too. Without that it was decided here.
By a name tokens reach a node: one of another relay counts for that only with `signed`, true, where a relay
has signed it.

Commands append, and so does the relay when a node enrols with a token that carries names; a running relay
reads. An entry is for the node while it is in that tenant: another tenant must not read its names. Must not
know which nodes exist.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relay.state.ledger import Entry, Ledger, LedgerState
from relay.state.merging import SIGNED, LazyEntries, SharedForm
from schemas.error_roots import OperatorError
from schemas.labels import (
    NameRuleError,
    NodeName,
    check_kept,
    check_tags,
    folded,
    kept_form,
    label_of,
    look_of,
    shown_form,
    tag_key,
)
from schemas.projection import is_node_id
from schemas.times import SystemClock


class LabelTakenError(OperatorError):
    """Another node of the tenant has the label, or one that looks the same; the text names it."""

    def __init__(self, label: str, node_id: str) -> None:
        super().__init__(
            f"{label!r} is, or looks like, the label of {node_id}: choose another, or label that node anew"
        )
        self.label = label
        self.node_id = node_id


class Names(LedgerState):
    """The names of all nodes: what the entries add up to.

    Attributes:
        proven: the last name of each node that was decided here, or that a relay has signed.
        forgotten: the nodes that were forgotten and not named since.
        unshared: what was decided here last of each node, if no other relay has it yet; None: to forget it.
    """

    def __init__(self) -> None:
        self.by_node: dict[str, NodeName] = {}
        self.proven: dict[str, NodeName] = {}
        self.forgotten: set[str] = set()
        self.unshared: dict[str, NodeName | None] = {}
        self._by_label: dict[tuple[str, str], str] = {}
        self._by_look: dict[tuple[str, str], str] = {}

    def with_proven(self) -> Mapping[str, NodeName]:
        """Return the names of all nodes, each with the one that is proven where that is another."""
        named = dict(self.by_node)
        for node_id in named.keys() | self.proven.keys():
            proven = self.proven.get(node_id)
            name = named.get(node_id) or NodeName(proven.tenant if proven else "")
            if proven is None or proven.tenant != name.tenant:
                proven = NodeName(name.tenant)
            if proven != name:
                named[node_id] = replace(name, proven=proven)
        return named

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
            KeyError, ValueError, TypeError: it is malformed, or would give one label to two nodes.
        """
        node_id = entry["node_id"]
        if not is_node_id(node_id):
            raise ValueError(node_id)
        match entry["action"]:
            case "name":
                name: NodeName | None = name_in(entry)
                self.forgotten.discard(node_id)
            case "forget":
                name = None
                self.forgotten.add(node_id)
            case other:
                raise ValueError(other)
        self._put(node_id, name)
        is_shared = entry.get("shared") is True
        if name is not None and (not is_shared or entry.get(SIGNED) is True):
            self.proven[node_id] = name
        elif not is_shared or entry.get(SIGNED) is True:
            self.proven.pop(node_id, None)
        if is_shared:
            self.unshared.pop(node_id, None)
        else:
            self.unshared[node_id] = name

    def _put(self, node_id: str, name: NodeName | None) -> None:
        if name is not None and name.label:
            holder = self.holder(name.tenant, name.label)
            if holder not in {None, node_id}:
                raise ValueError(name.label)
        former = self.by_node.pop(node_id, None)
        if former is not None and former.label:
            del self._by_label[former.tenant, folded(former.label)]
            if self._by_look.get(look := (former.tenant, look_of(former.label))) == node_id:
                del self._by_look[look]
        if name is None or not (name.label or name.tags):
            return
        self.by_node[node_id] = name
        if name.label:
            self._by_label[name.tenant, folded(name.label)] = node_id
            if not name.label.isascii():  # the look of another is its folded form
                self._by_look[name.tenant, look_of(name.label)] = node_id


class NameLedger:
    """The ledger in ``path``, which is made with the first entry.

    Everything raises LedgerError if the file is damaged, and OSError if it cannot be used. Writing waits for
    the ledger's lock and for the disk: call it on a thread, not on the event loop.
    """

    def __init__(self, path: Path, now_ms: SystemClock) -> None:
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


def _line(node_id: str, name: NodeName | None, now_ms: int) -> Entry:
    """Return the line that names a node from now on, or forgets it."""
    line: Entry = {"action": "forget" if name is None else "name", "ts_ms": now_ms, "node_id": node_id}
    return line if name is None else line | _members(name)


def _members(name: NodeName) -> Entry:
    return {"tenant": name.tenant, "label": kept_form(name.label) or None, "tags": list(name.tags)}


# --- as the relays of a fleet have them in common: in the order of the stream: a label is one node's ---


def _shared_name_in(entry: Entry) -> NodeName | None:
    return None if "forgotten" in entry else name_in(entry)


def _key_of(entry: Entry) -> str:
    _shared_name_in(entry)  # raises where a label or a tag is malformed
    return str(entry["node_id"])


def _shared(node_id: str, name: NodeName | None) -> Entry:
    return {"node_id": node_id} | ({"forgotten": True} if name is None else _members(name))


def _has(names: Names, entry: Entry) -> bool:
    node_id, name = entry["node_id"], _shared_name_in(entry)
    if name is None or node_id in names.forgotten:
        is_known = entry.get(SIGNED) is not True or node_id not in names.proven
        return name is None and node_id in names.forgotten and is_known
    has = names.by_node.get(node_id)
    if entry.get(SIGNED) is True and names.proven.get(node_id) != name:
        return False
    return has == name if name.label or name.tags else has is None


def _without_its_label(names: Names, entry: Entry) -> Iterable[Entry]:
    """Yield the name of the node that has the label of ``entry``, without it: the first one has it."""
    name = _shared_name_in(entry)
    holder = names.holder(name.tenant, name.label) if name is not None and name.label else None
    if holder not in {None, entry["node_id"]}:
        yield _shared(holder, replace(names.by_node[holder], label=""))


NAMES = SharedForm(
    key_of=_key_of,
    entries=lambda names: LazyEntries(
        [*names.forgotten, *names.by_node], lambda node_id: _shared(node_id, names.by_node.get(node_id))
    ),
    has=_has,
    line=lambda _names, entry, now_ms: (
        _line(entry["node_id"], _shared_name_in(entry), now_ms)
        | ({SIGNED: True} if entry.get(SIGNED) is True else {})
    ),
    unshared=lambda names: LazyEntries(
        names.unshared, lambda node_id: _shared(node_id, names.unshared[node_id])
    ),
    displaced=_without_its_label,
    displaced_event="label taken: another node has it",
    notes_signed=True,
)
