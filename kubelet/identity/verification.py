"""Checks a manifest as the relay would, for an operator.

Must not be imported by the running daemon: it needs the X.509 library.
"""

from kubelet.identity.provisioning import roots_in
from schemas.certificates import IdentityError, verify_leaf
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.registry import Contract, read_contract
from schemas.strict_json import StrictJsonError, loads
from schemas.trust import Known, Outcome, TrustedManifest, TrustRules


def verify_manifest(
    wire: bytes, identity_pem: str, root_pem: str, now_ms: int, contract: Contract | None = None
) -> TrustedManifest | str:
    """Return what ``wire`` holds, judged as a relay would; or why it is not valid.

    By the leaf in ``identity_pem``, the root in ``root_pem``, and the documents and kinds of ``contract``, by
    default those that ship.

    Raises:
        IdentityFilesError: the root is too large or damaged.
    """
    roots_in(root_pem)
    try:
        identity = verify_leaf(identity_pem, [root_pem], now_ms)
    except IdentityError as error:
        return f"identity: {error.reason}"
    try:
        manifest = loads(wire, max_bytes=MAX_MANIFEST_BYTES)
    except StrictJsonError:
        manifest = None
    # The id that it states itself: read from a file, there is no topic to compare it with.
    claimed = str(manifest.get("node_id", "")) if isinstance(manifest, dict) else ""
    contract = contract or read_contract(())
    rules = TrustRules(contract.registry, contract.kinds)
    verdict = rules.accept(wire, claimed, now_ms, Known({identity.kid: identity}))
    if verdict.outcome is Outcome.ACCEPTED and verdict.manifest is not None:
        return verdict.manifest
    if verdict.outcome is Outcome.PENDING:
        return "signed by another leaf than the one given"
    return verdict.reason.value if verdict.reason else verdict.outcome.value
