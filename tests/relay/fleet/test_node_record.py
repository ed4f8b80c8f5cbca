"""How long a node's tools are listed, and which of its leaves count."""

import pytest

from relay.fleet.node_record import NO_TOOLS, NodeRecord
from schemas.trust import TrustedManifest
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, TENANT, SimulatedCa, key_named

CA = SimulatedCa()
DAYS = 90


def record(*, ends_ms: int, grace_until_ms: int, connected: bool) -> NodeRecord:
    node = CA.issue()
    manifest = TrustedManifest(node.identity(), "", 0, ends_ms, b"", b"")
    return NodeRecord(NODE_ID, TENANT, manifest=manifest, grace_until_ms=grace_until_ms, connected=connected)


@pytest.mark.parametrize(
    ("ends_ms", "grace_until_ms", "connected", "until_ms"),
    [
        pytest.param(10, 5, True, 10, id="connected"),
        pytest.param(10, 5, False, 5, id="in its grace"),
        pytest.param(5, 10, False, 5, id="with a manifest that ends within its grace"),
        pytest.param(DAYS * 2 * DAY_MS + NOW_MS, 0, True, DAYS * DAY_MS + NOW_MS, id="with its leaf"),
    ],
)
def test_tools_are_listed_until_the_first_end(
    ends_ms: int, grace_until_ms: int, until_ms: int, *, connected: bool
) -> None:
    node = record(ends_ms=ends_ms, grace_until_ms=grace_until_ms, connected=connected)
    assert node.listed_until_ms == until_ms
    assert node.is_listed(until_ms - 1)
    assert not node.is_listed(until_ms)


def test_without_a_manifest_nothing_is_listed() -> None:
    assert not NodeRecord(NODE_ID, TENANT, connected=True, grace_until_ms=10).is_listed(0)


def test_two_leaves_are_kept_and_the_newest_decides_the_tenant() -> None:
    leaves = [
        CA.issue(NODE_ID, tenant, key=key_named(tenant), now_ms=NOW_MS - (3 - age) * DAY_MS).identity()
        for age, tenant in enumerate(("oldest", "older", "newest"))
    ]
    for order in (leaves, leaves[::-1], [leaves[2], leaves[0], leaves[1]]):
        node = NodeRecord(NODE_ID, TENANT)
        for leaf in order:
            node.keep(leaf)
        assert set(node.identities) == {leaf.kid for leaf in leaves[1:]}
        assert node.tenant == "newest"


def test_only_an_accepted_manifest_counts_as_announced() -> None:
    node = NodeRecord(NODE_ID, TENANT)
    node.withdraw()  # as by a tombstone that the broker has kept
    assert not node.has_announced
    node.announce(NO_TOOLS)
    node.withdraw()
    assert node.has_announced
