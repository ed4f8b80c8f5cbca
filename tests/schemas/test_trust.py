"""Manifests that are accepted, by whose leaf, and what the history of their node allows."""

import json
from dataclasses import replace
from typing import Any

import pytest

from schemas.canonical import jcs
from schemas.kinds import KindRegistry
from schemas.manifest import etag_of
from schemas.registry import SchemaRegistry
from schemas.trust import HighWaterMark, Known, ManifestReason, Outcome, TrustRules, Verdict
from tests.fakes.clock import FakeClock
from tests.fakes.forged import (
    CA,
    FIVE_MINUTES_MS,
    KNOWN,
    NODE,
    OTHER,
    WIRE,
    echo,
    echoes,
    in_force,
    marked,
    rejected,
)
from tests.fakes.signer import (
    DAY_MS,
    ECHO,
    LOW_ORDER_KEYS,
    METRICS,
    NODE_ID,
    NOW_MS,
    OTHER_NODE_ID,
    TENANT,
    TTL_MS,
    SimulatedCa,
    key_named,
)
from tests.fakes.view_stage import WorkCounts

# --- what is accepted ---------------------------------------------------------------------------------


def test_a_good_manifest_is_accepted_with_everything_that_it_says(rules: TrustRules) -> None:
    wire = NODE.manifest()
    verdict = rules.accept(wire, NODE_ID, NOW_MS, KNOWN)
    assert verdict.outcome is Outcome.ACCEPTED
    assert verdict.reason is None
    assert verdict.manifest is not None
    assert verdict.manifest.identity == NODE.identity()
    assert verdict.manifest.identity.tenant == TENANT
    assert verdict.manifest.wire == wire
    assert verdict.manifest.etag == etag_of(wire)
    assert verdict.manifest.issued_at_ms == NOW_MS
    assert verdict.manifest.expires_at_ms == NOW_MS + TTL_MS
    assert verdict.capabilities == [METRICS, ECHO]
    assert verdict.manifest.mark == HighWaterMark(NOW_MS, etag_of(wire))


def test_what_was_parsed_before_is_not_parsed_again(
    rules: TrustRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = NODE.manifest()
    parsed = json.loads(wire)
    work = WorkCounts(monkeypatch)
    assert rules.accept(wire, NODE_ID, NOW_MS, KNOWN, parsed).outcome is Outcome.ACCEPTED
    assert work.counts == {"encoded": 1, "validated": 1}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"issued_at_ms": NOW_MS + 1}, id="a-later-one"),
        pytest.param({"capabilities": [METRICS]}, id="fewer-capabilities"),
        pytest.param({"node_id": OTHER_NODE_ID}, id="another-node"),
    ],
)
def test_what_was_parsed_of_other_bytes_is_not_accepted(rules: TrustRules, change: dict[str, Any]) -> None:
    wire = NODE.manifest()
    parsed = {**json.loads(wire), **change}
    assert rules.accept(wire, NODE_ID, NOW_MS, KNOWN, parsed).reason is ManifestReason.NOT_CANONICAL


def test_what_was_parsed_of_too_many_bytes_is_not_accepted(rules: TrustRules) -> None:
    wire = NODE.manifest().ljust(128 * 1024 + 1)
    assert rules.accept(wire, NODE_ID, NOW_MS, KNOWN, json.loads(wire)).reason is ManifestReason.NOT_JSON


def test_a_later_manifest_replaces_the_one_in_force(rules: TrustRules) -> None:
    clock = FakeClock(NOW_MS)
    first = rules.accept(NODE.manifest(), NODE_ID, clock(), KNOWN).manifest
    assert first is not None
    known = replace(KNOWN, mark=first.mark, current_etag=first.etag, session_alive=True)
    second = rules.accept(NODE.manifest(issued_at_ms=clock.advance(60_000)), NODE_ID, clock(), known)
    assert second.outcome is Outcome.ACCEPTED
    assert second.manifest is not None
    assert second.manifest.mark.issued_at_ms == NOW_MS + 60_000


def test_after_a_restart_the_newest_manifest_is_accepted_once_more(rules: TrustRules) -> None:
    wire = NODE.manifest()
    verdict = rules.accept(wire, NODE_ID, NOW_MS, marked(NOW_MS, etag_of(wire)))
    assert verdict.outcome is Outcome.ACCEPTED


def test_either_of_two_leaves_suffices_at_renewal(rules: TrustRules) -> None:
    renewed = CA.issue(key=key_named("the next key"))
    known = Known(identities={NODE.kid: NODE.identity(), renewed.kid: renewed.identity()})
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, known).outcome is Outcome.ACCEPTED
    assert rules.accept(renewed.manifest(), NODE_ID, NOW_MS, known).outcome is Outcome.ACCEPTED


@pytest.mark.holds("RFC-0001/2/lifetime")
@pytest.mark.parametrize(
    "members",
    [
        pytest.param({"expires_at_ms": NOW_MS + DAY_MS}, id="a-lifetime-of-24-hours"),
        pytest.param({"expires_at_ms": NOW_MS + 1}, id="a-lifetime-of-a-millisecond"),
        pytest.param({"issued_at_ms": NOW_MS + FIVE_MINUTES_MS}, id="issued-five-minutes-ahead"),
        pytest.param(
            {"issued_at_ms": NOW_MS - DAY_MS + 1, "expires_at_ms": NOW_MS + 1}, id="a-millisecond-left"
        ),
        pytest.param({"capabilities": echoes(256)}, id="256-capabilities"),
        pytest.param({"capabilities": [ECHO, echo(cap_id="ech")]}, id="one-kind-under-two-ids"),
        pytest.param(
            {"capabilities": [{**ECHO, "constraints": {"rate_limit_rps": 50, "deadline_ms_default": 5000}}]},
            id="echo-at-its-limits",
        ),
        pytest.param({"capabilities": [{**METRICS, "verbs": ["subscribe"]}]}, id="a-verb-without-a-row"),
    ],
)
def test_the_limits_themselves_are_accepted(rules: TrustRules, members: dict[str, Any]) -> None:
    assert rules.accept(NODE.manifest(**members), NODE_ID, NOW_MS, KNOWN).outcome is Outcome.ACCEPTED


# --- whose it is --------------------------------------------------------------------------------------


def test_a_manifest_on_another_nodes_topic_is_rejected(rules: TrustRules) -> None:
    known = Known(identities={NODE.kid: NODE.identity(), OTHER.kid: OTHER.identity()})
    assert rules.accept(NODE.manifest(), OTHER_NODE_ID, NOW_MS, known) == rejected(ManifestReason.ID_MISMATCH)


def test_a_node_cannot_sign_for_another(rules: TrustRules) -> None:
    forged = NODE.manifest(node_id=OTHER_NODE_ID)
    known = Known(identities={NODE.kid: NODE.identity(), OTHER.kid: OTHER.identity()})
    assert rules.accept(forged, OTHER_NODE_ID, NOW_MS, known) == rejected(ManifestReason.ID_MISMATCH)


@pytest.mark.holds("RFC-0001/2/kid-to-tenant")
def test_a_manifest_under_a_leaf_that_is_not_known_is_pending(rules: TrustRules) -> None:
    verdict = rules.accept(NODE.manifest(), NODE_ID, NOW_MS, Known(identities={OTHER.kid: OTHER.identity()}))
    assert verdict == Verdict(Outcome.PENDING, kid=NODE.kid)


def test_a_manifest_under_a_foreign_root_is_never_more_than_pending(rules: TrustRules) -> None:
    # Its leaf is never verified, so it is never known.
    foreign = SimulatedCa("foreign").issue()
    assert rules.accept(foreign.manifest(), NODE_ID, NOW_MS, KNOWN) == Verdict(
        Outcome.PENDING, kid=foreign.kid
    )


def test_a_foreign_key_that_claims_a_known_leaf_is_rejected(rules: TrustRules) -> None:
    foreign = SimulatedCa("foreign").issue(key=key_named("a foreign key"))
    forged = foreign.manifest(attestation={"kid": NODE.kid})
    assert rules.accept(forged, NODE_ID, NOW_MS, KNOWN) == rejected(ManifestReason.SIGNATURE)


def test_another_nodes_revocation_changes_nothing(rules: TrustRules) -> None:
    known = replace(KNOWN, revoked={OTHER.kid})
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, known).outcome is Outcome.ACCEPTED


@pytest.mark.parametrize(
    ("days", "outcome"),
    [
        pytest.param(0, Outcome.ACCEPTED, id="new"),
        pytest.param(89, Outcome.ACCEPTED, id="old"),
        pytest.param(90, Outcome.REJECTED, id="expired"),
        pytest.param(-1, Outcome.REJECTED, id="not-yet-valid"),
    ],
)
def test_a_manifest_is_accepted_only_while_its_leaf_is_valid(
    rules: TrustRules, days: int, outcome: Outcome
) -> None:
    now_ms = NOW_MS + days * DAY_MS
    verdict = rules.accept(NODE.manifest(issued_at_ms=now_ms), NODE_ID, now_ms, KNOWN)
    assert verdict.outcome is outcome
    assert verdict.reason is (None if outcome is Outcome.ACCEPTED else ManifestReason.CERTIFICATE_EXPIRED)


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_a_leaf_of_low_order_would_not_verify_even_if_it_were_known(rules: TrustRules, low: bytes) -> None:
    identity = replace(NODE.identity(), public_key=low)
    # R is the neutral element and S is zero: with such a key, good for many messages.
    forged = NODE.manifest(attestation={"sig": "AQ" + "A" * 84})
    verdict = rules.accept(forged, NODE_ID, NOW_MS, Known(identities={NODE.kid: identity}))
    assert verdict == rejected(ManifestReason.SIGNATURE)


# --- history ------------------------------------------------------------------------------------------


def test_a_mark_of_a_clock_that_was_ahead_is_void_for_what_a_session_brings(rules: TrustRules) -> None:
    """A session proves who sends, so that nothing old is repeated by it."""
    known = marked(NOW_MS + FIVE_MINUTES_MS + 1, session_alive=True)
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, known).outcome is Outcome.STALE
    live = replace(known, is_live=True)
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, live).outcome is Outcome.ACCEPTED
    future = NODE.manifest(issued_at_ms=NOW_MS + FIVE_MINUTES_MS + 1)
    # The node is not told of it either: it goes on by its own clock.
    assert rules.accept(future, NODE_ID, NOW_MS, live) == rejected(ManifestReason.FUTURE, None)
    near = replace(marked(NOW_MS + FIVE_MINUTES_MS, session_alive=True), is_live=True)
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, near).outcome is Outcome.STALE


@pytest.mark.parametrize("session_alive", [False, True], ids=["without-a-session", "connected"])
def test_a_manifest_from_the_future_is_refused_and_leaves_the_way_free(
    rules: TrustRules,
    session_alive: bool,  # noqa: FBT001 - a case
) -> None:
    known = marked(NOW_MS - 1, session_alive=session_alive)
    future = NODE.manifest(issued_at_ms=NOW_MS + FIVE_MINUTES_MS + 1)
    verdict = rules.accept(future, NODE_ID, NOW_MS, known)
    assert verdict == rejected(ManifestReason.FUTURE, known.mark)
    # Only an accepted manifest moves the mark, so the next honest one is not a rollback.
    next_known = replace(known, mark=verdict.mark)
    assert rules.accept(NODE.manifest(), NODE_ID, NOW_MS, next_known).outcome is Outcome.ACCEPTED


RULES = TrustRules(SchemaRegistry(), KindRegistry())
BEFORE = HighWaterMark(NOW_MS - 1, "00" * 32)
AFTER = HighWaterMark(NOW_MS + 1, "00" * 32)
OTHER_ETAG = etag_of(NODE.manifest(capabilities=[ECHO]))
EVERY_OUTCOME: dict[str, tuple[Known, Outcome, ManifestReason | None]] = {
    "accepted": (replace(KNOWN, mark=BEFORE), Outcome.ACCEPTED, None),
    "accepted-as-the-first": (KNOWN, Outcome.ACCEPTED, None),
    "unchanged": (in_force(RULES), Outcome.UNCHANGED, None),
    "older-while-connected": (replace(KNOWN, mark=AFTER, session_alive=True), Outcome.STALE, None),
    "pending": (Known(identities={}, mark=AFTER), Outcome.PENDING, None),
    "pending-as-the-first": (Known(identities={}), Outcome.PENDING, None),
    "older-without-a-session": (replace(KNOWN, mark=AFTER), Outcome.REJECTED, ManifestReason.ROLLBACK),
    "of-the-same-time": (marked(NOW_MS, OTHER_ETAG), Outcome.REJECTED, ManifestReason.CONFLICT),
    "of-the-same-time-while-connected": (
        marked(NOW_MS, OTHER_ETAG, session_alive=True),
        Outcome.REJECTED,
        ManifestReason.CONFLICT,
    ),
    "revoked": (
        replace(KNOWN, mark=BEFORE, revoked={NODE.kid}),
        Outcome.REJECTED,
        ManifestReason.REVOKED,
    ),
    "revoked-as-the-first": (replace(KNOWN, revoked={NODE.kid}), Outcome.REJECTED, ManifestReason.REVOKED),
    "revoked-and-not-known-any-more": (
        Known(identities={}, revoked={NODE.kid}),
        Outcome.REJECTED,
        ManifestReason.REVOKED,
    ),
}


@pytest.mark.parametrize(("known", "outcome", "reason"), EVERY_OUTCOME.values(), ids=EVERY_OUTCOME)
def test_a_verdict_follows_from_what_was_known_before_and_says_it(
    rules: TrustRules, known: Known, outcome: Outcome, reason: ManifestReason | None
) -> None:
    verdict = rules.accept(WIRE, NODE_ID, NOW_MS, known)
    assert (verdict.outcome, verdict.reason, verdict.mark) == (outcome, reason, known.mark)
    assert (verdict.manifest is None) is (outcome is not Outcome.ACCEPTED)


def test_the_mark_that_was_known_is_asked_of_every_outcome() -> None:
    assert {outcome for _, outcome, _ in EVERY_OUTCOME.values()} == set(Outcome)


def test_an_accepted_manifest_has_overtaken_the_mark_that_its_verdict_carries(rules: TrustRules) -> None:
    verdict = rules.accept(WIRE, NODE_ID, NOW_MS, replace(KNOWN, mark=BEFORE))
    assert verdict.manifest is not None
    assert verdict.mark == BEFORE
    assert verdict.manifest.mark == HighWaterMark(NOW_MS, etag_of(WIRE))


# --- what the node and its callers receive -----------------------------------------------------------


def test_the_canonical_bytes_of_a_trusted_manifest_are_the_wire(rules: TrustRules) -> None:
    manifest = rules.accept(WIRE, NODE_ID, NOW_MS, KNOWN).manifest
    assert manifest is not None
    assert jcs(json.loads(manifest.wire)) == WIRE
