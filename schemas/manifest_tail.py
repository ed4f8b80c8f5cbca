"""The members of a manifest behind its capabilities, read without a JSON parser.

Most nodes of a fleet announce the same capabilities, and every heartbeat signs them again with other times.
Once the capabilities were judged, the rest is a few members of fixed form: one expression admits nothing but
their canonical form within the manifest's document. What it does not admit is left to the parser. Must not
verify.
"""

import re
from typing import NamedTuple

from schemas.credible_time import FIRST_CREDIBLE_MS
from schemas.manifest import MANIFEST_VERSION
from schemas.payloads import Attestation
from schemas.strict_json import MAX_SAFE_INTEGER

BEHIND_CAPABILITIES = b',"expires_at_ms":'
"""What follows the capabilities in a canonical form. No string contains it: a quote within one is escaped."""

_TIME = r"([1-9][0-9]{12,15})"
_SOURCE = '"(?:cpu_serial|soc_uid|machine_id|tpm_ek_pub|mac_primary)"'
_TAIL = re.compile(
    (
        rf',"expires_at_ms":{_TIME}'
        rf',"hw_fingerprint":\{{"algo":"blake3-256","sources":\[({_SOURCE}(?:,{_SOURCE})*)\],'
        r'"value":"[0-9a-f]{64}"\}'
        rf',"issued_at_ms":{_TIME}'
        rf',"manifest_version":"{re.escape(MANIFEST_VERSION)}"'
        r',"node_attestation":\{"alg":"Ed25519","kid":"([0-9a-f]{64})","payload_hash":"([0-9a-f]{64})",'
        r'"sig":"([A-Za-z0-9_-]{86})"\}'
        r',"node_id":"([0-9a-hjkmnp-tv-z]{26})"\}'
    ).encode("ascii")
)


class ManifestTail(NamedTuple):
    """What the members state."""

    node_id: str
    attestation: Attestation
    issued_at_ms: int
    expires_at_ms: int


def read_tail(tail: bytes) -> ManifestTail | None:
    """Return what ``tail``, from ``BEHIND_CAPABILITIES`` to the end, states; None if it is to be parsed."""
    found = _TAIL.fullmatch(tail)
    if found is None:
        return None
    sources = found[2].split(b",")
    times = expires_at_ms, issued_at_ms = int(found[1]), int(found[3])
    if len(set(sources)) < len(sources) or min(times) < FIRST_CREDIBLE_MS or max(times) > MAX_SAFE_INTEGER:
        return None
    kid, payload_hash, sig, node_id = (part.decode("ascii") for part in found.group(4, 5, 6, 7))
    attestation: Attestation = {"alg": "Ed25519", "kid": kid, "payload_hash": payload_hash, "sig": sig}
    return ManifestTail(node_id, attestation, issued_at_ms, expires_at_ms)
