"""Attacker: the holder of a leaf that must not count. Tried: on the identity topic, at a session, at issue.

The leaf is of another root, has expired, is not valid yet, was revoked, or holds a key of low order, under
which one signature fits many messages. What must happen: the identity is refused, the session is closed (4003
when revoked, 4001 otherwise), no manifest is in force, and no leaf is issued.
"""

import base64
import os
from pathlib import Path

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.errors import AuthorityError
from relay.pki.issuing import issue_leaf
from schemas.certificates import IdentityError, make_csr, read_csr
from schemas.registry import SchemaRegistry
from schemas.trust import ManifestReason, Outcome
from tests.fakes.clock import FakeClock
from tests.fakes.forged import invalid_leaf
from tests.fakes.hub import Hub
from tests.fakes.refusals import audited_refusals, manifest_in_force, refusal
from tests.fakes.served_relay import ServedRelay
from tests.fakes.serving import Server
from tests.fakes.signer import (
    DAY_MS,
    LOW_ORDER_KEYS,
    NODE_ID,
    NOW_MS,
    TENANT,
    SimulatedCa,
    SimulatedNode,
    key_named,
)

CA = SimulatedCa()
KEY = key_named(f"node {NODE_ID}")
SKEW_MS = 5 * 60_000


def with_leaf(pem: str) -> SimulatedNode:
    return SimulatedNode(NODE_ID, TENANT, KEY, pem, CA.root_pem)


NOT_BELIEVED = [
    pytest.param(SimulatedCa("elsewhere").issue(), "chain", id="of another root"),
    pytest.param(CA.issue(now_ms=NOW_MS - 90 * DAY_MS), "validity", id="expired this instant"),
    pytest.param(CA.issue(now_ms=NOW_MS - 400 * DAY_MS), "validity", id="expired long ago"),
    pytest.param(CA.issue(now_ms=NOW_MS + SKEW_MS + 1000), "validity", id="not valid for another second"),
    *(
        pytest.param(with_leaf(invalid_leaf(CA, public_key=key)), "low_order_key", id=f"a key of {name}")
        for name, key in LOW_ORDER_KEYS.items()
    ),
]


@pytest.mark.parametrize(("node", "reason"), NOT_BELIEVED)
def test_its_identity_and_what_it_signs_are_not_accepted(hub: Hub, node: SimulatedNode, reason: str) -> None:
    hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
    verdict = hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
    assert verdict.manifest is None
    assert hub.nodes_of(TENANT) == []
    assert audited_refusals(hub) == [refusal("identity_refused", NODE_ID, reason)]


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("node", "reason"), NOT_BELIEVED)
async def test_it_opens_no_session(relay: ServedRelay, node: SimulatedNode, reason: str) -> None:
    async with relay.end(node) as end:
        await end.answer_challenge()
        assert await end.until_closed() == (4001, [])
    assert audited_refusals(relay.hub) == [refusal("node_refused", "127.0.0.1", reason)]
    assert relay.hub.nodes_of(TENANT) == []


@pytest.mark.asyncio(loop_scope="module")
async def test_a_revoked_leaf_is_refused_wherever_it_is_shown(
    tmp_path: Path, registry: SchemaRegistry, server: Server
) -> None:
    node = CA.issue()
    hub = Hub(tmp_path, registry, revoked=[node.kid], ca=CA)
    async with ServedRelay.open(hub, server) as relay:
        hub.fleet.offer_identity(NODE_ID, node.leaf_pem)
        verdict = hub.fleet.offer_manifest(NODE_ID, node.manifest(), "broker")
        assert verdict.reason is ManifestReason.REVOKED
        assert verdict.reason.failure.value.code == "E_ATTESTATION_FAILED"
        async with relay.end(node) as end:
            await end.answer_challenge()
            code, said = await end.until_closed()
            assert code == 4003
            assert [(frame.type, frame.payload) for frame in said] == [("bye", {"reason": "revoked"})]
    assert hub.nodes_of(TENANT) == []
    assert audited_refusals(hub) == [
        refusal("identity_refused", NODE_ID, "revoked"),
        refusal("manifest_refused", NODE_ID, "revoked"),
        refusal("node_refused", "127.0.0.1", "revoked"),
    ]
    hub.close()


def test_a_leaf_that_expires_while_it_is_known_signs_nothing_more(hub: Hub) -> None:
    node = hub.ca.issue(valid_days=1)
    good = hub.connect(node)
    hub.clock.advance(DAY_MS)
    late = node.manifest(issued_at_ms=hub.clock())
    verdict = hub.fleet.offer_manifest(NODE_ID, late, "session")
    assert verdict.reason is ManifestReason.CERTIFICATE_EXPIRED
    assert verdict.reason.failure.value.code == "E_ATTESTATION_FAILED"
    assert manifest_in_force(hub, node) == good
    assert audited_refusals(hub) == [refusal("manifest_refused", NODE_ID, "certificate_expired")]


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_a_signature_that_fits_everything_fits_nothing_here(
    hub: Hub, node: SimulatedNode, low: bytes
) -> None:
    # R = the neutral point and S = 0 verify under such a key for a good part of all messages.
    forgery = base64.urlsafe_b64encode(LOW_ORDER_KEYS["order-1"] + bytes(32)).rstrip(b"=").decode()
    impostor = with_leaf(invalid_leaf(hub.ca, public_key=low))
    hub.connect(node)
    hub.fleet.offer_identity(NODE_ID, impostor.leaf_pem)
    for number in range(1, 9):
        wire = impostor.manifest(issued_at_ms=NOW_MS + number, attestation={"sig": forgery})
        assert hub.fleet.offer_manifest(NODE_ID, wire, "broker").outcome is Outcome.PENDING
    assert manifest_in_force(hub, node) == node.manifest()
    assert audited_refusals(hub) == [
        refusal("identity_refused", NODE_ID, "low_order_key"),
        refusal("manifest_refused", NODE_ID, "unvouched", 7),
    ]


@pytest.mark.parametrize("low", LOW_ORDER_KEYS.values(), ids=LOW_ORDER_KEYS)
def test_no_leaf_is_issued_for_a_key_of_low_order(tmp_path: Path, low: bytes) -> None:
    with pytest.raises(IdentityError, match="low_order_key"):
        issue_leaf(
            CA.root_pem,
            CA.key,
            node_id=NODE_ID,
            tenant=TENANT,
            public_key=low,
            now_ms=NOW_MS,
            valid_days=90,
            serial=5,
        )
    request = request_for(low)
    with pytest.raises(IdentityError, match="low_order_key"):
        read_csr(request)
    authority = CertificateAuthority(tmp_path / "ca", FakeClock(NOW_MS), os.urandom)
    authority.create()
    with pytest.raises(AuthorityError, match="low_order_key"):
        authority.issue(request, TENANT)


def request_for(public_key: bytes) -> str:
    """Return a certificate request with ``public_key`` in the place of the key that signed it."""
    lines = make_csr(KEY, NODE_ID).splitlines()
    der = base64.b64decode("".join(lines[1:-1])).replace(bytes(KEY.verify_key), public_key)
    return "\n".join([lines[0], base64.b64encode(der).decode(), lines[-1], ""])
