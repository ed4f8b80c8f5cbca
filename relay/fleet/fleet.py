"""The nodes of one relay: identities and manifests in, tools out.

Bytes from the broker and from sessions arrive here, and only what the trust rules accept is kept. Must not
do I/O: marks go to a store that writes them later.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Any

from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent, RefusalReason
from relay.auth.permissions import Rights
from relay.fleet.clock_comparison import NodeClocks
from relay.fleet.facts import NodeWarnings, severity_rank
from relay.fleet.inventory import Inventory, PendingManifests
from relay.fleet.leaves import FleetTrust
from relay.fleet.node_index import FleetChange, FleetChanges, NodeChange, NodeIndex
from relay.fleet.node_names import NodeNames
from relay.fleet.node_record import NodeRecord, Where, known_of
from relay.fleet.reach import Reach
from relay.fleet.replay_marks import MarkStore
from relay.fleet.selection import NodeSearch, SelectedTools
from relay.fleet.tools import Projector, Tool, labelled
from relay.fleet.usability import Decision, NodeUse, Usability
from relay.observability.metrics import Metrics
from relay.observability.node_labels import with_labels
from schemas.certificates import IdentityError
from schemas.errors import Failure, ToolError
from schemas.identity import Identity, certificates_in, to_pem
from schemas.labels import NodeName
from schemas.payloads import OpenFinding
from schemas.projection import parse
from schemas.times import ValidityClock
from schemas.trust import HighWaterMark, Outcome, TrustedManifest, Verdict

GRACE_MS = 30_000
"""How long tools stay listed without a connection, and after the relay's start: nodes need to reconnect."""


class Fleet:
    """Every node of which the relay has verified a leaf.

    Attributes:
        trust: the roots, revocations and rules by which leaves and manifests are verified.
        usability: why a node cannot be used now.
        names: what the operator calls the nodes.
        reach: the nodes that a caller reaches: agents' look-ups.
        kinds: the names of the kinds that this relay knows.
        selected, search: tools by what a client's URL selects; nodes by what they are called and offer.
        changes: what came, went, changed and was renamed.
        inventory: whether the broker has sent what is known.
        clocks: whether those of the nodes are ahead of this machine's.
        warnings: the nodes that their operator should do something about.
    """

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        trust: FleetTrust,
        projector: Projector,
        marks: MarkStore,
        metrics: Metrics,
        refusals: RefusalCounter,
        now_ms: ValidityClock,
        log: FilteringBoundLogger,
    ) -> None:
        self.trust = trust
        self._projector = projector
        self.kinds = projector.kind_names
        self._marks = marks
        self._metrics = metrics
        self._refusals = refusals
        self._now_ms = now_ms
        self._nodes = NodeIndex(FleetChanges(now_ms()))
        self.changes = self._nodes.changes
        self.names = NodeNames(self._nodes)
        self.reach = Reach(self._nodes, self.names)
        self.usability = Usability(now_ms, now_ms() + GRACE_MS, self._nodes.decided, self.reach.admits)
        self._log = with_labels(log, self.names.label_of)
        self.selected = SelectedTools(self._nodes, self.reach, now_ms)
        self.search = NodeSearch(self._nodes, self.reach)
        for node_id, tenant, mark in marks.load():
            self._nodes.update(self._new_record(node_id, tenant, mark), now_ms())
        event, reason = RefusalEvent.MANIFEST_REFUSED, RefusalReason.NO_LEAF
        self._pending = PendingManifests(lambda node_id: self._refusals.count(event, node_id, reason))
        self.inventory = Inventory(self._nodes, metrics, now_ms, log)
        self.clocks = NodeClocks(self._nodes, now_ms, log)
        self.warnings = NodeWarnings(metrics)
        self.warnings.watch("wrong_clocks", lambda: self.clocks.wrong)
        self._tools: dict[str, Tool] = {}
        # The hash of each identity message that was accepted last, by the present roots and revocations.
        self._offered: dict[str, bytes] = {}

    def tenant_of(self, node_id: str) -> str | None:
        """Return the tenant of ``node_id``; None if no leaf of it was ever verified."""
        return self._nodes.tenant_of(node_id)

    def identify(self, node_id: str, pem: str) -> Identity:
        """Return the identity of ``node_id`` that ``pem`` proves, and keep it.

        Raises:
            IdentityError: it proves nothing, or another node; nothing is displaced.
        """
        now = self._now_ms()
        node = self._nodes.get(node_id)
        identity = self.trust.identify(node_id, pem, node, now)
        if node is None:
            node = self._new_record(node_id, identity.tenant)
        if node.identities.get(identity.kid) is not identity:
            node.keep(identity)
            # Its tenant may be another now, in which it has another label.
            self._label(node)
            self._nodes.update(node, now)
        return identity

    def _new_record(self, node_id: str, tenant: str, mark: HighWaterMark | None = None) -> NodeRecord:
        return NodeRecord(node_id, tenant, mark=mark, grace_until_ms=self.usability.awaited_until_ms)

    def offer_identity(self, node_id: str, pem: str) -> None:
        """Handle a message of a node's identity topic, and the manifest that was pending for it.

        At renewal there are two leaves, the new one first; what follows them is the chain. A message that is
        repeated, as after a reconnect, is not verified again.
        """
        digest = sha256(pem.encode("utf-8", "replace")).digest()
        if self._offered.get(node_id) == digest and node_id not in self._pending:
            self._metrics.identities.labels("unchanged").inc()
            return
        try:
            self.identify(node_id, pem)
            second = certificates_in(pem)[1:2]
            if second and not self.trust.is_root(second[0]):
                with suppress(IdentityError):  # it is of another chain
                    self.identify(node_id, to_pem(second))
        except IdentityError as error:
            self._metrics.identities.labels(error.reason).inc()
            if self._refusals.count(RefusalEvent.IDENTITY_REFUSED, node_id, error.reason):
                self._log.warning("identity not accepted", node_id=node_id, reason=error.reason)
            return
        self._metrics.identities.labels("accepted").inc()
        self._offered[node_id] = digest
        if (pending := self._pending.take(node_id, self._now_ms())) is not None:
            self.inventory.received(node_id, pending)  # when this arrived, it did not know the node
            self.offer_manifest(node_id, pending, "broker")

    def offer_manifest(
        self, node_id: str, wire: bytes, way: str, parsed: Mapping[str, Any] | None = None
    ) -> Verdict:
        """Judge a manifest received by ``way`` (``broker`` or ``session``) and act on the verdict.

        ``parsed`` is what ``wire`` was parsed to already, if it was.
        """
        node, now = self._nodes.get(node_id), self._now_ms()
        is_live = way == "session"
        known = known_of(node, self.trust.revoked, is_live=is_live)
        verdict = self.trust.rules.accept(wire, node_id, now, known, parsed)
        reason = verdict.reason.value if verdict.reason else ""
        self._metrics.manifests(verdict.outcome.value, reason, way).inc()
        self.clocks.judged(node_id, verdict, is_live=is_live)
        if verdict.outcome is Outcome.PENDING:
            if not self._pending.put(node_id, wire, now):
                self._metrics.messages_dropped.labels("too_many_pending").inc()
        elif verdict.outcome is Outcome.REJECTED:
            if self._refusals.count(RefusalEvent.MANIFEST_REFUSED, node_id, reason):
                self._log.warning("manifest rejected", node_id=node_id, reason=reason, way=way)
            if node is not None:
                node.rejected = True
        elif verdict.manifest is not None and node is not None:
            self._accept(node, verdict.manifest, verdict.capabilities)
        return verdict

    def signer_of(self, node_id: str) -> Identity | None:
        """Return the leaf that signed the manifest of ``node_id`` that is in force."""
        manifest = self._nodes[node_id].manifest
        return manifest.identity if manifest is not None else None

    def change_trust(self, roots: Sequence[str], revoked: frozenset[str]) -> None:
        """Trust by these roots and revocations from now on. ``drop_leaves`` drops what was trusted before."""
        self.trust = replace(self.trust, roots=roots, revoked=revoked)
        self._offered.clear()

    def drop_leaves(self, is_untrusted: Callable[[Identity], bool]) -> None:
        """Drop every leaf that is no longer trusted, and the manifest that it signed."""
        for node in self._nodes:
            if node.manifest is not None and is_untrusted(node.manifest.identity):
                self._drop_manifest(node)
                node.leaf_dropped = True
            if node.drop_leaves(is_untrusted) or node.leaf_dropped:
                self._nodes.update(node, self._now_ms())

    def rename(self, changed: Mapping[str, NodeName | None]) -> None:
        """Apply the new names of some nodes; None for a node that has none any more."""
        former = {node_id: self.names.label_of(node_id) for node_id in changed}
        tenants, now = self.names.change(changed), self._now_ms()
        for node in filter(None, map(self._nodes.get, changed)):
            self._label(node)
            self._nodes.update(node, now)
            is_renamed = self.names.label_of(node.node_id) != former[node.node_id]
            what = NodeChange.RENAMED if is_renamed else NodeChange.TAGGED
            self.changes.record(node.tenant, FleetChange(now, node.node_id, what))
        for tenant in tenants:
            self._nodes.notify(tenant)  # a tag alone changes no title, but what it selects

    def decide(self, decision: Decision, node_ids: frozenset[str]) -> None:
        self._nodes.decide(decision, node_ids, self._now_ms())

    def check_complete(self) -> None:
        """Return if every decision was applied, and something finds the nodes of every warning.

        Raises:
            ValueError: one is declared in a table alone.
        """
        if missing := self._nodes.undecided:
            raise ValueError(f"decisions that nothing applies: {', '.join(sorted(missing))}")
        if unwatched := self.warnings.unwatched():
            raise ValueError(f"warnings that nothing finds: {', '.join(sorted(unwatched))}")

    def retire(self, retired: frozenset[str], forgotten: Iterable[str]) -> None:
        """List the nodes that are ``retired`` no longer, and forget ``forgotten``, some of them."""
        self.decide(Decision.RETIRED, retired)
        for node in filter(None, map(self._nodes.get, forgotten)):
            if not node.connected:
                self._drop_manifest(node)
                self._nodes.remove(node, self._now_ms())
                # Every leaf that a replayed manifest could be signed with is revoked.
                self._marks.drop(node.node_id)
                self._offered.pop(node.node_id, None)

    def tombstone(self, node_id: str) -> None:
        """Delist a node whose retained announce is empty. That is not signed, so a connected node stays."""
        node = self._nodes.get(node_id)
        if node is not None and not node.connected:
            self._drop_manifest(node)
            self._nodes.update(node, self._now_ms())

    def connection_changed(self, node_id: str, where: Where) -> bool:
        """Record where a node is connected now; return whether the node is known.

        Without a connection its tools stay listed for a grace. Sessions call this before the followers of
        connections: one of these, the presence of other relays, may know that the node is elsewhere.
        """
        node, now = self._nodes.get(node_id), self._now_ms()
        if node is not None:
            node.connection_changed(where, now, now + GRACE_MS)
            self._nodes.update(node, now)
        return node is not None

    def found(self, node_id: str, findings: Iterable[OpenFinding]) -> None:
        """Take what of ``linux.health`` a node has reported to be open, here or at another relay."""
        if (node := self._nodes.get(node_id)) is not None:
            node.findings = tuple(sorted(findings, key=severity_rank))

    def resolve(self, name: str, rights: Rights) -> Tool:
        """Return the tool called ``name``, canonical or dashed, for a caller with ``rights``.

        Raises:
            ToolError: there is none, or the caller may not call it. Another tenant's does not exist.
        """
        tool = self._tools.get(name)
        if tool is None:
            parsed = parse(name)
            if parsed is None:
                raise ToolError(Failure.NAME_UNKNOWN)
            tool = self._tools.get(parsed.canonical)
            if tool is None:
                raise self.absence(
                    parsed.node_id, rights, kind_known=self._projector.knows(parsed.kind_short)
                )
        if (error := self._tool_error(tool, rights)) is not None:
            raise error
        return tool

    def absence(self, node_id: str, rights: Rights, *, kind_known: bool = True) -> ToolError:
        """Return why a node has no tool that is meant, which it does not announce."""
        use = NodeUse(node_id, self._nodes.get(node_id), rights, None, kind_known)
        return self.usability.error("absent tool", use) or ToolError(Failure.MANIFEST_NOT_FOUND)

    def is_usable(self, tool: Tool, rights: Rights) -> bool:
        return self._tool_error(tool, rights) is None

    def _tool_error(self, tool: Tool, rights: Rights) -> ToolError | None:
        return self.usability.error(
            "tool", NodeUse(tool.node_id, self._nodes.get(tool.node_id), rights, tool)
        )

    def session_node(self, rights: Rights, node_id: str) -> NodeRecord:
        """Return a node for a session with it.

        Raises:
            ToolError: there can be none now.
        """
        node = self.reach.node(rights, node_id)
        error = self.usability.error("session", NodeUse(node_id, node, rights))
        if node is None or error is not None:
            raise error or ToolError(Failure.NODE_OFFLINE)
        return node

    def is_hidden(self, node_id: str) -> bool:
        """Return whether the operator has decided that a node is in no list."""
        return node_id in self._nodes.hidden

    def tool_of(self, canonical: str) -> Tool | None:
        """Return the tool of that canonical name, of any tenant; None if no node announces it now."""
        return self._tools.get(canonical)

    def follow(self, changed: Callable[[str], None]) -> None:
        self._nodes.follow(changed)

    def node_of(self, tenant: str, node_id: str) -> NodeRecord | None:
        return self._nodes.of_tenant(tenant).get(node_id)

    def sweep(self) -> None:
        """Drop pending manifests that have expired, delist what has ended, and compare the clocks."""
        self._pending.sweep(self._now_ms())
        self._nodes.settle(self._now_ms())
        self.clocks.compare()

    def _accept(
        self, node: NodeRecord, manifest: TrustedManifest, capabilities: Sequence[Mapping[str, Any]]
    ) -> None:
        former = node.manifest.capabilities_bytes if node.manifest is not None else None
        if former != manifest.capabilities_bytes:
            self._drop_manifest(node)
            label = self.names.label_of(node.node_id)
            node.announce(self._projector.project(node.node_id, capabilities, label))
            self._tools.update(node.tools)
            self._log.info("node announced", node_id=node.node_id, tools=len(node.tools))
        node.manifest = manifest
        self.inventory.found(node.node_id)
        node.rejected = node.leaf_dropped = False
        node.mark = manifest.mark
        self._marks.put(node.node_id, node.tenant, manifest.mark)
        self._nodes.update(node, self._now_ms())

    def _label(self, node: NodeRecord) -> None:
        node.tools = labelled(node.tools, self.names.label_of(node.node_id))
        self._tools.update(node.tools)

    def _drop_manifest(self, node: NodeRecord) -> None:
        for name in node.tools:
            del self._tools[name]
        node.withdraw()
