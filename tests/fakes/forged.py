"""Agents' tokens as an attacker would have them: any header and claims, signed with any key.

Made from the bare libraries, so that nothing depends on the product's own signing. The one key that no
attacker holds is here too: only with it does a token differ from a good one in the one fact that is tried.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from nacl.signing import SigningKey

from schemas.addresses import mcp_url
from schemas.identity import san_uri
from schemas.trust import HighWaterMark, Known, ManifestReason, Outcome, TrustRules, Verdict
from tests.fakes.hub import READ_ONLY, Hub
from tests.fakes.signer import ABSENT, ECHO, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedCa, key_named

RELAY_KEY: Final = key_named("the relay's token key")
NOW_S: Final = NOW_MS // 1000

_Signs = Callable[[bytes], bytes]


def kid_of(key: SigningKey) -> str:
    """Return the ``kid`` under which a relay would know ``key``."""
    return sha256(bytes(key.verify_key)).hexdigest()


def agent_claims(hub: Hub, **claims: object) -> dict[str, Any]:
    """Return the claims of a good token with ``claims`` in place of its own."""
    good = {
        "iss": hub.public_url,
        "aud": mcp_url(hub.public_url),
        "sub": "agent-1",
        "tenant": TENANT,
        "scope": READ_ONLY,
        "iat": NOW_S,
        "exp": NOW_S + 3600,
        "jti": "jti-1",
        "token_class": "agent_runtime",
    }
    return {name: value for name, value in {**good, **claims}.items() if value is not ABSENT}


def jws(header: Mapping[str, Any], claims: Mapping[str, Any], sign: _Signs) -> str:
    """Return a compact JWS with just this header."""
    signing_input = f"{_segment(json.dumps(header).encode())}.{_segment(json.dumps(claims).encode())}"
    return f"{signing_input}.{_segment(sign(signing_input.encode()))}"


def agent_token(
    hub: Hub, *, header: Mapping[str, Any] | None = None, key: SigningKey = RELAY_KEY, **claims: object
) -> str:
    """Return a token signed with ``key``, with members of its header and claims overridden."""
    whole = {"alg": "EdDSA", "kid": kid_of(RELAY_KEY), "typ": "JWT", **(header or {})}
    whole = {name: value for name, value in whole.items() if value is not ABSENT}
    return jws(whole, agent_claims(hub, **claims), lambda data: key.sign(data).signature)


def _segment(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


# --- Leaves that an authority signed, or seems to have signed, although they are not as they ought to be.


_SERIAL = 99


def san(node_id: str = NODE_ID) -> x509.GeneralName:
    """Return the one name that a leaf of ``node_id`` has."""
    return x509.UniformResourceIdentifier(san_uri(TENANT, node_id))


def invalid_leaf(  # noqa: PLR0913 - each is one fact to get wrong
    ca: SimulatedCa,
    *,
    common_names: Sequence[str] = (NODE_ID,),
    names: Sequence[x509.GeneralName] = (san(),),
    is_ca: bool | None = False,
    public_key: bytes | EllipticCurvePublicKey | None = None,
    issuer: str | None = None,
    signer: SigningKey | None = None,
    more: Sequence[x509.ExtensionType] = (),
) -> str:
    """Return the leaf of ``NODE_ID`` in PEM with anything overridden, signed by ``ca`` or ``signer``."""
    key = public_key or bytes(key_named(f"node {NODE_ID}").verify_key)
    start = datetime.fromtimestamp(NOW_MS / 1000, UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name_of(*common_names))
        .issuer_name(name_of(issuer or ca.name))
        .public_key(Ed25519PublicKey.from_public_bytes(key) if isinstance(key, bytes) else key)
        .serial_number(_SERIAL)
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=1))
    )
    if is_ca is not None:
        builder = builder.add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    for extension in more:
        builder = builder.add_extension(extension, critical=False)
    private = Ed25519PrivateKey.from_private_bytes(bytes(signer or ca.key))
    return builder.sign(private, None).public_bytes(Encoding.PEM).decode("ascii")


def name_of(*common_names: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name) for name in common_names])


# --- A node's manifests, what is known of the node, and parts of verdicts on them.


CA = SimulatedCa()
NODE = CA.issue()
OTHER = CA.issue(OTHER_NODE_ID)
FIVE_MINUTES_MS = 300_000
KNOWN = Known(identities={NODE.kid: NODE.identity()})


def rejected(reason: ManifestReason, mark: HighWaterMark | None = None) -> Verdict:
    return Verdict(Outcome.REJECTED, reason=reason, mark=mark)


def marked(issued_at_ms: int, etag: str = "00" * 32, *, session_alive: bool = False) -> Known:
    return replace(KNOWN, mark=HighWaterMark(issued_at_ms, etag), session_alive=session_alive)


def in_force(rules: TrustRules) -> Known:
    """Return what is known once ``WIRE`` was accepted."""
    manifest = rules.accept(WIRE, NODE_ID, NOW_MS, KNOWN).manifest
    assert manifest is not None
    return replace(KNOWN, mark=manifest.mark, current_etag=manifest.etag)


def echo(**changes: object) -> dict[str, Any]:
    return {**ECHO, **changes}


def constrained(**constraints: object) -> dict[str, Any]:
    return echo(constraints={"rate_limit_rps": 10, **constraints})


def echoes(count: int) -> list[dict[str, Any]]:
    return [echo(cap_id=f"echo{number}") for number in range(count)]


WIRE = NODE.manifest()
