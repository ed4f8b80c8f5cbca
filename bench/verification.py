"""How many manifests a second the whole ``accept`` judges, beside the bare signature check."""

import statistics
import sys
import time
from collections.abc import Callable

from nacl.signing import SigningKey

from bench.results import Figure
from kubelet.handlers.factory import make_handlers
from relay.pki.issuing import issue_leaf, make_root
from schemas.certificates import verify_leaf
from schemas.keys import verifies
from schemas.kinds import KindRegistry
from schemas.manifest import fingerprint, sign_manifest
from schemas.process.logs import make_logger
from schemas.registry import SchemaRegistry
from schemas.trust import Known, Outcome, TrustRules

_NODE_ID = "01hzx9k3m4p7q8r9s0t1v2w3xy"
_NOW_MS = 1_790_000_000_000
_ROUNDS = 7
_COUNT = 1500


def measure_verification() -> Figure:
    """Return ``manifests_verified_per_s``."""
    root_key, key = SigningKey(bytes(range(32))), SigningKey(bytes(range(1, 33)))
    root = make_root(root_key, "bench", _NOW_MS, 3650, serial=1)
    public_key = bytes(key.verify_key)
    leaf = issue_leaf(
        root,
        root_key,
        node_id=_NODE_ID,
        tenant="bench",
        public_key=public_key,
        now_ms=_NOW_MS,
        valid_days=90,
        serial=2,
    )
    identity = verify_leaf(leaf, [root], _NOW_MS)
    wire = sign_manifest(
        node_id=_NODE_ID,
        kid=identity.kid,
        hw_fingerprint=fingerprint({"machine_id": "bench"}),
        capabilities=[
            handler.capability for handler in make_handlers(_NODE_ID, make_logger("kubelet", sys.stderr))
        ],
        issued_at_ms=_NOW_MS,
        expires_at_ms=_NOW_MS + 900_000,
        sign=lambda message: key.sign(message).signature,
    )
    rules, known = TrustRules(SchemaRegistry(), KindRegistry()), Known({identity.kid: identity})
    signature = key.sign(wire).signature

    def accept() -> bool:
        return rules.accept(wire, _NODE_ID, _NOW_MS, known).outcome is Outcome.ACCEPTED

    def verify() -> bool:
        return verifies(public_key, wire, signature)

    accepts, checks = [], []
    for _ in range(_ROUNDS):
        accepts.append(_rate(accept))
        checks.append(_rate(verify))
    return Figure(
        name="manifests_verified_per_s",
        value=statistics.median(accepts),
        unit="manifests/s",
        reference="PyNaCl verify alone",
        reference_value=statistics.median(checks),
        wanted="ratio >= 0.35",
    )


def _rate(work: Callable[[], bool]) -> float:
    started = time.perf_counter()
    for _ in range(_COUNT):
        if not work():
            raise RuntimeError("what is measured must succeed")
    return _COUNT / (time.perf_counter() - started)
