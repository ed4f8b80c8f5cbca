import sys
from pathlib import Path

import pytest

import kubelet.session.renewal
from kubelet.session.renewal import AGAIN_AFTER_MS, Renewal, installer
from relay.settings.environment import now_ms
from schemas.certificates import endorse, make_csr, read_csr, self_signed_leaf
from schemas.identity_files import IdentityFiles
from schemas.payloads import ErrorEnvelope, RenewDone, Renewed
from schemas.process.logs import make_logger
from tests.fakes.clock import FakeClock
from tests.fakes.lines import LogLines
from tests.fakes.node import write_identity
from tests.fakes.signer import DAY_MS, NODE_ID, NOW_MS, SimulatedCa, SimulatedNode

LEAF_LIFE_MS = 90 * DAY_MS + 300_000  # it begins five minutes before it was issued
DUE_MS = NOW_MS - 300_000 + LEAF_LIFE_MS * 2 // 3


class Bench:
    """A renewal around files, whose installing a test plays.

    Attributes:
        refusal: why nothing is installed; None when it is.
        announced: the kid of the leaf in use, whenever it was to be announced with.
    """

    def __init__(self, files: IdentityFiles) -> None:
        self.files = files
        self.identity = files.read()
        self.clock = FakeClock(NOW_MS)
        self.log = LogLines()
        self.installed: list[Renewed] = []
        self.announced: list[str] = []
        self.refusal: str | None = None
        log = make_logger("kubelet", self.log)
        ticks = self.clock.ticks_ms
        self.renewal = Renewal(self.identity, files, self._install, self._renewed, self.clock, ticks, log)

    async def _install(self, payload: Renewed) -> str | None:
        self.installed.append(payload)
        if self.refusal is None:
            self.files.install(payload["certificate"], payload["roots"])
        return self.refusal

    def _renewed(self) -> None:
        self.announced.append(self.identity.kid)


@pytest.fixture
def files(tmp_path: Path, node: SimulatedNode) -> IdentityFiles:
    files = write_identity(tmp_path / "state", node)
    files.csr.write_text(make_csr(node.key, node.node_id))
    return files


@pytest.fixture
def bench(files: IdentityFiles) -> Bench:
    return Bench(files)


def issued(node: SimulatedNode, ca: SimulatedCa) -> tuple[SimulatedNode, RenewDone]:
    """Return the node with a new leaf, and the answer that brings it."""
    fresh = ca.issue(node.node_id, key=node.key)
    return fresh, {"ok": True, "certificate": fresh.leaf_pem, "roots": ca.root_pem}


# --- when it asks -------------------------------------------------------------------------------------


def test_a_leaf_is_asked_for_from_two_thirds_of_the_life_of_the_one_before(bench: Bench) -> None:
    bench.clock.now_ms = DUE_MS - 1
    assert bench.renewal.request(server_roots=True) is None
    bench.clock.advance(1)
    asked = bench.renewal.request(server_roots=True)
    assert asked is not None
    assert asked.keys() == {"csr", "server_roots"}
    assert read_csr(asked["csr"]) == (NODE_ID, bytes(bench.identity.key.verify_key))


def test_it_asks_once_an_hour_and_goes_on_asking(bench: Bench) -> None:
    bench.clock.now_ms = DUE_MS
    for _ in range(3):
        assert bench.renewal.request(server_roots=True) is not None
        bench.clock.advance(AGAIN_AFTER_MS - 1)
        assert bench.renewal.request(server_roots=True) is None
        bench.clock.advance(1)


def test_a_clock_that_was_ahead_for_a_moment_does_not_end_the_requests(bench: Bench) -> None:
    ahead_ms = 3650 * DAY_MS
    bench.clock.step(ahead_ms)
    assert bench.renewal.request(server_roots=True) is not None
    bench.clock.step(-ahead_ms)
    assert bench.renewal.request(server_roots=True) is None
    bench.clock.advance(DUE_MS - bench.clock.now_ms)
    assert bench.renewal.request(server_roots=True) is not None


def test_it_asks_though_the_leaf_has_run_out(bench: Bench) -> None:
    bench.clock.now_ms = NOW_MS + 2 * LEAF_LIFE_MS
    assert bench.renewal.request(server_roots=True) is not None


def test_a_leaf_of_its_own_making_is_never_renewed(tmp_path: Path, node: SimulatedNode) -> None:
    files = IdentityFiles(tmp_path / "state")
    leaf = self_signed_leaf(node.key, NODE_ID, NOW_MS, 90, 5)
    files.write(NODE_ID, node.key, leaf, make_csr(node.key, NODE_ID))
    bench = Bench(files)
    bench.clock.now_ms = NOW_MS + LEAF_LIFE_MS
    assert bench.renewal.request(server_roots=True) is None


@pytest.mark.parametrize("content", [None, b"\xff\xfe"], ids=["missing", "no text"])
def test_a_request_that_cannot_be_read_is_said_once_an_hour_and_stops_nothing(
    bench: Bench, content: bytes | None
) -> None:
    bench.files.csr.unlink()
    if content is not None:
        bench.files.csr.write_bytes(content)
    bench.clock.now_ms = DUE_MS
    for _ in range(3):
        assert bench.renewal.request(server_roots=True) is None
    (line,) = bench.log.entries("the leaf cannot be renewed")
    assert line["level"] == "error"
    bench.clock.advance(AGAIN_AFTER_MS)
    assert bench.renewal.request(server_roots=True) is None
    assert len(bench.log.entries("the leaf cannot be renewed")) == 2


# --- what it is answered ------------------------------------------------------------------------------


async def test_a_new_leaf_is_put_in_place_and_then_announced_with(
    bench: Bench, node: SimulatedNode, ca: SimulatedCa
) -> None:
    fresh, answer = issued(node, ca)
    await bench.renewal.answered(answer)
    assert bench.installed == [answer]
    assert bench.identity.kid == fresh.kid != node.kid
    assert bench.identity.chain_pem == fresh.leaf_pem + node.leaf_pem + ca.root_pem
    assert bench.announced == [fresh.kid]
    assert bench.log.entries("leaf renewed")[0]["kid"] == fresh.kid


async def test_after_a_renewal_it_asks_again_when_the_new_leaf_is_due(
    bench: Bench, node: SimulatedNode, ca: SimulatedCa
) -> None:
    bench.clock.now_ms = DUE_MS
    assert bench.renewal.request(server_roots=True) is not None
    fresh = ca.issue(key=node.key, now_ms=DUE_MS)
    answer: RenewDone = {"ok": True, "certificate": fresh.leaf_pem, "roots": ca.root_pem}
    await bench.renewal.answered(answer)
    bench.clock.now_ms = DUE_MS - 300_000 + LEAF_LIFE_MS * 2 // 3 - 1
    assert bench.renewal.request(server_roots=True) is None
    bench.clock.advance(1)
    assert bench.renewal.request(server_roots=True) is not None


async def test_a_relay_that_does_not_renew_is_in_the_log_and_the_old_leaf_serves(bench: Bench) -> None:
    before = bench.identity.chain_pem
    error: ErrorEnvelope = {
        "code": "E_RATE_LIMITED",
        "message": "\x1b[31mNo",
        "suggested_fix": "x",
        "retry_after_ms": 5,
    }
    await bench.renewal.answered({"ok": False, "error": error})
    assert bench.log.entries("relay does not renew the leaf")[0]["code"] == "E_RATE_LIMITED"
    assert "\\u001b" not in bench.log.getvalue()
    assert (bench.installed, bench.announced, bench.identity.chain_pem) == ([], [], before)


async def test_a_leaf_that_is_not_accepted_changes_nothing(
    bench: Bench, node: SimulatedNode, ca: SimulatedCa
) -> None:
    before = bench.identity.chain_pem
    bench.refusal = "not accepted: \x1b[31mchain"
    await bench.renewal.answered(issued(node, ca)[1])
    (line,) = bench.log.entries("the new leaf is not accepted")
    assert line["reason"].isprintable()
    assert (bench.announced, bench.identity.chain_pem) == ([], before)


async def test_a_leaf_that_cannot_be_read_back_changes_nothing(
    bench: Bench, node: SimulatedNode, ca: SimulatedCa
) -> None:
    before = bench.identity.chain_pem
    bench.files.key.chmod(0o644)
    await bench.renewal.answered(issued(node, ca)[1])
    assert bench.log.entries("the new leaf cannot be read")
    assert (bench.announced, bench.identity.chain_pem) == ([], before)


# --- putting it in place, in a process ----------------------------------------------------------------


@pytest.fixture
def todays(tmp_path: Path, ca_of_today: SimulatedCa) -> IdentityFiles:
    return write_identity(tmp_path / "today", ca_of_today.issue(now_ms=now_ms()))


# What is verified there: tests/kubelet/identity/test_install.py.
@pytest.mark.integration
async def test_what_is_not_believed_has_a_reason_of_one_line_and_an_endorsement_is_handed_on(
    todays: IdentityFiles, ca_of_today: SimulatedCa
) -> None:
    own, new = todays.read(), SimulatedCa("root of tomorrow", now_ms())
    fresh = new.issue(own.node_id, key=own.key, now_ms=now_ms())
    answer: RenewDone = {"ok": True, "certificate": fresh.leaf_pem, "roots": new.root_pem}
    reason = await installer(todays)(answer)
    assert reason is not None
    assert "nor endorsed" in reason
    assert "\n" not in reason
    assert todays.read().chain_pem == own.chain_pem
    endorsed: RenewDone = {**answer, "endorsement": endorse(ca_of_today.key, new.root_pem)}
    assert await installer(todays)(endorsed) is None
    assert (todays.read().kid, todays.read().root_pem) == (fresh.kid, new.root_pem)


@pytest.mark.integration
async def test_a_process_that_takes_too_long_is_ended(
    todays: IdentityFiles, ca_of_today: SimulatedCa, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubelet.session.renewal, "_INSTALL_TIMEOUT_S", 0)
    own = todays.read()
    fresh = ca_of_today.issue(own.node_id, key=own.key, now_ms=now_ms())
    answer: Renewed = {"certificate": fresh.leaf_pem, "roots": ca_of_today.root_pem}
    assert await installer(todays)(answer) == "it took too long"
    assert todays.read().kid == own.kid


@pytest.mark.integration
async def test_a_process_that_cannot_be_started_is_a_reason_too(
    todays: IdentityFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    reason = await installer(todays)({"certificate": "", "roots": ""})
    assert reason is not None
    assert "/nowhere/python" in reason
