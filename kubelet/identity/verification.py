"""Checks a manifest as the relay would, for an operator.

Must not be imported by the running daemon: it needs the X.509 library.
"""

from dataclasses import dataclass

from kubelet.identity.provisioning import roots_in
from schemas.certificates import IdentityError, verify_leaf
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.registry import Contract, read_contract
from schemas.strict_json import StrictJsonError, loads
from schemas.trust import Known, Outcome, TrustedManifest, TrustRules


@dataclass(frozen=True, slots=True)
class ManifestFinding:
    """The manifest when it holds, or why it does not."""

    manifest: TrustedManifest | None
    reason: str | None


def verify_manifest(
    wire: bytes, identity_pem: str, root_pem: str, now_ms: int, contract: Contract | None = None
) -> ManifestFinding:
    """Judge ``wire`` with the leaf in ``identity_pem`` and the root in ``root_pem``.

    ``contract`` has the documents and kinds, by default those that ship.

    Raises:
        IdentityFilesError: the root is too large or damaged.
    """
    roots_in(root_pem)
    try:
        identity = verify_leaf(identity_pem, [root_pem], now_ms)
    except IdentityError as error:
        return ManifestFinding(None, f"identity: {error.reason}")
    contract = contract or read_contract(())
    rules = TrustRules(contract.registry, contract.kinds)
    verdict = rules.accept(wire, _claimed_node(wire), now_ms, Known({identity.kid: identity}))
    match verdict.outcome:
        case Outcome.ACCEPTED:
            return ManifestFinding(verdict.manifest, None)
        case Outcome.PENDING:
            return ManifestFinding(None, "signed by another leaf than the one given")
        case _:
            return ManifestFinding(None, verdict.reason.value if verdict.reason else verdict.outcome.value)


def _claimed_node(wire: bytes) -> str:
    """Return the id that the manifest states: read from a file, there is no topic to compare it with."""
    try:
        manifest = loads(wire, max_bytes=MAX_MANIFEST_BYTES)
    except StrictJsonError:
        return ""
    return str(manifest.get("node_id", "")) if isinstance(manifest, dict) else ""
