"""The records of all nodes: by id, by tenant, and the tools of those that are listed now.

The index follows the records: the fleet changes a record and then calls ``update``. What ends by time (a
manifest, a leaf, a grace) waits in a queue, so that time that passes costs nothing until something ends.
Must not decide what is trusted.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from relay.auth.permissions import Rights
from relay.fleet.due_times import DueTimes
from relay.fleet.fleet_changes import FleetChange, FleetChanges, NodeChange
from relay.fleet.node_counts import NodeCounts
from relay.fleet.node_record import NO_TOOLS, NodeRecord
from relay.fleet.tool_index import ToolIndex, Version
from relay.fleet.tools import BEFORE_ALL, Position, Tool


class NodeIndex:
    """The nodes of one relay.

    Attributes:
        changes: what came, went and changed.
        counts: how many nodes are in which state; after ``settle``, as of now.
        retired: the nodes all of whose leaves are revoked; they are in no list of nodes.
        tools: those that are listed; after ``settle``, as of now.
    """

    def __init__(self, started_ms: int = 0) -> None:
        self.changes = FleetChanges(started_ms)
        self.retired: frozenset[str] = frozenset()
        self.counts = NodeCounts()
        self._nodes: dict[str, NodeRecord] = {}
        self._tenants: dict[str, dict[str, NodeRecord]] = {}
        self._ids: dict[str, list[str]] = {}
        self.tools = ToolIndex()
        self._ends = DueTimes()
        self._settled_ms = 0
        self._followers: list[Callable[[str], None]] = []

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[NodeRecord]:
        return iter(self._nodes.values())

    def __getitem__(self, node_id: str) -> NodeRecord:
        return self._nodes[node_id]

    def get(self, node_id: str) -> NodeRecord | None:
        """Return the record of a node of any tenant."""
        return self._nodes.get(node_id)

    def of_tenant(self, tenant: str) -> Mapping[str, NodeRecord]:
        """Return the nodes of ``tenant`` by id."""
        return self._tenants.get(tenant, {})

    def behind(self, tenant: str, after: str, limit: int | None) -> list[NodeRecord]:
        """Return the nodes of ``tenant`` that are not retired: ``limit`` of those behind the id ``after``."""
        ids, nodes = self.ids_of(tenant), self.of_tenant(tenant)
        start = bisect_right(ids, after)
        return list(
            islice(
                (nodes[node_id] for node_id in islice(ids, start, None) if node_id not in self.retired), limit
            )
        )

    def ids_of(self, tenant: str) -> Sequence[str]:
        """Return the ids of the nodes of ``tenant``, sorted."""
        return self._ids.get(tenant, ())

    def tenant_of(self, node_id: str) -> str | None:
        """Return the tenant of a node; None if there is none of that id."""
        node = self._nodes.get(node_id)
        return node.tenant if node is not None else None

    def follow(self, changed: Callable[[str], None]) -> None:
        """Call ``changed`` with each tenant whose listed tools may have changed."""
        self._followers.append(changed)

    def notify(self, tenant: str) -> None:
        """Call the followers: what ``tenant`` sees may have changed."""
        for changed in self._followers:
            changed(tenant)

    def update(self, node: NodeRecord, now_ms: int) -> None:
        """Take in ``node``, which is new or has changed."""
        tools = node.tools if node.is_listed(now_ms) else NO_TOOLS
        if node.tenant != node.indexed_tenant:
            self._file(node, now_ms)
        self._list(node, tools, now_ms)
        self._count(node, now_ms)
        if (end_ms := node.next_end_ms(now_ms)) is not None:
            self._ends.no_later_than(node.node_id, end_ms)

    def retire(self, retired: frozenset[str], now_ms: int) -> None:
        """Take in which nodes are retired from now on."""
        changed, self.retired = self.retired ^ retired, retired
        for node in filter(None, map(self._nodes.get, changed)):
            self._count(node, now_ms)

    def listed(
        self, rights: Rights, now_ms: int, after: Position = BEFORE_ALL, limit: int | None = None
    ) -> list[Tool]:
        """Return the tools that ``rights`` reach now, by place: of those behind ``after``, ``limit``."""
        self.settle(now_ms)
        return self.tools.listed(rights, after, limit)

    def version(self, rights: Rights, now_ms: int) -> Version:
        """Return the version of the set of tools that ``rights`` reach now."""
        self.settle(now_ms)
        return self.tools.version(rights)

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
        """Take ``node`` out of the index."""
        self._take_out(node, now_ms)
        self.counts.change(node.indexed_state, None)
        node.indexed_state = None
        del self._nodes[node.node_id]

    def _count(self, node: NodeRecord, now_ms: int) -> None:
        state = node.state(now_ms, is_retired=node.node_id in self.retired)
        self.counts.change(node.indexed_state, state)
        node.indexed_state = state

    def _take_out(self, node: NodeRecord, now_ms: int) -> None:
        """Take ``node`` out of the nodes of the tenant that it has in the index."""
        if node.indexed_tenant is None:
            return
        self._list(node, NO_TOOLS, now_ms)
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

    def _list(self, node: NodeRecord, tools: Mapping[str, Tool], now_ms: int) -> None:
        """List ``tools`` in the place of those of ``node`` that are listed."""
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
