"""Which leaf certificates are trusted: by root, by revocation, and by node id.

Time and what is known of a node come in as arguments. Must not keep records of nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from relay.fleet.kept_leaves import KeptLeaves, root_validities
from relay.fleet.node_record import NodeRecord
from schemas.certificates import IdentityError, IdentityReason, verify_leaf
from schemas.identity import CertificateFormatError, Identity, first_certificate_in, kid_of
from schemas.trust import TrustRules


@dataclass(frozen=True, slots=True)
class FleetTrust:
    """What the fleet trusts: manifests by ``rules``, leaves by ``roots`` unless they are ``revoked``.

    ``revoked`` has kids, and issuers with serial numbers. ``kept`` are the leaves that were verified before a
    restart.
    """

    rules: TrustRules
    roots: Sequence[str]
    revoked: frozenset[str]
    kept: KeptLeaves = field(default_factory=KeptLeaves)

    def changed(self, roots: Sequence[str], revoked: frozenset[str]) -> "FleetTrust":
        """Return the trust by other roots and revocations."""
        return FleetTrust(self.rules, roots, revoked, self.kept)

    def root_kids(self) -> Sequence[str]:
        """Return the kids of the roots, in their order."""
        return [*root_validities(tuple(self.roots))]

    def is_root(self, der: bytes) -> bool:
        """Return whether the certificate ``der`` is one of the roots."""
        return kid_of(der) in self.root_kids()

    def identify(self, node_id: str, pem: str, known: NodeRecord | None, now_ms: int) -> Identity:
        """Return the identity of ``node_id`` that ``pem`` proves; ``known`` is the node's record.

        Raises:
            IdentityError: it proves nothing, or another node.
        """
        found = _known_leaf(known, pem) if known is not None else None
        if found is not None and found.valid_at(now_ms):
            return found  # thousands of nodes that reconnect present a leaf that was verified before
        recalled = self.kept.recall(pem, self.roots, now_ms)
        identity = recalled or verify_leaf(pem, self.roots, now_ms)
        if identity.node_id != node_id:
            raise IdentityError(IdentityReason.ID_MISMATCH)
        # By issuer and serial number too: a leaf that is encoded otherwise has another kid.
        if identity.kid in self.revoked or identity.issued_as in self.revoked:
            raise IdentityError(IdentityReason.REVOKED)
        if recalled is None:
            self.kept.verified(identity)
        return identity


def _known_leaf(node: NodeRecord, pem: str) -> Identity | None:
    try:
        return node.identities.get(kid_of(first_certificate_in(pem)))
    except CertificateFormatError:
        return None
