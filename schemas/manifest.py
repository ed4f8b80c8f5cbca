"""The signed manifest: how it is put together, signed, and its signature checked (RFC-0001 section 2).

``payload_hash`` lies inside what it hashes, so there are three forms. ``u``: the manifest with ``sig`` and
``payload_hash`` empty; ``payload_hash`` is hex BLAKE3 of JCS(u). ``s``: ``u`` with that hash; ``sig`` is
base64url Ed25519 over JCS(s). Final: ``s`` with that ``sig``; JCS(final) is what travels, and its BLAKE3 is
the ETag. Must not decide whether a manifest is trusted: that is ``trust``.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.canonical import blake3_hex, jcs
from schemas.error_roots import OperatorError
from schemas.keys import base64url, from_base64url, verifies
from schemas.payloads import Attestation, Fingerprint

MANIFEST_VERSION = "1.1.0"
MAX_MANIFEST_BYTES = 128 * 1024
MAX_TTL_MS = 86_400_000
MAX_FUTURE_MS = 5 * 60_000
"""How far ahead of the verifier's clock a manifest may be issued."""


class HardwareIdError(OperatorError):
    """This machine has no hardware id; the text states what to do."""


def fingerprint(readings: Mapping[str, str]) -> Fingerprint:
    """Return the ``hw_fingerprint`` of the hardware ids ``{source: value}`` that could be read.

    Raises:
        HardwareIdError: none could be read.
    """
    if not readings:
        raise HardwareIdError("no hardware id could be read: run `systemd-machine-id-setup`")
    return {
        "algo": "blake3-256",
        "value": blake3_hex(jcs(dict(readings))),
        "sources": sorted(readings),
    }


def sign_manifest(  # noqa: PLR0913 - the manifest has this many members
    *,
    node_id: str,
    kid: str,
    hw_fingerprint: Mapping[str, Any],
    capabilities: Sequence[Mapping[str, Any]],
    issued_at_ms: int,
    expires_at_ms: int,
    sign: Callable[[bytes], bytes],
) -> bytes:
    """Return the wire bytes of a signed manifest: JCS(final).

    ``sign`` makes the 64-byte Ed25519 signature of its argument with the leaf's key.
    """
    manifest = {
        "manifest_version": MANIFEST_VERSION,
        "node_id": node_id,
        "hw_fingerprint": dict(hw_fingerprint),
        "node_attestation": {"alg": "Ed25519", "kid": kid, "sig": "", "payload_hash": ""},
        "issued_at_ms": issued_at_ms,
        "expires_at_ms": expires_at_ms,
        "capabilities": [dict(capability) for capability in capabilities],
    }
    before, empty, after = jcs(manifest).partition(_attestation(kid, "", ""))
    payload_hash = blake3_hex(before + empty + after)
    sig = base64url(sign(before + _attestation(kid, payload_hash, "") + after))
    return before + _attestation(kid, payload_hash, sig) + after


def etag_of(wire: bytes) -> str:
    """Return the ETag of a manifest's wire bytes."""
    return blake3_hex(wire)


def signature_holds(wire: bytes, attestation: Attestation, public_key: bytes) -> bool:
    """Return whether hash and signature fit ``wire``, the canonical bytes of a schema-valid manifest.

    ``u`` and ``s`` are spliced out of ``wire``: ``sig`` is the last member of the canonical attestation and
    ``payload_hash`` the one before, and the schema keeps quotes out of every other string.
    """
    stated = _attestation(attestation["kid"], attestation["payload_hash"], attestation["sig"])
    before, found, after = wire.partition(stated)
    if not found or stated in after:
        return False
    unsigned = before + _attestation(attestation["kid"], "", "") + after
    if blake3_hex(unsigned) != attestation["payload_hash"]:
        return False
    signed = before + _attestation(attestation["kid"], attestation["payload_hash"], "") + after
    try:
        signature = from_base64url(attestation["sig"])
    except ValueError:
        return False
    return verifies(public_key, signed, signature)


def _attestation(kid: str, payload_hash: str, sig: str) -> bytes:
    return (
        f'"node_attestation":{{"alg":"Ed25519","kid":"{kid}","payload_hash":"{payload_hash}","sig":"{sig}"}}'
    ).encode("ascii")
