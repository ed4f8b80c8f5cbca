"""From bytes to a verdict: the one place where a manifest becomes trusted.

The same rules for both ways that a manifest comes in, the broker and the session. Pure: the caller passes
the time and what it knows, and acts on the verdict. Must not do I/O, and must not let anything that a
verdict rejected be used for more than counting.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from schemas.canonical import is_canonical
from schemas.errors import Failure
from schemas.identity import Identity
from schemas.kinds import MANIFEST_REF, KindRegistry
from schemas.manifest import MAX_FUTURE_MS, MAX_MANIFEST_BYTES, MAX_TTL_MS, etag_of, signature_holds
from schemas.payloads import Capability, Manifest
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads


class Outcome(StrEnum):
    """What is to be done with a manifest."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    STALE = "stale"
    PENDING = "parked"  # the label of a metric that operators query: the value stays
    REJECTED = "rejected"


class Reason(StrEnum):
    """Why a manifest was rejected; the value is fit for a counter's label."""

    NOT_JSON = "not_json"
    NOT_CANONICAL = "not_canonical"
    SCHEMA = "schema"
    KIND_UNSUPPORTED = "kind_unsupported"
    CAPABILITY_TWICE = "capability_twice"
    SCHEMA_REF = "schema_ref"
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
        """The row of the error table for the node, and for calls to it."""
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
    wire: bytes

    @property
    def good_until_ms(self) -> int:
        """When it ends: by itself, or with the leaf that signed it."""
        return min(self.expires_at_ms, self.identity.not_after_ms)

    @property
    def capabilities_bytes(self) -> bytes:
        """The capabilities as they are in ``wire``: the first member of the canonical form."""
        return self.wire.partition(b',"expires_at_ms":')[0]

    @property
    def mark(self) -> Mark:
        """The mark that accepting this manifest sets."""
        return Mark(self.issued_at_ms, self.etag)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one manifest.

    Attributes:
        manifest: what was accepted, if it was.
        capabilities: those of ``manifest``. Not to be kept: of thousands of nodes, the bytes are kept alone.
        reason: why it was rejected, if it was.
        kid: the leaf that is not known yet, if the manifest is pending until it is.
        mark: what was known before: the next manifest must be newer.
    """

    outcome: Outcome
    manifest: TrustedManifest | None = None
    capabilities: Sequence[Capability] = ()
    reason: Reason | None = None
    kid: str | None = None
    mark: Mark | None = None


class _RejectionError(Exception):
    """A rule is broken; ends the judging."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason


class TrustRules:
    """The rules over one set of documents and kinds."""

    def __init__(self, registry: SchemaRegistry, kinds: KindRegistry) -> None:
        self._schema = registry.load(MANIFEST_REF)
        self._kinds = kinds

    def accept(
        self,
        wire: bytes,
        node_id: str,
        now_ms: int,
        known: Known,
        parsed: Mapping[str, Any] | None = None,
    ) -> Verdict:
        """Judge ``wire``, which came on the topic or the session of ``node_id``, at ``now_ms``.

        ``parsed`` is what ``strict_json`` made of ``wire`` as part of a frame. That it belongs to ``wire`` is
        checked, not believed: ``wire`` must be its canonical form.
        """
        etag = etag_of(wire)
        if etag == known.current_etag:
            return Verdict(Outcome.UNCHANGED, mark=known.mark)
        try:
            return self._judge(wire, etag, node_id, now_ms, known, parsed)
        except _RejectionError as rejection:
            return Verdict(Outcome.REJECTED, reason=rejection.reason, mark=known.mark)

    def _judge(  # noqa: PLR0913, PLR0917 - as above
        self,
        wire: bytes,
        etag: str,
        node_id: str,
        now_ms: int,
        known: Known,
        parsed: Mapping[str, Any] | None,
    ) -> Verdict:
        manifest = self._read(wire, parsed)
        if manifest["node_id"] != node_id:
            raise _RejectionError(Reason.ID_MISMATCH)
        kid = manifest["node_attestation"]["kid"]
        if kid in known.revoked:
            raise _RejectionError(Reason.REVOKED)
        identity = known.identities.get(kid)
        if identity is None:
            return Verdict(Outcome.PENDING, kid=kid, mark=known.mark)
        _check_attested(wire, manifest, identity, now_ms)
        trusted = TrustedManifest(
            identity=identity,
            etag=etag,
            issued_at_ms=manifest["issued_at_ms"],
            expires_at_ms=manifest["expires_at_ms"],
            wire=wire,
        )
        if _is_stale(trusted, now_ms, known):
            return Verdict(Outcome.STALE, mark=known.mark)
        capabilities = manifest["capabilities"]
        return Verdict(Outcome.ACCEPTED, manifest=trusted, capabilities=capabilities, mark=known.mark)

    def _read(self, wire: bytes, parsed: Mapping[str, Any] | None) -> Manifest:
        """Return the manifest that ``wire`` is the canonical form of, if it is one by itself."""
        manifest: Any = _parsed(wire) if parsed is None or len(wire) > MAX_MANIFEST_BYTES else parsed
        # Kinds first: one that the document does not admit, or this process not know, has a code of its own.
        if self._names_unknown_kind(manifest):
            raise _RejectionError(Reason.KIND_UNSUPPORTED)
        if not self._schema.is_valid(manifest):
            raise _RejectionError(Reason.SCHEMA)
        if not is_canonical(wire, manifest):
            raise _RejectionError(Reason.NOT_CANONICAL)
        read: Manifest = manifest
        if not 0 < read["expires_at_ms"] - read["issued_at_ms"] <= MAX_TTL_MS:
            raise _RejectionError(Reason.LIFETIME)
        self._check_capabilities(read["capabilities"])
        return read

    def _names_unknown_kind(self, manifest: object) -> bool:
        capabilities = manifest.get("capabilities") if isinstance(manifest, dict) else None
        if not isinstance(capabilities, list):
            return False
        kinds = [item.get("kind") for item in capabilities if isinstance(item, dict)]
        return any(isinstance(kind, str) and self._kinds.get(kind) is None for kind in kinds)

    def _check_capabilities(self, capabilities: Sequence[Capability]) -> None:
        """Check what the document cannot express: ids are unique, and each cites the schema of its kind."""
        if len({capability["cap_id"] for capability in capabilities}) != len(capabilities):
            raise _RejectionError(Reason.CAPABILITY_TWICE)
        for capability in capabilities:
            kind = self._kinds.get(capability["kind"])
            if kind is None or capability["schema_ref"] != kind.schema_ref:
                raise _RejectionError(Reason.SCHEMA_REF)


def _parsed(wire: bytes) -> Any:
    try:
        return loads(wire, max_bytes=MAX_MANIFEST_BYTES)
    except StrictJsonError:
        raise _RejectionError(Reason.NOT_JSON) from None


def _check_attested(wire: bytes, manifest: Manifest, identity: Identity, now_ms: int) -> None:
    if identity.node_id != manifest["node_id"]:
        raise _RejectionError(Reason.ID_MISMATCH)
    if not identity.valid_at(now_ms):
        raise _RejectionError(Reason.CERTIFICATE_EXPIRED)
    if not signature_holds(wire, manifest["node_attestation"], identity.public_key):
        raise _RejectionError(Reason.SIGNATURE)


def _is_stale(manifest: TrustedManifest, now_ms: int, known: Known) -> bool:
    """Return whether ``manifest`` is only a broker's old copy; any other fault of its times rejects it."""
    # The far future comes first: it must be refused before it could ever move the mark.
    if manifest.issued_at_ms > now_ms + MAX_FUTURE_MS:
        raise _RejectionError(Reason.FUTURE)
    if known.mark is not None:
        if manifest.issued_at_ms < known.mark.issued_at_ms:
            if known.session_alive:
                return True
            raise _RejectionError(Reason.ROLLBACK)
        if manifest.issued_at_ms == known.mark.issued_at_ms and manifest.etag != known.mark.etag:
            raise _RejectionError(Reason.CONFLICT)
    if manifest.expires_at_ms <= now_ms:
        raise _RejectionError(Reason.EXPIRED)
    return False
