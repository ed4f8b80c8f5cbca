"""Which leaf certificates are trusted: by root, by revocation, and by node id.

Verifying certificates is much of what an inventory costs, so what was verified before the last restart is
kept. Time and what is known of a node come in as arguments. Must not keep records of nodes, nor write.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from relay.fleet.node_record import NodeRecord
from relay.fleet.replay_marks import KeptLeaf
from schemas.certificates import (
    IdentityError,
    IdentityReason,
    RelayCertificate,
    verify_leaf,
    verify_relay,
)
from schemas.identity import (
    CertificateFormatError,
    Identity,
    certificates_in,
    first_certificate_in,
    is_for_key,
    kid_of,
    san_uri,
    serial_of,
    to_pem,
    validity_of,
)
from schemas.projection import is_node_id
from schemas.trust import TrustRules

_KEY_BYTES = 32


class KeptLeaves:
    """The leaves that a former process verified; ``keep`` is called with what is kept of each new one.

    They count only for the very bytes whose thumbprint they are kept by, and are compared with those bytes;
    the root must be trusted and valid now, and the caller checks revocations as ever. In any doubt the leaf
    is verified.
    """

    def __init__(
        self, leaves: Iterable[KeptLeaf] = (), keep: Callable[[KeptLeaf], None] = lambda _: None
    ) -> None:
        self._leaves = {leaf.kid: leaf for leaf in leaves}
        self._keep = keep

    def recall(self, pem: str, roots: Sequence[str], now_ms: int) -> Identity | None:
        """Return the identity of the first certificate in ``pem``, or None if it is to be verified.

        Once for each: the caller has it then.
        """
        try:
            der = first_certificate_in(pem)
        except CertificateFormatError:
            return None
        kept = self._leaves.pop(kid_of(der), None)
        if kept is None or not _is_sound(kept, der, now_ms):
            return None
        root = root_validities(tuple(roots)).get(kept.root_kid)
        if root is None or not root[0] <= now_ms < root[1]:
            return None
        facts = kept._replace(root_kid=sys.intern(kept.root_kid))._asdict()
        return Identity(**facts, pem=to_pem([der]), serial=serial_of(der))

    def verified(self, leaf: Identity) -> None:
        self._keep(KeptLeaf.of(leaf))


@lru_cache(maxsize=8)
def root_validities(roots: tuple[str, ...]) -> Mapping[str, tuple[int, int]]:
    """Return when each root begins and ends, by its thumbprint. One that cannot be read is left out."""
    found = {}
    for der in (der for pem in roots for der in certificates_in(pem)):
        try:
            found[kid_of(der)] = validity_of(der)
        except CertificateFormatError:
            continue
    return found


def _is_sound(kept: KeptLeaf, der: bytes, now_ms: int) -> bool:
    """Return whether the facts that are kept are those of the certificate ``der``, which is valid now."""
    try:
        validity = validity_of(der)
    except CertificateFormatError:
        return False
    return (
        # In full: a part of either would be found too.
        is_node_id(kept.node_id)
        and len(kept.public_key) == _KEY_BYTES
        and validity == (kept.not_before_ms, kept.not_after_ms)
        and kept.not_before_ms <= now_ms < kept.not_after_ms
        and is_for_key(der, kept.public_key)
        and san_uri(kept.tenant, kept.node_id).encode("ascii", "replace") in der
    )


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

    def root_kids(self) -> Sequence[str]:
        return [*root_validities(tuple(self.roots))]

    def is_root(self, der: bytes) -> bool:
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

    def relay(self, der: bytes, now_ms: int, *, may_have_ended: bool = False) -> RelayCertificate:
        """Return what the certificate of a relay says, DER, that is accepted now.

        Raises:
            IdentityError: it is not.
        """
        certificate = verify_relay(der, self.roots, now_ms)
        if not may_have_ended and not certificate.valid_at(now_ms):
            raise IdentityError(IdentityReason.VALIDITY)
        if not self.accepts(certificate):
            raise IdentityError(IdentityReason.REVOKED)
        return certificate

    def accepts(self, certificate: RelayCertificate) -> bool:
        """Return whether the certificate of a relay is not revoked, and its root is trusted."""
        return (
            certificate.kid not in self.revoked
            and certificate.issued_as not in self.revoked
            and certificate.root_kid in self.root_kids()
        )


def _known_leaf(node: NodeRecord, pem: str) -> Identity | None:
    try:
        return node.identities.get(kid_of(first_certificate_in(pem)))
    except CertificateFormatError:
        return None
