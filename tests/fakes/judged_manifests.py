"""A node's manifests, what is known of the node, and parts of verdicts on them."""

from dataclasses import replace
from typing import Any

from schemas.trust import Known, ManifestReason, Mark, Outcome, TrustRules, Verdict
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS, OTHER_NODE_ID, SimulatedCa

CA = SimulatedCa()
NODE = CA.issue()
OTHER = CA.issue(OTHER_NODE_ID)
FIVE_MINUTES_MS = 300_000
KNOWN = Known(identities={NODE.kid: NODE.identity()})


def rejected(reason: ManifestReason, mark: Mark | None = None) -> Verdict:
    return Verdict(Outcome.REJECTED, reason=reason, mark=mark)


def marked(issued_at_ms: int, etag: str = "00" * 32, *, session_alive: bool = False) -> Known:
    return replace(KNOWN, mark=Mark(issued_at_ms, etag), session_alive=session_alive)


def in_force(rules: TrustRules, wire: bytes = NODE.manifest()) -> Known:
    """Return what is known once ``wire`` was accepted."""
    manifest = rules.accept(wire, NODE_ID, NOW_MS, KNOWN).manifest
    assert manifest is not None
    return replace(KNOWN, mark=manifest.mark, current_etag=manifest.etag)


def echo(**changes: object) -> dict[str, Any]:
    return {**ECHO, **changes}


def constrained(**constraints: object) -> dict[str, Any]:
    return echo(constraints={"rate_limit_rps": 10, **constraints})


def echoes(count: int) -> list[dict[str, Any]]:
    return [echo(cap_id=f"echo{number}") for number in range(count)]


WIRE = NODE.manifest()
