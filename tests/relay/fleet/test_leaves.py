"""Which leaves are believed. What the fleet makes of them is in ``test_fleet``."""

from dataclasses import replace

import pytest

from relay.fleet.leaves import FleetTrust
from relay.fleet.node_record import NodeRecord
from schemas.certificates import IdentityError
from schemas.kinds import KindRegistry
from schemas.registry import SchemaRegistry
from schemas.trust import TrustRules
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, OTHER_NODE_ID, TENANT, SimulatedCa

CA = SimulatedCa()
NODE = CA.issue()


@pytest.fixture(scope="module")
def trust(registry: SchemaRegistry) -> FleetTrust:
    return FleetTrust(TrustRules(registry, KindRegistry()), [CA.root_pem], frozenset())


def known() -> NodeRecord:
    node = NodeRecord(NODE_ID, TENANT)
    node.keep(NODE.identity())
    return node


def test_a_leaf_of_the_root_proves_its_node(trust: FleetTrust) -> None:
    assert trust.identify(NODE_ID, NODE.leaf_pem, None, NOW_MS) == NODE.identity()


def test_a_leaf_that_is_known_is_not_verified_again(trust: FleetTrust) -> None:
    node = known()
    elsewhere = replace(trust, roots=[SimulatedCa("elsewhere").root_pem])
    assert elsewhere.identify(NODE_ID, NODE.leaf_pem, node, NOW_MS) is node.identities[NODE.kid]
    with pytest.raises(IdentityError, match="chain"):
        elsewhere.identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)


@pytest.mark.parametrize("node", [None, known()], ids=["unknown", "known"])
@pytest.mark.parametrize(
    ("pem", "now_ms", "reason"),
    [
        pytest.param("", NOW_MS, "bad_certificate", id="nothing"),
        pytest.param(CA.issue(OTHER_NODE_ID).leaf_pem, NOW_MS, "id_mismatch", id="another node's"),
        pytest.param(NODE.leaf_pem, NOW_MS + 91 * DAY_MS, "validity", id="expired"),
        pytest.param(SimulatedCa("elsewhere").issue().leaf_pem, NOW_MS, "chain", id="of another root"),
    ],
)
def test_what_proves_nothing_is_refused(
    trust: FleetTrust, node: NodeRecord | None, pem: str, now_ms: int, reason: str
) -> None:
    with pytest.raises(IdentityError) as caught:
        trust.identify(NODE_ID, pem, node, now_ms)
    assert caught.value.reason == reason


@pytest.mark.parametrize("revoked", [NODE.kid, NODE.identity().issued_as], ids=["kid", "issuer-and-serial"])
def test_a_revoked_leaf_is_refused(trust: FleetTrust, revoked: str) -> None:
    with pytest.raises(IdentityError, match="revoked"):
        replace(trust, revoked=frozenset({revoked})).identify(NODE_ID, NODE.leaf_pem, None, NOW_MS)
