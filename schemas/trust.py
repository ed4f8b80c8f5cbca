"""From bytes to a verdict: the one place where a manifest becomes trusted.

The same rules for both ways that a manifest comes in, the broker and the session. Pure: the caller brings
the time and what it knows, and acts on the verdict. Must not do I/O, and must not let anything that a
verdict rejected be used for more than counting.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from schemas.canonical import jcs
from schemas.errors import Failure
from schemas.identity import Identity
from schemas.kinds import MANIFEST_REF, KindRegistry
from schemas.manifest import MAX_MANIFEST_BYTES, MAX_TTL_MS, etag_of, signature_holds
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads

MAX_FUTURE_MS = 5 * 60_000


class Outcome(Enum):
    """What is to be done with a manifest."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    STALE = "stale"
    PARKED = "parked"
    REJECTED = "rejected"


class Reason(Enum):
    """Why a manifest was rejected; the value is fit for a counter's label."""

    NOT_JSON = "not_json"
    NOT_CANONICAL = "not_canonical"
    SCHEMA = "schema"
    KIND_UNSUPPORTED = "kind_unsupported"
    ID_MISMATCH = "id_mismatch"
    LIFETIME = "lifetime"
    REVOKED = "revoked"
    CERTIFICATE_EXPIRED = "certificate_expired"
    SIGNATURE = "signature"
    EXPIRED = "expired"
    FUTURE = "future"
    ROLLBACK = "rollback"
    CONFLICT = "conflict"

    @property
    def failure(self) -> Failure:
        """The row of the error table that tells the node, and those who call it."""
        match self:
            case Reason.KIND_UNSUPPORTED:
                return Failure.KIND_UNSUPPORTED
            case Reason.ID_MISMATCH | Reason.REVOKED | Reason.CERTIFICATE_EXPIRED | Reason.SIGNATURE:
                return Failure.ATTESTATION_FAILED
            case _:
                return Failure.MANIFEST_INVALID


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest manifest of a node that was ever accepted. Outlives restarts; nothing moves it back."""

    issued_at_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class Known:
    """What the caller knows of the node that a manifest claims to be from.

    Attributes:
        identities: the node's verified leaves, by kid.
        mark: the newest manifest ever accepted.
        current_etag: the ETag of the manifest that is in force now.
        session_alive: whether the node is connected, so that an older manifest is a broker's old copy.
        revoked: every revoked kid.
    """

    identities: Mapping[str, Identity]
    mark: Mark | None = None
    current_etag: str | None = None
    session_alive: bool = False
    revoked: Container[str] = frozenset()


@dataclass(frozen=True, slots=True)
class TrustedManifest:
    """A manifest that passed every rule. ``wire`` is what the node signed, byte for byte."""

    identity: Identity
    etag: str
    issued_at_ms: int
    expires_at_ms: int
    capabilities: tuple[Mapping[str, Any], ...]
    wire: bytes

    @property
    def mark(self) -> Mark:
        """The mark that accepting this manifest sets."""
        return Mark(self.issued_at_ms, self.etag)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one manifest.

    ``manifest`` is there when it was accepted, ``reason`` when it was rejected; ``kid`` when it was parked
    for a leaf that is not known yet.
    """

    outcome: Outcome
    manifest: TrustedManifest | None = None
    reason: Reason | None = None
    kid: str | None = None


class TrustRules:
    """The rules over one set of documents and kinds."""

    def __init__(self, registry: SchemaRegistry, kinds: KindRegistry) -> None:
        self._schema = registry.load(MANIFEST_REF)
        self._kinds = kinds

    def accept(self, wire: bytes, node_id: str, now_ms: int, known: Known) -> Verdict:
        """Judge ``wire``, which came on the topic or the session of ``node_id``, at ``now_ms``."""
        etag = etag_of(wire)
        if etag == known.current_etag:
            return Verdict(Outcome.UNCHANGED)
        manifest, reason = self._read(wire, node_id)
        if reason is not None:
            return _rejected(reason)
        kid = manifest["node_attestation"]["kid"]
        if kid in known.revoked:
            return _rejected(Reason.REVOKED)
        identity = known.identities.get(kid)
        if identity is None:
            return Verdict(Outcome.PARKED, kid=kid)
        reason = _attested(wire, manifest, identity, now_ms)
        if reason is not None:
            return _rejected(reason)
        trusted = TrustedManifest(
            identity=identity,
            etag=etag,
            issued_at_ms=manifest["issued_at_ms"],
            expires_at_ms=manifest["expires_at_ms"],
            capabilities=tuple(manifest["capabilities"]),
            wire=wire,
        )
        return _in_history(trusted, now_ms, known)

    def _read(self, wire: bytes, node_id: str) -> tuple[dict[str, Any], Reason | None]:
        try:
            manifest = loads(wire, max_bytes=MAX_MANIFEST_BYTES)
        except StrictJsonError:
            return {}, Reason.NOT_JSON
        # Kinds first: what the document does not admit, or this process does not know, has a code of its own.
        if self._names_unknown_kind(manifest):
            return {}, Reason.KIND_UNSUPPORTED
        if not self._schema.is_valid(manifest):
            return {}, Reason.SCHEMA
        if jcs(manifest) != wire:
            return {}, Reason.NOT_CANONICAL
        if manifest["node_id"] != node_id:
            return {}, Reason.ID_MISMATCH
        if not 0 < manifest["expires_at_ms"] - manifest["issued_at_ms"] <= MAX_TTL_MS:
            return {}, Reason.LIFETIME
        return manifest, None

    def _names_unknown_kind(self, manifest: object) -> bool:
        capabilities = manifest.get("capabilities") if isinstance(manifest, dict) else None
        if not isinstance(capabilities, list):
            return False
        kinds = [item.get("kind") for item in capabilities if isinstance(item, dict)]
        return any(isinstance(kind, str) and self._kinds.get(kind) is None for kind in kinds)


def _attested(wire: bytes, manifest: dict[str, Any], identity: Identity, now_ms: int) -> Reason | None:
    if identity.node_id != manifest["node_id"]:
        return Reason.ID_MISMATCH
    if not identity.valid_at(now_ms):
        return Reason.CERTIFICATE_EXPIRED
    if not signature_holds(wire, manifest["node_attestation"], identity.public_key):
        return Reason.SIGNATURE
    return None


def _in_history(manifest: TrustedManifest, now_ms: int, known: Known) -> Verdict:
    # The far future comes first: it must be refused before it could ever move the mark.
    if manifest.issued_at_ms > now_ms + MAX_FUTURE_MS:
        return _rejected(Reason.FUTURE)
    if known.mark is not None:
        if manifest.issued_at_ms < known.mark.issued_at_ms:
            return Verdict(Outcome.STALE) if known.session_alive else _rejected(Reason.ROLLBACK)
        if manifest.issued_at_ms == known.mark.issued_at_ms and manifest.etag != known.mark.etag:
            return _rejected(Reason.CONFLICT)
    if manifest.expires_at_ms <= now_ms:
        return _rejected(Reason.EXPIRED)
    return Verdict(Outcome.ACCEPTED, manifest=manifest)


def _rejected(reason: Reason) -> Verdict:
    return Verdict(Outcome.REJECTED, reason=reason)
