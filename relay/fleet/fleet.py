"""Who is there, and what they offer: the relay's view of the nodes.

Bytes from the broker and from sessions come in here and nothing is kept of them that the trust rules did
not let through. Must not do I/O: marks go to a store that writes them when it can.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from structlog.typing import FilteringBoundLogger

from relay.audit.refusal_counts import RefusalCounter, RefusalEvent
from relay.auth.permissions import Rights
from relay.fleet.missing_manifests import MissingManifests
from relay.fleet.node_record import NodeRecord
from relay.fleet.pending_manifests import PendingManifests
from relay.fleet.replay_marks import MarkStore
from relay.fleet.tools import Projector, Tool
from relay.observability.metrics import Metrics
from schemas.certificates import IdentityError, verify_leaf
from schemas.errors import Failure, ToolError
from schemas.identity import Identity, certificates_in, kid_of, to_pem
from schemas.projection import ToolName, parse
from schemas.trust import Known, Mark, Outcome, TrustedManifest, TrustRules, Verdict

GRACE_MS = 30_000
"""How long tools stay listed after a drop, and from the relay's own start: nodes need a moment to return."""
_MAX_IDENTITIES = 2


@dataclass(frozen=True, slots=True)
class Trust:
    """What the fleet believes by."""

    rules: TrustRules
    roots: Sequence[str]
    revoked: frozenset[str]


class Fleet:
    """Every node that the relay has heard of from a trusted leaf."""

    def __init__(  # noqa: PLR0913 - what comes in from outside
        self,
        *,
        trust: Trust,
        projector: Projector,
        marks: MarkStore,
        metrics: Metrics,
        refusals: RefusalCounter,
        now_ms: Callable[[], int],
        log: FilteringBoundLogger,
    ) -> None:
        self._trust = trust
        self._projector = projector
        self._marks = marks
        self._metrics = metrics
        self._refusals = refusals
        self._now_ms = now_ms
        self._log = log
        self._grace_of_start_ms = now_ms() + GRACE_MS
        self._nodes = {node_id: self._node(node_id, tenant, mark) for node_id, tenant, mark in marks.load()}
        self._parked = PendingManifests(
            lambda node_id: self._refusals.count(RefusalEvent.MANIFEST_REFUSED, node_id, "unvouched")
        )
        self._missing = MissingManifests(log)
        self._tools: dict[str, Tool] = {}

    def knows(self, node_id: str) -> bool:
        """Tell whether a trusted leaf of ``node_id`` was ever seen."""
        return node_id in self._nodes

    def identify(self, node_id: str, pem: str) -> Identity:
        """Return the identity of ``node_id`` that ``pem`` proves, and keep it.

        Raises:
            IdentityError: it proves nothing, or another node; nothing is displaced.
        """
        now = self._now_ms()
        known = self._known_leaf(node_id, pem)
        if known is not None and known.valid_at(now):
            return known  # thousands that reconnect show what was verified before
        identity = verify_leaf(pem, self._trust.roots, now)
        if identity.node_id != node_id:
            raise IdentityError("id_mismatch")
        if identity.kid in self._trust.revoked:
            raise IdentityError("revoked")
        self._keep(identity)
        return identity

    def _node(self, node_id: str, tenant: str, mark: Mark | None = None) -> NodeRecord:
        return NodeRecord(node_id, tenant, mark=mark, listed_until_ms=self._grace_of_start_ms)

    def _known_leaf(self, node_id: str, pem: str) -> Identity | None:
        node = self._nodes.get(node_id)
        if node is None:
            return None
        try:
            return node.identities.get(kid_of(certificates_in(pem)[0]))
        except (ValueError, IndexError):
            return None

    def _keep(self, identity: Identity) -> None:
        node_id = identity.node_id
        node = self._nodes.setdefault(node_id, self._node(node_id, identity.tenant))
        node.identities[identity.kid] = identity
        if len(node.identities) > _MAX_IDENTITIES:
            # At renewal there are two; an old leaf that somebody retains again must not push out a newer.
            del node.identities[min(node.identities.values(), key=_age).kid]
        # Leaves are public: the newest says whose the node is, not the one that came last.
        node.tenant = max(node.identities.values(), key=_age).tenant

    def offer_identity(self, node_id: str, pem: str) -> None:
        """Take in what came on a node's identity topic, and look again at what waited for it.

        At renewal there are two leaves, the new one first; what follows them is the chain.
        """
        try:
            self.identify(node_id, pem)
            if second := certificates_in(pem)[1:2]:
                with suppress(IdentityError):  # it is the issuer's
                    self.identify(node_id, to_pem(second))
        except IdentityError as error:
            self._metrics.identities.labels(error.reason).inc()
            if self._refusals.count(RefusalEvent.IDENTITY_REFUSED, node_id, error.reason):
                self._log.warning("identity not accepted", node_id=node_id, reason=error.reason)
            return
        self._metrics.identities.labels("accepted").inc()
        parked = self._parked.take(node_id, self._now_ms())
        if parked is not None:
            self.offer_manifest(node_id, parked, "broker")

    def offer_manifest(self, node_id: str, wire: bytes, way: str) -> Verdict:
        """Judge a manifest that came by ``way`` (``broker`` or ``session``) and act on the verdict."""
        now = self._now_ms()
        node = self._nodes.get(node_id)
        verdict = self._trust.rules.accept(wire, node_id, now, self._known(node))
        reason = verdict.reason.value if verdict.reason else ""
        self._metrics.manifests.labels(verdict.outcome.value, reason, way).inc()
        if verdict.outcome is Outcome.PARKED:
            if not self._parked.put(node_id, wire, now):
                self._metrics.messages_dropped.labels("too_much_parked").inc()
        elif verdict.outcome is Outcome.REJECTED:
            if self._refusals.count(RefusalEvent.MANIFEST_REFUSED, node_id, reason):
                self._log.warning("manifest rejected", node_id=node_id, reason=reason, way=way)
            if node is not None:
                node.rejected = True
        elif verdict.manifest is not None and node is not None:
            self._accept(node, verdict.manifest)
        return verdict

    def signer_of(self, node_id: str) -> Identity | None:
        """Return the leaf that signed the manifest of ``node_id`` that is in force."""
        manifest = self._nodes[node_id].manifest
        return manifest.identity if manifest is not None else None

    def believe(self, roots: Sequence[str], revoked: frozenset[str]) -> None:
        """Go by these roots and revocations from now on; what they do not bear out is to be ``bar``-red."""
        self._trust = Trust(self._trust.rules, roots, revoked)

    def bar(self, is_barred: Callable[[Identity], bool]) -> None:
        """Forget every leaf that is not believed any more, and what it signed."""
        for node in self._nodes.values():
            node.identities = {kid: leaf for kid, leaf in node.identities.items() if not is_barred(leaf)}
            if node.manifest is not None and is_barred(node.manifest.identity):
                self._drop_manifest(node)
                node.barred = True

    def tombstone(self, node_id: str) -> None:
        """Take the hint of an empty retained announce: nobody signed it, so a connected node stays."""
        node = self._nodes.get(node_id)
        if node is not None and not node.connected:
            self._drop_manifest(node)

    def heartbeat(self, node_id: str, etag: str) -> None:
        """Note a heartbeat: it informs, and moves nothing."""
        node = self._nodes.get(node_id)
        current = node.manifest.etag if node is not None and node.manifest is not None else None
        self._metrics.heartbeats.labels("fits" if current == etag else "unknown_manifest").inc()
        # A rejected manifest is there, and its reason in the log.
        if current is None and not (node is not None and node.rejected):
            self._missing.missed(node_id, self._now_ms())

    def set_connected(self, node_id: str, *, connected: bool) -> None:
        """Note that the node's session began or ended; its tools stay listed for a grace."""
        node = self._nodes[node_id]
        node.connected = connected
        node.listed_until_ms = self._now_ms() + GRACE_MS

    def resolve(self, name: str, rights: Rights) -> Tool:
        """Return the tool that ``name``, canonical or dashed, is for a caller with ``rights``.

        Raises:
            ToolError: there is none, or it is not for them. Another tenant's node is refused exactly as one
                that exists nowhere.
        """
        tool = self._tools.get(name)
        if tool is None:
            parsed = parse(name)
            if parsed is None:
                raise ToolError(Failure.NAME_UNKNOWN)
            tool = self._tools.get(parsed.canonical)
            if tool is None:
                raise self._absent(parsed, rights.tenant)
        node = self._nodes[tool.node_id]
        if not rights.allow(node.tenant, tool.safety_class):
            raise ToolError(Failure.SAFETY_DENIED)
        if node.manifest is None or node.manifest.good_until_ms <= self._now_ms():
            raise ToolError(Failure.MANIFEST_INVALID)
        return tool

    def announced(self, canonical: str) -> Tool | None:
        """Return the tool of that canonical name, whoever may call it; None if no node announces it now."""
        return self._tools.get(canonical)

    def listed(self, rights: Rights) -> list[Tool]:
        """Return the tools that a caller with ``rights`` sees, in the order of their places."""
        now = self._now_ms()
        tools = [
            tool
            for node in self._nodes.values()
            if node.tenant == rights.tenant and node.is_listed(now)
            for tool in node.tools.values()
            if rights.allow(node.tenant, tool.safety_class)
        ]
        return sorted(tools, key=lambda tool: tool.place)

    def nodes_of(self, tenant: str) -> list[NodeRecord]:
        """Return the nodes of ``tenant``, by id."""
        nodes = [node for node in self._nodes.values() if node.tenant == tenant]
        return sorted(nodes, key=lambda node: node.node_id)

    def sweep(self) -> None:
        """Forget what has waited too long."""
        self._parked.sweep(self._now_ms())

    def _known(self, node: NodeRecord | None) -> Known:
        if node is None:
            return Known({}, revoked=self._trust.revoked)
        return Known(
            identities=node.identities,
            mark=node.mark,
            current_etag=node.manifest.etag if node.manifest else None,
            session_alive=node.connected,
            revoked=self._trust.revoked,
        )

    def _accept(self, node: NodeRecord, manifest: TrustedManifest) -> None:
        changed = node.manifest is None or node.manifest.capabilities_bytes != manifest.capabilities_bytes
        if changed:
            self._drop_manifest(node)
            node.tools = self._projector.project(manifest)
            self._tools.update(node.tools)
            self._log.info("node announced", node_id=node.node_id, tools=len(node.tools))
        node.manifest = manifest
        self._missing.found(node.node_id)
        node.rejected = node.barred = False
        node.mark = manifest.mark
        self._marks.put(node.node_id, node.tenant, manifest.mark)

    def _drop_manifest(self, node: NodeRecord) -> None:
        for name in node.tools:
            self._tools.pop(name, None)
        node.tools = {}
        node.manifest = None

    def _absent(self, name: ToolName, tenant: str) -> ToolError:
        node = self._nodes.get(name.node_id)
        if node is None or node.tenant != tenant:
            return ToolError(Failure.SAFETY_DENIED)
        if node.barred:
            return ToolError(Failure.ATTESTATION_FAILED)
        if node.manifest is None:
            return ToolError(Failure.MANIFEST_INVALID if node.rejected else Failure.MANIFEST_NOT_FOUND)
        known_kind = self._projector.knows(name.kind_short)
        return ToolError(Failure.NAME_UNKNOWN if known_kind else Failure.KIND_UNSUPPORTED)


def _age(identity: Identity) -> int:
    return identity.not_before_ms
