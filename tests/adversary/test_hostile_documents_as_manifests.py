"""Attacker: a node, or a broker. Tried: bytes in the place of a manifest that are no JSON of one reading.

What must happen: a refusal with ``not_json`` (``schema`` where it is JSON, but no manifest), a line in the
audit, nothing raised, and what was in force still in force.
"""

import pytest

from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.trust import ManifestReason
from tests.fakes.documents import HOSTILE, NO_OBJECTS, Spoil
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.signer import ECHO, NODE_ID, NOW_MS, SimulatedNode

NEWER = NOW_MS + 1


def refused(hub: Hub, node: SimulatedNode, wire: bytes) -> ManifestReason | None:
    good = hub.connect(node)
    verdict = hub.fleet.offer_manifest(NODE_ID, wire, "broker")
    assert verdict.manifest is None
    assert verdict.reason is not None
    assert verdict.reason.failure.value.code == "E_MANIFEST_INVALID"
    assert manifest_in_force(hub, node) == good
    assert audited_refusals(hub) == [refusal("manifest_refused", NODE_ID, verdict.reason.value)]
    return verdict.reason


@pytest.mark.parametrize("spoil", [spoil for spoil, _ in HOSTILE.values()], ids=list(HOSTILE))
def test_a_document_with_two_readings_is_no_manifest(hub: Hub, node: SimulatedNode, spoil: Spoil) -> None:
    assert refused(hub, node, spoil(node.manifest(issued_at_ms=NEWER))) is ManifestReason.NOT_JSON


@pytest.mark.parametrize("wire", NO_OBJECTS)
def test_nor_is_one_that_is_no_object(hub: Hub, node: SimulatedNode, wire: bytes) -> None:
    assert refused(hub, node, wire) is ManifestReason.SCHEMA


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda good: good + b"\n", id="a line end after it"),
        pytest.param(lambda good: b" " + good, id="a space before it"),
        pytest.param(lambda good: good.replace(b":", b": ", 1), id="a space within it"),
        pytest.param(lambda good: good.replace(b"echo", b"\\u0065cho", 1), id="an escape"),
        pytest.param(
            lambda good: good.replace(str(NEWER).encode(), b"%d.0" % NEWER), id="a fraction of zero"
        ),
        pytest.param(lambda good: good.replace(b"%d" % NEWER, b"%de0" % NEWER), id="an exponent"),
    ],
)
def test_another_spelling_of_a_good_manifest_is_not_canonical(
    hub: Hub, node: SimulatedNode, spoil: Spoil
) -> None:
    good = node.manifest(issued_at_ms=NEWER)
    assert spoil(good) != good
    assert refused(hub, node, spoil(good)) is ManifestReason.NOT_CANONICAL


@pytest.mark.parametrize(
    "constraint",
    [{"rate_limit_rps": 0}, {"rate_limit_rps": -1}, {"rate_limit_rps": 1e300}, {"deadline_ms_default": 1e21}],
    ids=str,
)
def test_a_limit_that_is_none_is_refused(hub: Hub, node: SimulatedNode, constraint: dict[str, float]) -> None:
    capability = {**ECHO, "constraints": {**ECHO["constraints"], **constraint}}
    assert (
        refused(hub, node, node.manifest(issued_at_ms=NEWER, capabilities=[capability]))
        is ManifestReason.SCHEMA
    )


def test_a_manifest_at_the_limit_is_read_and_one_byte_more_is_not(hub: Hub, node: SimulatedNode) -> None:
    good = node.manifest(issued_at_ms=NEWER)
    padded = good + b" " * (MAX_MANIFEST_BYTES - len(good))
    hub.connect(node)
    assert hub.fleet.offer_manifest(NODE_ID, padded, "broker").reason is ManifestReason.NOT_CANONICAL
    assert hub.fleet.offer_manifest(NODE_ID, padded + b" ", "broker").reason is ManifestReason.NOT_JSON
    assert audited_refusals(hub) == [
        refusal("manifest_refused", NODE_ID, "not_canonical"),
        refusal("manifest_refused", NODE_ID, "not_json"),
    ]
