"""A manifest that was only signed again is judged without a parser, and exactly as with one."""

from dataclasses import replace

import pytest

from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.renewed_manifest import renewed_manifest
from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.trust import Known, Outcome, Reason, TrustedManifest, TrustRules, Verdict
from tests.fakes.signer import (
    ABSENT,
    DAY_MS,
    ECHO,
    METRICS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TTL_MS,
    SimulatedCa,
    key_named,
)
from tests.fakes.work_counts import WorkCounts

CA = SimulatedCa()
NODE, OTHER = CA.issue(), CA.issue(OTHER_NODE_ID)
KNOWN = Known(identities={NODE.kid: NODE.identity()})
LATER_MS = NOW_MS + 60_000
RENEWED = NODE.manifest(issued_at_ms=LATER_MS)


@pytest.fixture(scope="module")
def rules(registry: SchemaRegistry, kinds: KindRegistry) -> TrustRules:
    return TrustRules(registry, kinds)


@pytest.fixture(scope="module")
def current(rules: TrustRules) -> TrustedManifest:
    manifest = rules.accept(NODE.manifest(), NODE_ID, NOW_MS, KNOWN).manifest
    assert manifest is not None
    return manifest


def judged_twice(rules: TrustRules, current: TrustedManifest, wire: bytes) -> tuple[Verdict, Verdict]:
    """Return the verdicts on ``wire`` with and without the manifest in force; what they share is compared."""
    known = replace(KNOWN, mark=current.mark)
    parsed = rules.accept(wire, NODE_ID, LATER_MS, known)
    short = rules.accept(wire, NODE_ID, LATER_MS, replace(known, current=current))
    assert replace(short, capabilities=None) == replace(parsed, capabilities=None)
    return short, parsed


def test_a_heartbeat_takes_no_parser_no_encoder_and_no_validation(
    rules: TrustRules, current: TrustedManifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkCounts(monkeypatch)
    verdict = rules.accept(RENEWED, NODE_ID, LATER_MS, replace(KNOWN, mark=current.mark, current=current))
    assert verdict.outcome is Outcome.ACCEPTED
    assert work.counts == {}


def test_it_is_accepted_as_it_would_be_after_parsing(rules: TrustRules, current: TrustedManifest) -> None:
    short, parsed = judged_twice(rules, current, RENEWED)
    assert short.manifest is not None
    assert (short.manifest.wire, short.capabilities) == (RENEWED, None)
    assert parsed.capabilities == [METRICS, ECHO]


def test_equal_capabilities_are_one_object_in_memory(rules: TrustRules, current: TrustedManifest) -> None:
    known = Known(identities={OTHER.kid: OTHER.identity()})
    other = rules.accept(OTHER.manifest(), OTHER_NODE_ID, NOW_MS, known).manifest
    renewed = rules.accept(RENEWED, NODE_ID, LATER_MS, replace(KNOWN, current=current)).manifest
    assert other is not None
    assert renewed is not None
    assert other.capabilities_bytes is current.capabilities_bytes is renewed.capabilities_bytes


BAD_RENEWALS: dict[str, tuple[bytes, Reason]] = {
    "too long": (
        NODE.manifest(issued_at_ms=LATER_MS, expires_at_ms=LATER_MS + DAY_MS + 1),
        Reason.LIFETIME,
    ),
    "no lifetime": (NODE.manifest(issued_at_ms=LATER_MS, expires_at_ms=LATER_MS), Reason.LIFETIME),
    "an older one": (NODE.manifest(issued_at_ms=NOW_MS - 1), Reason.ROLLBACK),
    "an equal time": (NODE.manifest(expires_at_ms=NOW_MS + TTL_MS + 1), Reason.CONFLICT),
    "the far future": (NODE.manifest(issued_at_ms=LATER_MS + 300_001), Reason.FUTURE),
    "expired": (NODE.manifest(issued_at_ms=LATER_MS - 2, expires_at_ms=LATER_MS - 1), Reason.EXPIRED),
    "another signer": (
        NODE.manifest(issued_at_ms=LATER_MS, signer=key_named("another")),
        Reason.SIGNATURE,
    ),
    "another hash": (
        NODE.manifest(issued_at_ms=LATER_MS, attestation={"payload_hash": "00" * 32}),
        Reason.SIGNATURE,
    ),
    "before this system": (NODE.manifest(issued_at_ms=10**12, expires_at_ms=10**12 + 1), Reason.SCHEMA),
    "the greatest numbers": (
        NODE.manifest(issued_at_ms=MAX_SAFE_INTEGER - 1, expires_at_ms=MAX_SAFE_INTEGER),
        Reason.FUTURE,
    ),
    "a leading zero": (RENEWED.replace(b'"issued_at_ms":', b'"issued_at_ms":0'), Reason.NOT_JSON),
    "a line feed at the end": (RENEWED + b"\n", Reason.NOT_CANONICAL),
}


@pytest.mark.parametrize(("wire", "reason"), BAD_RENEWALS.values(), ids=BAD_RENEWALS)
def test_what_is_wrong_with_it_is_found_all_the_same(
    rules: TrustRules, current: TrustedManifest, wire: bytes, reason: Reason
) -> None:
    short, _ = judged_twice(rules, current, wire)
    assert short.reason is reason


def test_a_leaf_that_was_revoked_or_dropped_attests_no_renewal(
    rules: TrustRules, current: TrustedManifest
) -> None:
    known = replace(KNOWN, mark=current.mark, current=current)
    revoked = rules.accept(RENEWED, NODE_ID, LATER_MS, replace(known, revoked={NODE.kid}))
    assert revoked.reason is Reason.REVOKED
    assert rules.accept(RENEWED, NODE_ID, LATER_MS, replace(known, identities={})).outcome is Outcome.PENDING
    other_topic = rules.accept(RENEWED, OTHER_NODE_ID, LATER_MS, known)
    assert other_topic.reason is Reason.ID_MISMATCH


@pytest.mark.parametrize(
    "members",
    [
        {"capabilities": [METRICS]},
        {"capabilities": [METRICS, {**ECHO, "cap_id": "ech"}]},
        {"hw_fingerprint": {"algo": "blake3-256", "value": "cd" * 32, "sources": ["machine_id"]}},
        {"attestation": {"kid": OTHER.kid}},
        {"node_id": OTHER_NODE_ID},
        {"manifest_version": "1.0.0"},
        {"one_more": 1},
        {"hw_fingerprint": ABSENT},
    ],
    ids=lambda members: next(iter(members)),
)
def test_another_document_is_parsed(current: TrustedManifest, members: dict[str, object]) -> None:
    attestation = members.pop("attestation", None)
    wire = NODE.manifest(issued_at_ms=LATER_MS, attestation=attestation, **members)  # type: ignore[arg-type]  # a case
    assert renewed_manifest(wire, current.wire, len(current.capabilities_bytes)) is None
    assert not current.is_renewed_by(wire)


def test_no_byte_that_is_changed_added_or_removed_makes_another_verdict(
    rules: TrustRules, current: TrustedManifest
) -> None:
    head = len(current.capabilities_bytes)
    # Every byte behind the capabilities, and some within: they are compared as they are.
    places = [*range(0, head, 97), *range(head - 2, len(RENEWED))]
    for place in places:
        for piece in (bytes([RENEWED[place] ^ 1]), b"0" + RENEWED[place : place + 1], b""):
            wire = RENEWED[:place] + piece + RENEWED[place + 1 :]
            short, _ = judged_twice(rules, current, wire)
            assert short.manifest is None
