"""The records of all nodes: by id, by tenant, and the tools of those that are listed now.

The index follows the records: the fleet changes a record and then calls ``update``. What ends by time (a
manifest, a leaf, a grace) waits in a queue, so that time that passes costs nothing until something ends.
Must not decide what is trusted.
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from attrs import define, field

from relay.fleet.node_record import NO_TOOLS, ManifestStatus, NodeRecord, NodeState
from relay.fleet.tool_index import ToolIndex
from relay.fleet.tools import Tool
from relay.fleet.usability import Decision
from schemas.tally import Tally


@define(eq=False, repr=False)
class NodeCounts:
    """The numbers of nodes by their states, kept as nodes change: to read one costs nothing.

    What ends by time changes when the index settles.

    Attributes:
        expected: how many have announced themselves and are not retired.
    """

    expected: int = 0
    _received: Tally[int] = field(init=False, factory=Tally)
    _of_tenants: Mapping[ManifestStatus, Tally[str]] = field(
        init=False, factory=lambda: {status: Tally() for status in ManifestStatus}
    )

    def change(self, before: NodeState | None, after: NodeState | None) -> None:
        """Note that the state of a node has changed; None: it was not counted, or is no longer."""
        if before != after:
            self._add(before, -1)
            self._add(after, 1)

    def received_in(self, subscription: int) -> int:
        """Return of how many of those expected the broker has sent an announce in ``subscription``."""
        return self._received[subscription]

    def of_tenants(self, status: ManifestStatus) -> Mapping[str, int]:
        """Return how many nodes of each tenant have a manifest of ``status``; only tenants with some."""
        return self._of_tenants[status]

    def _add(self, state: NodeState | None, by: int) -> None:
        if state is None:
            return
        if state.manifest_status is not None:
            self._of_tenants[state.manifest_status][state.tenant] += by
        if state.received_in is not None:
            self.expected += by
            self._received[state.received_in] += by


_SPARE = 64


@define(eq=False, repr=False)
class DueTimes:
    """When each of many things is to be examined again: the earliest first, and one time for each.

    A time that moves later costs nothing: the earlier one stays queued, and when it has come, the later one
    is queued. Never more than twice as many entries as names, and ``_SPARE``.
    """

    _due_ms: dict[str, int] = field(init=False, factory=dict)
    _heap: list[tuple[int, str]] = field(init=False, factory=list)

    def __len__(self) -> int:
        return len(self._heap)

    def no_later_than(self, name: str, due_ms: int) -> None:
        """Have ``name`` come due at ``due_ms``, or when it does already if that is earlier."""
        queued_ms = self._due_ms.get(name)
        if queued_ms is not None and queued_ms <= due_ms:
            return
        self._due_ms[name] = due_ms
        heappush(self._heap, (due_ms, name))
        if len(self._heap) > 2 * len(self._due_ms) + _SPARE:
            self._heap = [(due_ms, name) for name, due_ms in self._due_ms.items()]
            heapify(self._heap)

    def take(self, now_ms: int) -> Iterator[str]:
        while self._heap and self._heap[0][0] <= now_ms:
            due_ms, name = heappop(self._heap)
            if self._due_ms.get(name) == due_ms:
                del self._due_ms[name]
                yield name


KEPT = 1000
"""How many changes of a tenant are kept; the oldest is dropped first."""


class NodeChange(StrEnum):
    """What happened to a node."""

    CAME = "came"
    """Its tools are listed, and were not."""
    WENT = "went"
    """Its tools are not listed any more."""
    CHANGED = "changed"
    """It has other tools, or tools with other limits."""
    RENAMED = "renamed"
    """The operator has changed its label."""
    TAGGED = "tagged"
    """The operator has changed its tags alone."""


class FleetChange(NamedTuple):
    """One change of one node."""

    at_ms: int
    node_id: str
    what: NodeChange


@define(eq=False, repr=False)
class _History:
    complete_since_ms: int
    changes: deque[FleetChange] = field(init=False, factory=lambda: deque(maxlen=KEPT))


@define(eq=False, repr=False)
class FleetChanges:
    """The changes that one relay has seen since ``started_ms``: ``KEPT`` of each tenant."""

    _started_ms: int
    _histories: dict[str, _History] = field(init=False, factory=dict)

    def record(self, tenant: str, change: FleetChange) -> None:
        history = self._histories.setdefault(tenant, _History(self._started_ms))
        if len(history.changes) == KEPT:
            history.complete_since_ms = history.changes[0].at_ms + 1
        history.changes.append(change)

    def since(self, tenant: str, since_ms: int) -> list[FleetChange]:
        """Return the changes of ``tenant`` from ``since_ms`` on that are kept, oldest first."""
        history = self._histories.get(tenant)
        return [] if history is None else [change for change in history.changes if change.at_ms >= since_ms]

    def complete_since_ms(self, tenant: str) -> int:
        """Return from when on no change of ``tenant`` is missing."""
        history = self._histories.get(tenant)
        return self._started_ms if history is None else history.complete_since_ms


@define(eq=False, repr=False)
class NodeIndex:
    """The nodes of one relay.

    Attributes:
        get: returns the node of an id, or None.
        changes: what came, went and changed.
        counts: how many nodes are in which state; after ``settle``, as of now.
        decided: the nodes of each decision of the operator's; ``hidden``, in no list, are all of these.
        undecided: the decisions that were never taken in.
        tools: those that are listed; after ``settle``, as of now.
    """

    changes: FleetChanges = field(factory=lambda: FleetChanges(0))
    decided: dict[Decision, frozenset[str]] = field(
        init=False, factory=lambda: dict.fromkeys(Decision, frozenset())
    )
    hidden: frozenset[str] = field(init=False, default=frozenset())
    undecided: set[Decision] = field(init=False, factory=lambda: set(Decision))
    counts: NodeCounts = field(init=False, factory=NodeCounts)
    tools: ToolIndex = field(init=False, factory=ToolIndex)
    _nodes: dict[str, NodeRecord] = field(init=False, factory=dict)
    _tenants: dict[str, dict[str, NodeRecord]] = field(init=False, factory=dict)
    _ids: dict[str, list[str]] = field(init=False, factory=dict)
    _ids_revisions: Tally[str] = field(init=False, factory=Tally)
    _ends: DueTimes = field(init=False, factory=DueTimes)
    _settled_ms: int = field(init=False, default=0)
    _followers: list[Callable[[str], None]] = field(init=False, factory=list)
    get: Callable[[str], NodeRecord | None] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.get = self._nodes.get  # not a method: each call of a tool reads a node

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self._nodes.values())

    def __getitem__(self, node_id: str) -> NodeRecord:
        return self._nodes[node_id]

    def of_tenant(self, tenant: str) -> Mapping[str, NodeRecord]:
        return self._tenants.get(tenant, {})

    def behind(self, tenant: str, after: str, limit: int | None) -> list[NodeRecord]:
        """Return the nodes of ``tenant`` that are not hidden: ``limit`` of those behind the id ``after``."""
        ids, nodes = self.ids_of(tenant), self.of_tenant(tenant)
        start = bisect_right(ids, after)
        return list(
            islice(
                (nodes[node_id] for node_id in islice(ids, start, None) if node_id not in self.hidden), limit
            )
        )

    def ids_of(self, tenant: str) -> Sequence[str]:
        return self._ids.get(tenant, ())

    def ids_revision(self, tenant: str) -> int:
        """Return a number that grows as nodes come to ``tenant``, and leave it."""
        return self._ids_revisions[tenant]

    def tenant_of(self, node_id: str) -> str | None:
        return node.tenant if (node := self._nodes.get(node_id)) is not None else None

    def follow(self, changed: Callable[[str], None]) -> None:
        """Call ``changed`` with each tenant whose listed tools may have changed."""
        self._followers.append(changed)

    def notify(self, tenant: str) -> None:
        for changed in self._followers:
            changed(tenant)

    def update(self, node: NodeRecord, now_ms: int) -> None:
        is_listed = node.is_listed(now_ms) and node.node_id not in self.hidden
        tools = node.tools if is_listed else NO_TOOLS
        if node.tenant != node.indexed_tenant:
            self._file(node, now_ms)
        self._list(node, tools, now_ms)
        self._count(node, now_ms)
        if (end_ms := node.next_end_ms(now_ms)) is not None:
            self._ends.no_later_than(node.node_id, end_ms)

    def decide(self, decision: Decision, node_ids: frozenset[str], now_ms: int) -> None:
        self.undecided.discard(decision)
        changed, self.decided[decision] = self.decided[decision] ^ node_ids, node_ids
        self.hidden = frozenset().union(*self.decided.values())
        for node in filter(None, map(self._nodes.get, changed)):
            self.update(node, now_ms)

    def is_expected(self, node: NodeRecord) -> bool:
        """Return whether the broker has an announce of ``node``: it has announced itself before."""
        return node.mark is not None and node.node_id not in self.decided[Decision.RETIRED]

    def settle(self, now_ms: int) -> None:
        """Delist what has ended by ``now_ms``, and count it no longer."""
        if now_ms < self._settled_ms:
            # The clock was set back, by minutes: manifests that had ended have not.
            due: list[NodeRecord] = list(self)
        else:
            # A node that was removed may still be queued.
            due = [node for node_id in self._ends.take(now_ms) if (node := self._nodes.get(node_id))]
        self._settled_ms = now_ms
        for node in due:
            self.update(node, now_ms)

    def remove(self, node: NodeRecord, now_ms: int) -> None:
        self._take_out(node, now_ms)
        self.counts.change(node.indexed_state, None)
        node.indexed_state = None
        del self._nodes[node.node_id]

    def _count(self, node: NodeRecord, now_ms: int) -> None:
        state = node.state(now_ms, is_expected=self.is_expected(node))
        self.counts.change(node.indexed_state, state)
        node.indexed_state = state

    def _take_out(self, node: NodeRecord, now_ms: int) -> None:
        if node.indexed_tenant is None:
            return
        self._list(node, NO_TOOLS, now_ms)
        self._ids_revisions[node.indexed_tenant] += 1
        former, ids = self._tenants[node.indexed_tenant], self._ids[node.indexed_tenant]
        del former[node.node_id], ids[bisect_left(ids, node.node_id)]
        if not former:
            del self._tenants[node.indexed_tenant], self._ids[node.indexed_tenant]
        node.indexed_tenant = None

    def _file(self, node: NodeRecord, now_ms: int) -> None:
        """Put ``node`` where its tenant's nodes are, out of those of the tenant that it had before."""
        self._nodes[node.node_id] = node
        self._take_out(node, now_ms)
        self._tenants.setdefault(node.tenant, {})[node.node_id] = node
        insort(self._ids.setdefault(node.tenant, []), node.node_id)
        node.indexed_tenant = node.tenant
        self._ids_revisions[node.tenant] += 1

    def _list(self, node: NodeRecord, tools: Mapping[str, Tool], now_ms: int) -> None:
        if tools is node.indexed_tools or node.indexed_tenant is None:
            return
        what = _change(node.indexed_tools, tools)
        if what is not None:
            self.changes.record(node.indexed_tenant, FleetChange(now_ms, node.node_id, what))
        self.tools.remove(node.indexed_tenant, node.indexed_tools.values())
        self.tools.add(node.indexed_tenant, tools.values())
        node.indexed_tools = tools
        self.notify(node.indexed_tenant)


def _change(before: Mapping[str, Tool], after: Mapping[str, Tool]) -> NodeChange | None:
    """Return what the step from one set of listed tools to another is; None if only the label differs."""
    if not before or not after:
        return (NodeChange.CAME if after else NodeChange.WENT) if before or after else None
    etags_before, etags_after = (
        {name: tool.etag for name, tool in tools.items()} for tools in (before, after)
    )
    return None if etags_before == etags_after else NodeChange.CHANGED
