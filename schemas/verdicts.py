"""What the trust rules are given and what they answer: what is known of a node, and the verdict.

Must not judge: ``trust`` does.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from schemas.errors import Failure
from schemas.identity import Identity
from schemas.payloads import Capability


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
        """The row of the error table for the node, and for calls to it."""
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
class Mark:
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
    def mark(self) -> Mark:
        """The mark that accepting this manifest sets."""
        return Mark(self.issued_at_ms, self.etag)


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
    mark: Mark | None = None
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
    mark: Mark | None = None
