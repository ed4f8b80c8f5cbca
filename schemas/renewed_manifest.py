"""A manifest that was only signed again: the document of the one in force, with other times and signature.

Every heartbeat signs one. Since all other bytes equal those of a manifest that was judged, neither they nor
the four values need a parser, and that is most of the work of judging. Must not verify a signature.
"""

import re
from typing import NamedTuple

from schemas.manifest import FIRST_CREDIBLE_MS
from schemas.payloads import Attestation
from schemas.strict_json import MAX_SAFE_INTEGER

# The members behind the capabilities, in canonical order, with the forms that the manifest's document wants.
_TIME = rb"([1-9][0-9]{12,15})"
_REST = re.compile(
    rb',"expires_at_ms":' + _TIME + rb'(,"hw_fingerprint":\{[^{}]*\},"issued_at_ms":)' + _TIME +
    rb'(,"manifest_version":"[^"]*","node_attestation":\{"alg":"Ed25519","kid":"([0-9a-f]{64})",)'
    rb'"payload_hash":"([0-9a-f]{64})","sig":"([A-Za-z0-9_-]{86})"\}(,"node_id":"([0-9a-z]{26})"\})'
)  # fmt: skip


class RenewedManifest(NamedTuple):
    """What such a manifest states: all else is as in the one before."""

    node_id: str
    attestation: Attestation
    issued_at_ms: int
    expires_at_ms: int


def renewed_manifest(wire: bytes, former: bytes, capabilities_bytes: int) -> RenewedManifest | None:
    """Return what ``wire`` states; None if it differs from ``former`` in more than times and signature.

    ``former`` is the canonical form of a manifest that was accepted: its first ``capabilities_bytes`` bytes
    are the capabilities.
    """
    if not wire.startswith(former[:capabilities_bytes]):
        return None
    found = _REST.fullmatch(wire, capabilities_bytes)
    before = _REST.fullmatch(former, capabilities_bytes)
    if found is None or before is None or found.group(2, 4, 8) != before.group(2, 4, 8):
        return None
    expires_at_ms, issued_at_ms = int(found[1]), int(found[3])
    if (
        min(expires_at_ms, issued_at_ms) < FIRST_CREDIBLE_MS
        or max(expires_at_ms, issued_at_ms) > MAX_SAFE_INTEGER
    ):
        return None
    kid, payload_hash, sig, node_id = (part.decode("ascii") for part in found.group(5, 6, 7, 9))
    attestation: Attestation = {"alg": "Ed25519", "kid": kid, "payload_hash": payload_hash, "sig": sig}
    return RenewedManifest(node_id, attestation, issued_at_ms, expires_at_ms)
