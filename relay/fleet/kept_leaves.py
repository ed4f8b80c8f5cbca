"""Leaves that were verified before the relay's last restart: the same bytes need not be verified again.

Verifying certificates is much of what an inventory costs. What is kept of one is that its chain was verified,
to which root, by which version of the rules, and its facts. They count only for the very bytes whose
thumbprint they are kept by, and are compared with those bytes; the root must be trusted and valid now, and
the caller checks revocations as ever. In any doubt the leaf is verified. Must not verify or write by itself.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

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

_KEY_BYTES = 32


class KeptLeaf(NamedTuple):
    """What is kept of a leaf, as ``Identity`` has it."""

    kid: str
    node_id: str
    tenant: str
    public_key: bytes
    not_before_ms: int
    not_after_ms: int
    root_kid: str

    @classmethod
    def of(cls, leaf: Identity) -> "KeptLeaf":
        """Return what is kept of ``leaf``."""
        return cls(
            leaf.kid,
            leaf.node_id,
            leaf.tenant,
            leaf.public_key,
            leaf.not_before_ms,
            leaf.not_after_ms,
            leaf.root_kid,
        )


class KeptLeaves:
    """The leaves that a former process verified; ``keep`` is called with what is kept of each new one."""

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
        return Identity(
            node_id=kept.node_id,
            tenant=kept.tenant,
            kid=kept.kid,
            public_key=kept.public_key,
            not_before_ms=kept.not_before_ms,
            not_after_ms=kept.not_after_ms,
            pem=to_pem([der]),
            root_kid=sys.intern(kept.root_kid),
            serial=serial_of(der),
        )

    def verified(self, leaf: Identity) -> None:
        """Keep ``leaf``, which was verified now."""
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
