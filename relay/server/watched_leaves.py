"""Applies what the CA's ledger and roots say: nodes that are revoked, retired or moved, and other roots.

Must not decide who is revoked.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from structlog.typing import FilteringBoundLogger

from relay.fleet.change_notifier import ChangeNotifier
from relay.fleet.fleet import Fleet
from relay.pki.authority import CertificateAuthority
from relay.pki.records import IssuedLeaf
from relay.pki.shared_leaves import SharedLeaves
from relay.pki.shared_revocations import SharedRevocations
from relay.sessions.node_sessions import NodeSessions
from relay.watched_ledger import Record
from schemas.identity import Identity, first_certificate_in, kid_of
from schemas.session import CloseCode


class Leaves(NamedTuple):
    """What the CA has decided.

    Attributes:
        roots: those that are trusted.
        kids: of the leaves that are revoked.
        revoked_as: what is revoked, by issuer and serial number.
        moved: the leaves that gave a node another tenant, by kid.
        retired: the nodes all of whose leaves are revoked.
        enrolled_tenant: returns the tenant of any other node; None of one that is retired or has no leaf.
    """

    roots: list[str]
    kids: frozenset[str]
    revoked_as: frozenset[str]
    moved: Mapping[str, IssuedLeaf]
    retired: frozenset[str]
    enrolled_tenant: Callable[[str], str | None]


class WatchedLeaves:
    """The CA's ledger and roots as a ``relay.watched_ledger.WatchedLedger``.

    ``retire`` is called with the nodes that are retired; ``due`` after every change.
    """

    name = "leaves"
    kinds = (SharedRevocations.kind, SharedLeaves.kind)

    def __init__(  # noqa: PLR0913 - the parts that it changes
        self,
        ca: CertificateAuthority,
        *,
        fleet: Fleet,
        sessions: NodeSessions,
        notifier: ChangeNotifier,
        retire: Callable[[frozenset[str]], None],
        due: Callable[[], None],
        record: Record,
        log: FilteringBoundLogger,
    ) -> None:
        self._ca = ca
        self._fleet = fleet
        self._sessions = sessions
        self._notifier = notifier
        self._retire = retire
        self._due = due
        self._record = record
        self._log = log
        self._roots: list[str] = []
        self._kids: frozenset[str] = frozenset()
        self._revoked_as: frozenset[str] = frozenset()
        self._moved: Mapping[str, IssuedLeaf] = {}

    def stamp(self) -> object:
        """Return what differs after every entry, and when a root is made or expires."""
        return self._ca.stamp

    def read(self) -> Leaves:
        """Return what the CA has decided."""
        records = self._ca.records()
        roots, kids = self._ca.roots(), self._ca.revoked_kids()
        return Leaves(
            roots=roots,
            kids=kids,
            revoked_as=records.revoked_as(roots),
            moved=records.moved(),
            retired=records.retired(),
            enrolled_tenant=records.enrolled_tenant,
        )

    def begin(self, leaves: Leaves) -> None:
        """Apply what was decided before the relay was started."""
        self._take(leaves)
        self._retire(leaves.retired)

    def apply(self, leaves: Leaves) -> None:
        """Apply what was decided since: end what is revoked, and record it."""
        if not self._kids <= leaves.kids:
            # A ledger that has shrunk was lost or restored: what was revoked stays so until the process ends.
            missing = len(self._kids - leaves.kids)
            self._log.error("revoked certificates are missing from the ledger", count=missing)
        revoked, gone = leaves.kids - self._kids, set(self._roots) - set(leaves.roots)
        newly_moved = [leaf for kid, leaf in leaves.moved.items() if kid not in self._moved]
        barred = self._take(leaves)
        if revoked:
            self._end(lambda leaf: leaf.kid in barred or leaf.issued_as in barred, CloseCode.REVOKED)
            for kid in sorted(revoked):
                self._record("leaf_revoked", kid=kid)
        if gone:
            trusted = {kid_of(first_certificate_in(root)) for root in leaves.roots}
            self._end(lambda leaf: leaf.root_kid not in trusted, CloseCode.AUTH_FAILED)
            self._record("root_withdrawn")
        for leaf in newly_moved:
            self._record("tenant_changed", node_id=leaf.node_id, tenant=leaf.tenant, kid=leaf.kid)
        self._retire(leaves.retired)
        self._due()

    def _take(self, leaves: Leaves) -> frozenset[str]:
        """Trust by ``leaves`` from now on; return all that is barred."""
        self._roots, self._moved = leaves.roots, leaves.moved
        self._kids |= leaves.kids
        self._revoked_as |= leaves.revoked_as
        barred = self._kids | self._revoked_as
        self._fleet.absences.enrolled_tenant = leaves.enrolled_tenant
        self._fleet.change_trust(leaves.roots, barred)
        return barred

    def _end(self, is_barred: Callable[[Identity], bool], code: CloseCode) -> None:
        self._fleet.drop_leaves(is_barred)
        self._sessions.end_sessions(is_barred, code)
        self._notifier.wake()
