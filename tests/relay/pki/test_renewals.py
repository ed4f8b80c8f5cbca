import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from relay.pki.authority import CertificateAuthority
from relay.pki.renewals import OwnLeaves, Renewals
from schemas.certificates import are_endorsed, is_endorsed, make_csr, verify_leaf
from schemas.errors import Failure, ToolError
from schemas.identity import Identity, certificates_in
from tests.fakes.disk import full_disk
from tests.fakes.hub import Hub, NoAuthority
from tests.fakes.signer import DAY_MS, NODE_ID, OTHER_NODE_ID, TENANT, key_named

BOUND_S = 30
HOUR_MS = 3_600_000
KEY = key_named("the node")
CSR = make_csr(KEY, NODE_ID)
LEAF_LIFE_MS = 90 * DAY_MS


class RenewalStage:
    """A CA on disk, a node that it enrolled, and what renews it."""

    def __init__(self, hub: Hub, directory: Path) -> None:
        self.hub = hub
        self.ca = CertificateAuthority(directory, hub.clock, os.urandom)
        self.ca.create()
        self.identity = self.believed(self.ca.issue(CSR, TENANT))
        self.renewals = Renewals(OwnLeaves(self.ca), hub.audit, hub.clock, hub.log)

    def believed(self, leaf_pem: str) -> Identity:
        return verify_leaf(leaf_pem, self.ca.roots(), self.hub.clock())

    def until_due(self) -> None:
        self.hub.clock.advance(LEAF_LIFE_MS // 2)

    def events(self) -> list[tuple[object, ...]]:
        return [
            tuple(line.get(name) for name in ("event", "node_id", "tenant", "kid")) for line in self.audited()
        ]

    def audited(self) -> list[dict[str, object]]:
        return self.hub.audited() if self.hub.audit_file.exists() else []


@pytest.fixture
def stage(hub: Hub, tmp_path: Path) -> RenewalStage:
    return RenewalStage(hub, tmp_path / "ca")


async def refused(renewing: object, failure: Failure) -> ToolError:
    with pytest.raises(ToolError) as caught:
        await renewing  # type: ignore[misc]
    assert caught.value.failure is failure
    return caught.value


# --- renewing -----------------------------------------------------------------------------------------


async def test_a_node_gets_a_leaf_for_its_key_and_the_roots_that_verify_it(stage: RenewalStage) -> None:
    stage.until_due()
    issued = await stage.renewals.renew(stage.identity, CSR)
    assert issued.keys() == {"certificate", "roots"}
    fresh = verify_leaf(issued["certificate"], [issued["roots"]], stage.hub.clock())
    assert (fresh.node_id, fresh.tenant, fresh.public_key) == (NODE_ID, TENANT, bytes(KEY.verify_key))
    assert fresh.kid != stage.identity.kid
    assert fresh.not_after_ms == stage.hub.clock() + LEAF_LIFE_MS
    assert stage.ca.revoked_kids() == frozenset()
    assert stage.events() == [("renewed", NODE_ID, TENANT, fresh.kid)]


async def test_after_a_rotation_both_roots_come_and_the_new_one_has_signed(stage: RenewalStage) -> None:
    stage.until_due()
    old_root = stage.ca.root_pem()
    stage.ca.rotate_root(30)
    issued = await stage.renewals.renew(stage.identity, CSR)
    assert certificates_in(issued["roots"]) == [
        *certificates_in(stage.ca.root_pem()),
        *certificates_in(old_root),
    ]
    assert verify_leaf(issued["certificate"], [stage.ca.root_pem()], stage.hub.clock()).node_id == NODE_ID
    old, new = certificates_in(old_root), certificates_in(stage.ca.root_pem())
    assert is_endorsed(new[0], old, issued["endorsement"])


async def test_before_half_of_its_life_a_leaf_is_not_renewed_and_the_node_is_told_when(
    stage: RenewalStage,
) -> None:
    half = (stage.identity.not_before_ms + stage.identity.not_after_ms) // 2
    error = await refused(stage.renewals.renew(stage.identity, CSR), Failure.RATE_LIMITED)
    assert error.retry_after_ms is not None
    assert error.retry_after_ms == half - stage.hub.clock()
    stage.hub.clock.advance(error.retry_after_ms - 1)
    assert (
        await refused(stage.renewals.renew(stage.identity, CSR), Failure.RATE_LIMITED)
    ).retry_after_ms == 1
    stage.hub.clock.advance(1)
    await stage.renewals.renew(stage.identity, CSR)
    assert len(stage.events()) == 1


async def test_a_leaf_that_was_renewed_just_now_is_not_renewed_again(stage: RenewalStage) -> None:
    # The old leaf stays valid: without this, each frame would be an entry in the ledger that stays.
    stage.until_due()
    await stage.renewals.renew(stage.identity, CSR)
    stage.hub.clock.advance(HOUR_MS - 1)
    assert (
        await refused(stage.renewals.renew(stage.identity, CSR), Failure.RATE_LIMITED)
    ).retry_after_ms == 1
    stage.hub.clock.advance(1)
    await stage.renewals.renew(stage.identity, CSR)


async def test_requests_of_the_same_moment_make_one_leaf(stage: RenewalStage) -> None:
    stage.until_due()
    asked = [asyncio.create_task(stage.renewals.renew(stage.identity, CSR)) for _ in range(5)]
    done = await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), BOUND_S)
    assert [type(each) for each in done].count(ToolError) == 4
    assert len(stage.ca.records().issued) == 2


@pytest.mark.parametrize(
    ("csr", "reason"),
    [
        pytest.param(make_csr(key_named("a thief"), NODE_ID), "not for", id="another key"),
        pytest.param(make_csr(KEY, OTHER_NODE_ID), "not for", id="another node"),
        pytest.param(make_csr(key_named("a thief"), OTHER_NODE_ID), "not for", id="another node and key"),
        pytest.param(CSR.replace("\nM", "\nN", 1), "not_a_request", id="damaged"),
        pytest.param("", "not_a_request", id="nothing"),
        pytest.param("\x1b[31m\ud800", "not_a_request", id="hostile"),
    ],
)
async def test_a_request_that_is_not_this_nodes_own_is_refused_and_leaves_nothing(
    stage: RenewalStage, csr: str, reason: str
) -> None:
    stage.until_due()
    error = await refused(stage.renewals.renew(stage.identity, csr), Failure.ATTESTATION_FAILED)
    assert str(stage.ca.root_file.parent) not in str(error)
    (line,) = stage.hub.lines.entries("renewal refused")
    assert line["node_id"] == NODE_ID
    assert reason in line["reason"]
    assert line["reason"].isprintable()
    assert len(stage.ca.records().issued) == 1
    assert stage.events() == []


async def test_a_revoked_node_is_not_renewed(stage: RenewalStage) -> None:
    stage.until_due()
    stage.ca.revoke(NODE_ID)
    await refused(stage.renewals.renew(stage.identity, CSR), Failure.ATTESTATION_FAILED)
    assert stage.ca.in_force() == {}


async def test_a_node_with_several_leaves_is_renewed_while_one_is_in_force(stage: RenewalStage) -> None:
    stage.until_due()
    await stage.renewals.renew(stage.identity, CSR)
    stage.ca.revoke(stage.identity.kid)
    stage.hub.clock.advance(HOUR_MS)
    issued = await stage.renewals.renew(stage.identity, CSR)
    assert stage.believed(issued["certificate"]).node_id == NODE_ID


@pytest.mark.parametrize("spoilt", ["ledger.jsonl", "root.key", "root.pem"])
async def test_a_ca_that_is_damaged_renews_no_leaf_and_shows_no_file_to_the_node(
    stage: RenewalStage, spoilt: str
) -> None:
    stage.until_due()
    stage.ca.root_file.with_name(spoilt).write_text("damaged\n")
    error = await refused(stage.renewals.renew(stage.identity, CSR), Failure.INTERNAL)
    assert spoilt not in str(error)
    assert spoilt in stage.hub.lines.entries("renewal failed")[0]["reason"]


async def test_a_node_that_asks_is_told_the_roots_of_servers_and_others_are_not(stage: RenewalStage) -> None:
    stage.until_due()
    told = await stage.renewals.renew(stage.identity, CSR, server_roots=True)
    assert told["server_roots"] == "".join(stage.ca.servers.roots())
    known = [der for root in stage.ca.roots() for der in certificates_in(root)]
    assert are_endorsed(certificates_in(told["server_roots"]), known, told["server_endorsements"])
    stage.hub.clock.advance(3_600_000)
    assert "server_roots" not in await stage.renewals.renew(stage.identity, CSR)


async def test_a_renewal_that_failed_here_can_be_repeated_at_once(stage: RenewalStage) -> None:
    stage.until_due()
    ledger = stage.ca.root_file.with_name("ledger.jsonl")
    with full_disk(ledger.stat().st_size):
        await refused(stage.renewals.renew(stage.identity, CSR), Failure.INTERNAL)
    await stage.renewals.renew(stage.identity, CSR)


async def test_without_a_ca_no_leaf_is_renewed(stage: RenewalStage) -> None:
    stage.until_due()
    renewals = Renewals(OwnLeaves(NoAuthority()), stage.hub.audit, stage.hub.clock, stage.hub.log)
    await refused(renewals.renew(stage.identity, CSR), Failure.INTERNAL)


async def test_what_cannot_be_recorded_is_not_handed_out(stage: RenewalStage) -> None:
    stage.until_due()
    stage.hub.audit.write(event="before")
    # The ledger of a real CA would not take the entry either: this disk is the audit's alone.
    leaf, roots = stage.ca.renew(CSR, NODE_ID), stage.ca.roots()

    class Elsewhere(NoAuthority):
        def renew(self, csr_pem: str, node_id: str) -> str:
            assert (csr_pem, node_id) == (CSR, NODE_ID)
            return leaf

        def roots(self) -> list[str]:
            return roots

        def revoke(self, target: str, reason: str = "revoked") -> list[str]:
            assert (target, reason) == (NODE_ID, "retired")
            return [stage.identity.kid]

    renewals = Renewals(OwnLeaves(Elsewhere()), stage.hub.audit, stage.hub.clock, stage.hub.log)
    with full_disk(stage.hub.audit_file.stat().st_size):
        await refused(renewals.renew(stage.identity, CSR), Failure.INTERNAL)
        await refused(renewals.retire(stage.identity), Failure.INTERNAL)
    assert stage.hub.lines.entries("renewed") == []


class Slow(NoAuthority):
    """A CA whose ledger another process locks until the test releases it."""

    def __init__(self, answer: Callable[[], str]) -> None:
        self.free = Event()
        self.inside = 0
        self.most = 0
        self._answer = answer

    def renew(self, csr_pem: str, node_id: str) -> str:
        assert csr_pem
        assert node_id
        self.inside += 1
        self.most = max(self.most, self.inside)
        assert self.free.wait(BOUND_S)
        self.inside -= 1
        return self._answer()


async def test_the_event_loop_goes_on_while_a_ca_waits_and_few_threads_wait_with_it(
    stage: RenewalStage,
) -> None:
    leaf = stage.ca.issue(make_csr(KEY, OTHER_NODE_ID), TENANT)
    slow = Slow(lambda: leaf)
    renewals = Renewals(OwnLeaves(slow), stage.hub.audit, stage.hub.clock, stage.hub.log)
    stage.until_due()
    identities = [
        Identity(f"{number:026d}", TENANT, "ab" * 32, bytes(32), 0, 2, "", "", 0) for number in range(20)
    ]
    tasks = [asyncio.create_task(renewals.renew(identity, CSR)) for identity in identities]
    async with asyncio.timeout(BOUND_S):
        while slow.inside < 4:  # noqa: ASYNC110 - the threads have no event
            await asyncio.sleep(0)
    assert not any(task.done() for task in tasks)
    slow.free.set()
    await asyncio.wait_for(asyncio.gather(*tasks), BOUND_S)
    assert slow.most == 4


# --- retiring -----------------------------------------------------------------------------------------


async def test_a_node_that_retires_loses_every_leaf_and_the_audit_names_them(stage: RenewalStage) -> None:
    stage.until_due()
    second = stage.believed((await stage.renewals.renew(stage.identity, CSR))["certificate"])
    await stage.renewals.retire(second)
    assert stage.ca.revoked_kids() == {stage.identity.kid, second.kid}
    assert stage.ca.in_force() == {}
    assert stage.events()[1:] == [
        ("retired", NODE_ID, TENANT, stage.identity.kid),
        ("retired", NODE_ID, TENANT, second.kid),
    ]
    ledger = stage.ca.root_file.with_name("ledger.jsonl").read_text()
    assert ledger.count('"reason":"retired"') == 2


async def test_retiring_twice_is_as_good_as_once(stage: RenewalStage) -> None:
    await stage.renewals.retire(stage.identity)
    await stage.renewals.retire(stage.identity)
    assert len(stage.events()) == 1


async def test_a_node_that_the_ca_never_heard_of_cannot_retire(stage: RenewalStage) -> None:
    other_node = Identity(OTHER_NODE_ID, TENANT, "ab" * 32, bytes(32), 0, 1, "", "", 0)
    error = await refused(stage.renewals.retire(other_node), Failure.ATTESTATION_FAILED)
    assert OTHER_NODE_ID not in str(error)
    assert stage.hub.lines.entries("retirement refused")[0]["node_id"] == OTHER_NODE_ID
    assert stage.events() == []


async def test_without_a_ca_no_node_retires(stage: RenewalStage) -> None:
    renewals = Renewals(OwnLeaves(NoAuthority()), stage.hub.audit, stage.hub.clock, stage.hub.log)
    await refused(renewals.retire(stage.identity), Failure.INTERNAL)


async def test_no_node_retires_while_the_ledger_cannot_be_written(stage: RenewalStage) -> None:
    ledger = stage.ca.root_file.with_name("ledger.jsonl")
    with full_disk(ledger.stat().st_size):
        await refused(stage.renewals.retire(stage.identity), Failure.INTERNAL)
    assert stage.ca.revoked_kids() == frozenset()
