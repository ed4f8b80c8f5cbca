"""A manifest whose capabilities were judged before is judged without a parser, and exactly as with one."""

import json
from dataclasses import replace

import pytest

from schemas.kinds import KindRegistry
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.strict_json import MAX_SAFE_INTEGER
from schemas.trust import HighWaterMark, Known, ManifestReason, Outcome, TrustRules, Verdict, read_tail
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
from tests.fakes.view_stage import WorkCounts

REGISTRY, KINDS = SchemaRegistry(), KindRegistry()
CA = SimulatedCa()
NODE, OTHER = CA.issue(), CA.issue(OTHER_NODE_ID)
KNOWN = Known(identities={NODE.kid: NODE.identity()})
LATER_MS = NOW_MS + 60_000
RENEWED = NODE.manifest(issued_at_ms=LATER_MS)


BEFORE = HighWaterMark(NOW_MS, etag_of(NODE.manifest()))
IN_FORCE = replace(KNOWN, mark=BEFORE, current_etag=BEFORE.etag)


def fresh() -> TrustRules:
    """Return rules that have judged nothing yet: they parse everything."""
    return TrustRules(REGISTRY, KINDS)


@pytest.fixture
def rules() -> TrustRules:
    """Return rules that have judged the capabilities of the node."""
    rules = fresh()
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, KNOWN).outcome is Outcome.ACCEPTED
    return rules


def judged_twice(rules: TrustRules, parsing: TrustRules, wire: bytes) -> Verdict:
    """Return the verdict on ``wire``, which is the same without a parser and with one."""
    short, parsed = (each.accept(wire, NODE_ID, LATER_MS, IN_FORCE) for each in (rules, parsing))
    assert short == parsed
    return short


def test_a_heartbeat_takes_no_parser_no_encoder_and_no_validation(
    rules: TrustRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = WorkCounts(monkeypatch)
    assert rules.is_readable(RENEWED)
    assert rules.accept(RENEWED, NODE_ID, LATER_MS, IN_FORCE).outcome is Outcome.ACCEPTED
    assert work.counts == {}


def test_nor_does_the_first_manifest_of_another_node_with_equal_capabilities(
    rules: TrustRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire, known = OTHER.manifest(), Known(identities={OTHER.kid: OTHER.identity()})
    work = WorkCounts(monkeypatch)
    verdict = rules.accept(wire, OTHER_NODE_ID, NOW_MS, known)
    assert work.counts == {}
    assert verdict.capabilities == [METRICS, ECHO]
    assert verdict.manifest is not None
    assert verdict.manifest.wire == wire


def test_it_is_accepted_as_it_would_be_after_parsing(rules: TrustRules) -> None:
    verdict = judged_twice(rules, fresh(), RENEWED)
    assert verdict.manifest is not None
    assert verdict.manifest.wire == RENEWED
    assert verdict.capabilities == [METRICS, ECHO]


def test_equal_capabilities_are_one_object_in_memory(rules: TrustRules) -> None:
    known = Known(identities={OTHER.kid: OTHER.identity()})
    one = rules.accept(RENEWED, NODE_ID, LATER_MS, IN_FORCE).manifest
    other = rules.accept(OTHER.manifest(), OTHER_NODE_ID, NOW_MS, known).manifest
    assert one is not None
    assert other is not None
    assert other.capabilities_bytes is one.capabilities_bytes


def test_what_was_rejected_is_not_remembered() -> None:
    rules = fresh()
    unknown = NODE.manifest(capabilities=[METRICS, {**ECHO, "kind": "system.gpio"}])
    assert rules.accept(unknown, NODE_ID, NOW_MS, KNOWN).reason is ManifestReason.KIND_UNSUPPORTED
    assert not rules.is_readable(unknown)
    forged = NODE.manifest(signer=key_named("another"))
    assert rules.accept(forged, NODE_ID, NOW_MS, KNOWN).reason is ManifestReason.SIGNATURE
    assert not rules.is_readable(forged)


def test_a_node_that_announces_others_again_and_again_fills_no_memory(rules: TrustRules) -> None:
    for number in range(300):
        wire = NODE.manifest(capabilities=[{**ECHO, "cap_id": f"echo{number}"}])
        assert rules.accept(wire, NODE_ID, NOW_MS, KNOWN).outcome is Outcome.ACCEPTED
    # It has displaced the others, which are parsed once more.
    assert not rules.is_readable(RENEWED)
    assert judged_twice(rules, fresh(), RENEWED).outcome is Outcome.ACCEPTED
    assert rules.is_readable(RENEWED)


@pytest.mark.parametrize("source", ["cpu_serial", "soc_uid", "machine_id", "tpm_ek_pub", "mac_primary"])
def test_every_source_of_a_fingerprint_is_admitted(rules: TrustRules, source: str) -> None:
    sources = REGISTRY.document("manifest@1.1.0")["properties"]["hw_fingerprint"]["properties"]["sources"]
    assert source in sources["items"]["enum"]
    assert len(sources["items"]["enum"]) == 5
    print_of = {"algo": "blake3-256", "value": "ab" * 32, "sources": [source]}
    assert rules.is_readable(NODE.manifest(hw_fingerprint=print_of))
    twice = NODE.manifest(issued_at_ms=LATER_MS, hw_fingerprint={**print_of, "sources": [source, source]})
    assert judged_twice(rules, fresh(), twice).reason is ManifestReason.SCHEMA


BAD_RENEWALS: dict[str, tuple[bytes, ManifestReason]] = {
    "too long": (
        NODE.manifest(issued_at_ms=LATER_MS, expires_at_ms=LATER_MS + DAY_MS + 1),
        ManifestReason.LIFETIME,
    ),
    "no lifetime": (NODE.manifest(issued_at_ms=LATER_MS, expires_at_ms=LATER_MS), ManifestReason.LIFETIME),
    "an older one": (NODE.manifest(issued_at_ms=NOW_MS - 1), ManifestReason.ROLLBACK),
    "an equal time": (NODE.manifest(expires_at_ms=NOW_MS + TTL_MS + 1), ManifestReason.CONFLICT),
    "the far future": (NODE.manifest(issued_at_ms=LATER_MS + 300_001), ManifestReason.FUTURE),
    "expired": (NODE.manifest(issued_at_ms=LATER_MS - 2, expires_at_ms=LATER_MS - 1), ManifestReason.EXPIRED),
    "another signer": (
        NODE.manifest(issued_at_ms=LATER_MS, signer=key_named("another")),
        ManifestReason.SIGNATURE,
    ),
    "another hash": (
        NODE.manifest(issued_at_ms=LATER_MS, attestation={"payload_hash": "00" * 32}),
        ManifestReason.SIGNATURE,
    ),
    "before this system": (
        NODE.manifest(issued_at_ms=10**12, expires_at_ms=10**12 + 1),
        ManifestReason.SCHEMA,
    ),
    "the greatest numbers": (
        NODE.manifest(issued_at_ms=MAX_SAFE_INTEGER - 1, expires_at_ms=MAX_SAFE_INTEGER),
        ManifestReason.FUTURE,
    ),
    "a leading zero": (RENEWED.replace(b'"issued_at_ms":', b'"issued_at_ms":0'), ManifestReason.NOT_JSON),
    "a line feed at the end": (RENEWED + b"\n", ManifestReason.NOT_CANONICAL),
}


@pytest.mark.parametrize(("wire", "reason"), BAD_RENEWALS.values(), ids=BAD_RENEWALS)
def test_what_is_wrong_with_it_is_found_all_the_same(
    rules: TrustRules, wire: bytes, reason: ManifestReason
) -> None:
    assert judged_twice(rules, fresh(), wire).reason is reason


def test_a_leaf_that_was_revoked_or_dropped_attests_no_renewal(rules: TrustRules) -> None:
    revoked = rules.accept(RENEWED, NODE_ID, LATER_MS, replace(IN_FORCE, revoked={NODE.kid}))
    assert revoked.reason is ManifestReason.REVOKED
    unknown = rules.accept(RENEWED, NODE_ID, LATER_MS, replace(IN_FORCE, identities={}))
    assert unknown.outcome is Outcome.PENDING
    assert rules.accept(RENEWED, OTHER_NODE_ID, LATER_MS, IN_FORCE).reason is ManifestReason.ID_MISMATCH


@pytest.mark.parametrize(
    "members",
    [
        {"capabilities": [METRICS]},
        {"capabilities": [METRICS, {**ECHO, "cap_id": "ech"}]},
        {"manifest_version": "1.0.0"},
        {"one_more": 1},
        {"hw_fingerprint": ABSENT},
        {"issued_at_ms": 1_699_999_999_999},
        {"expires_at_ms": MAX_SAFE_INTEGER + 1},
    ],
    ids=lambda members: next(iter(members)),
)
def test_another_document_is_left_to_the_parser(rules: TrustRules, members: dict[str, object]) -> None:
    document = NODE.document(**members)
    wire = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
    wire = wire.replace(b'"payload_hash":""', b'"payload_hash":"' + b"00" * 32 + b'"')
    wire = wire.replace(b'"sig":""', b'"sig":"' + b"A" * 86 + b'"')
    assert not rules.is_readable(wire)


def test_no_byte_that_is_changed_added_or_removed_makes_another_verdict(rules: TrustRules) -> None:
    parsing = fresh()
    # Every byte behind the capabilities, and some within: they are compared as they are.
    head = RENEWED.index(b',"expires_at_ms"')
    assert read_tail(RENEWED[head:]) is not None
    for place in [*range(0, head, 97), *range(head - 2, len(RENEWED))]:
        for piece in (bytes([RENEWED[place] ^ 1]), b"0" + RENEWED[place : place + 1], b""):
            wire = RENEWED[:place] + piece + RENEWED[place + 1 :]
            assert judged_twice(rules, parsing, wire).manifest is None
