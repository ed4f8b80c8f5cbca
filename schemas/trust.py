"""From bytes to a verdict: the one place where a manifest becomes trusted.

The same rules for both ways that a manifest comes in, the broker and the session. Pure: the caller passes
the time and what it knows, and acts on the verdict.

Most nodes of a fleet announce the same capabilities, and every heartbeat signs them again with other times.
Once the capabilities were judged, the rest is read by one expression without a JSON parser; what that does
not admit is left to the parser. Must not do I/O, and must not let anything that a verdict rejected be used
for more than counting.
"""

import re
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from schemas.canonical import is_canonical
from schemas.errors import Failure
from schemas.identity import Identity
from schemas.kinds import MANIFEST_REF, KindRegistry
from schemas.manifest import (
    MANIFEST_VERSION,
    MAX_FUTURE_MS,
    MAX_MANIFEST_BYTES,
    MAX_TTL_MS,
    etag_of,
    signature_holds,
)
from schemas.payloads import Attestation, Capability, Manifest
from schemas.registry import SchemaRegistry
from schemas.strict_json import StrictJsonError, loads
from schemas.times import is_credible


class Outcome(StrEnum):
    """What is to be done with a manifest."""

    ACCEPTED = "accepted"
    UNCHANGED = "unchanged"
    STALE = "stale"
    PENDING = "parked"  # the label of a metric that operators query: the value stays
    REJECTED = "rejected"


class ManifestReason(StrEnum):
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
        match self:
            case ManifestReason.KIND_UNSUPPORTED:
                return Failure.KIND_UNSUPPORTED
            case (
                ManifestReason.ID_MISMATCH
                | ManifestReason.REVOKED
                | ManifestReason.CERTIFICATE_EXPIRED
                | ManifestReason.SIGNATURE
            ):
                return Failure.ATTESTATION_FAILED
            case _:
                return Failure.MANIFEST_INVALID


@dataclass(frozen=True, slots=True)
class HighWaterMark:
    """The newest manifest of a node that was ever accepted. Outlives restarts.

    One that a clock which was ahead has set moves back, to what the node itself sends by its session.
    """

    issued_at_ms: int
    etag: str


@dataclass(frozen=True, slots=True)
class TrustedManifest:
    """A manifest that passed every rule.

    Attributes:
        capabilities_bytes: the capabilities as they were signed, the first member of the canonical form. Most
            nodes of a fleet have the same, and share one copy.
        rest: the other members.
    """

    identity: Identity
    etag: str
    issued_at_ms: int
    expires_at_ms: int
    capabilities_bytes: bytes
    rest: bytes

    @property
    def wire(self) -> bytes:
        """What the node signed, byte for byte."""
        return self.capabilities_bytes + self.rest

    @property
    def good_until_ms(self) -> int:
        """When it ends: by itself, or with the leaf that signed it."""
        return min(self.expires_at_ms, self.identity.not_after_ms)

    @property
    def mark(self) -> HighWaterMark:
        return HighWaterMark(self.issued_at_ms, self.etag)


@dataclass(frozen=True, slots=True)
class Known:
    """What the caller knows of the node that a manifest claims to be from.

    Attributes:
        identities: the node's verified leaves, by kid.
        mark: the newest manifest ever accepted.
        current_etag: the ETag of the manifest that is in force now.
        session_alive: whether the node is connected, so that an older manifest is a broker's old copy.
        is_live: whether this manifest comes by that session, and so is no replay.
        revoked: every revoked kid.
    """

    identities: Mapping[str, Identity]
    mark: HighWaterMark | None = None
    current_etag: str | None = None
    session_alive: bool = False
    is_live: bool = False
    revoked: Container[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one manifest.

    Attributes:
        manifest: what was accepted, if it was.
        capabilities: those of ``manifest``. Not to be kept: of thousands of nodes, the bytes are kept alone.
        reason: why it was rejected, if it was.
        kid: the leaf that is not known yet, if the manifest is pending until it is.
        mark: what was known before, as far as it counts: the next manifest must be newer.
    """

    outcome: Outcome
    manifest: TrustedManifest | None = None
    capabilities: Sequence[Capability] = ()
    reason: ManifestReason | None = None
    kid: str | None = None
    mark: HighWaterMark | None = None


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
    if len(set(sources)) < len(sources) or not all(map(is_credible, times)):
        return None
    kid, payload_hash, sig, node_id = (part.decode("ascii") for part in found.group(4, 5, 6, 7))
    attestation: Attestation = {"alg": "Ed25519", "kid": kid, "payload_hash": payload_hash, "sig": sig}
    return ManifestTail(node_id, attestation, issued_at_ms, expires_at_ms)


_MAX_JUDGED = 256
_MAX_JUDGED_BYTES = 8 * 1024


class _Claims(NamedTuple):
    """What a manifest claims, before it is attested, and the bytes of its two parts."""

    node_id: str
    attestation: Attestation
    issued_at_ms: int
    expires_at_ms: int
    capabilities: Sequence[Capability]
    head: bytes
    tail: bytes


class _RejectionError(Exception):
    """A rule is broken; ends the judging."""

    def __init__(self, reason: ManifestReason) -> None:
        super().__init__(reason)
        self.reason = reason


class TrustRules:
    """The rules over one set of documents and kinds."""

    def __init__(self, registry: SchemaRegistry, kinds: KindRegistry) -> None:
        self._schema = registry.load(MANIFEST_REF)
        self._kinds = kinds
        # By their bytes, with one copy of them for all nodes that announce the same. A node that announces
        # others again and again only makes the parser be used.
        self._judged: OrderedDict[bytes, tuple[Sequence[Capability], bytes]] = OrderedDict()
        # A caller asks ``is_readable`` and then ``accept`` of the same object.
        self._last_wire: bytes | None = None
        self._last_claims: _Claims | None = None

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

        A mark that is further ahead than a manifest may be was set while the clock was ahead. It does not
        count for what a session brings: the node would have to wait for that time. By the broker it does,
        where anyone could repeat an old manifest.
        """
        if known.is_live and known.mark is not None and known.mark.issued_at_ms > now_ms + MAX_FUTURE_MS:
            known = replace(known, mark=None)
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
        claims = self._short(wire) or self._read(wire, parsed)
        if not 0 < claims.expires_at_ms - claims.issued_at_ms <= MAX_TTL_MS:
            raise _RejectionError(ManifestReason.LIFETIME)
        if claims.node_id != node_id:
            raise _RejectionError(ManifestReason.ID_MISMATCH)
        kid = claims.attestation["kid"]
        if kid in known.revoked:
            raise _RejectionError(ManifestReason.REVOKED)
        identity = known.identities.get(kid)
        if identity is None:
            return Verdict(Outcome.PENDING, kid=kid, mark=known.mark)
        _check_attested(wire, claims, identity, now_ms)
        self._remember(claims)
        trusted = TrustedManifest(
            identity, etag, claims.issued_at_ms, claims.expires_at_ms, claims.head, claims.tail
        )
        if _is_stale(trusted, now_ms, known):
            return Verdict(Outcome.STALE, mark=known.mark)
        return Verdict(Outcome.ACCEPTED, trusted, claims.capabilities, mark=known.mark)

    def is_readable(self, wire: bytes) -> bool:
        """Return whether ``accept`` needs no parser for ``wire``: its capabilities were judged before."""
        return self._short(wire) is not None

    def _short(self, wire: bytes) -> _Claims | None:
        """Return the claims of ``wire`` if its capabilities equal, byte by byte, some that were judged.

        All behind them is of the one form that ``manifest_tail`` admits: the whole is canonical JSON within
        the manifest's document, as those were.
        """
        if wire is self._last_wire:
            return self._last_claims
        head, separator, rest = wire.partition(BEHIND_CAPABILITIES)
        judged = self._judged.get(head)
        if judged is None or len(wire) > MAX_MANIFEST_BYTES:
            return None
        tail = separator + rest
        stated = read_tail(tail)
        claims = _Claims(*stated, *judged, tail) if stated is not None else None
        self._last_wire, self._last_claims = wire, claims
        return claims

    def _remember(self, claims: _Claims) -> None:
        """Remember the capabilities of a manifest that was judged, and attested by a leaf.

        Only where ``read_tail`` admits the rest: then the first part is the capabilities, whole.
        """
        if claims.head in self._judged or len(claims.head) > _MAX_JUDGED_BYTES:
            return
        if read_tail(claims.tail) is not None:
            self._judged[claims.head] = (claims.capabilities, claims.head)
            if len(self._judged) > _MAX_JUDGED:
                self._judged.popitem(last=False)

    def _read(self, wire: bytes, parsed: Mapping[str, Any] | None) -> _Claims:
        """Return what the manifest claims that ``wire`` is the canonical form of, if it is one by itself."""
        manifest: Any = _parsed(wire) if parsed is None or len(wire) > MAX_MANIFEST_BYTES else parsed
        # Kinds first: one that the document does not admit, or this process not know, has a code of its own.
        if self._names_unknown_kind(manifest):
            raise _RejectionError(ManifestReason.KIND_UNSUPPORTED)
        if not self._schema.is_valid(manifest):
            raise _RejectionError(ManifestReason.SCHEMA)
        if not is_canonical(wire, manifest):
            raise _RejectionError(ManifestReason.NOT_CANONICAL)
        read: Manifest = manifest
        self._check_capabilities(read["capabilities"])
        head, separator, rest = wire.partition(BEHIND_CAPABILITIES)
        return _Claims(
            read["node_id"],
            read["node_attestation"],
            read["issued_at_ms"],
            read["expires_at_ms"],
            read["capabilities"],
            head,
            separator + rest,
        )

    def _names_unknown_kind(self, manifest: object) -> bool:
        capabilities = manifest.get("capabilities") if isinstance(manifest, dict) else None
        if not isinstance(capabilities, list):
            return False
        kinds = [item.get("kind") for item in capabilities if isinstance(item, dict)]
        return any(isinstance(kind, str) and self._kinds.get(kind) is None for kind in kinds)

    def _check_capabilities(self, capabilities: Sequence[Capability]) -> None:
        """Check what the document cannot express: ids are unique, and each cites the schema of its kind."""
        if len({capability["cap_id"] for capability in capabilities}) != len(capabilities):
            raise _RejectionError(ManifestReason.CAPABILITY_TWICE)
        for capability in capabilities:
            kind = self._kinds.get(capability["kind"])
            if kind is None or capability["schema_ref"] != kind.schema_ref:
                raise _RejectionError(ManifestReason.SCHEMA_REF)


def _parsed(wire: bytes) -> Any:
    try:
        return loads(wire, max_bytes=MAX_MANIFEST_BYTES)
    except StrictJsonError:
        raise _RejectionError(ManifestReason.NOT_JSON) from None


def _check_attested(wire: bytes, claims: _Claims, identity: Identity, now_ms: int) -> None:
    if identity.node_id != claims.node_id:
        raise _RejectionError(ManifestReason.ID_MISMATCH)
    if not identity.valid_at(now_ms):
        raise _RejectionError(ManifestReason.CERTIFICATE_EXPIRED)
    if not signature_holds(wire, claims.attestation, identity.public_key):
        raise _RejectionError(ManifestReason.SIGNATURE)


def _is_stale(manifest: TrustedManifest, now_ms: int, known: Known) -> bool:
    """Return whether ``manifest`` is only a broker's old copy; any other fault of its times rejects it."""
    # The far future comes first: it must be refused before it could ever move the mark.
    if manifest.issued_at_ms > now_ms + MAX_FUTURE_MS:
        raise _RejectionError(ManifestReason.FUTURE)
    if known.mark is not None:
        if manifest.issued_at_ms < known.mark.issued_at_ms:
            if known.session_alive:
                return True
            raise _RejectionError(ManifestReason.ROLLBACK)
        if manifest.issued_at_ms == known.mark.issued_at_ms and manifest.etag != known.mark.etag:
            raise _RejectionError(ManifestReason.CONFLICT)
    if manifest.expires_at_ms <= now_ms:
        raise _RejectionError(ManifestReason.EXPIRED)
    return False
