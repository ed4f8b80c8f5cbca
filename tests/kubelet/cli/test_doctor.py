"""Every check of ``kubelet doctor``, green on a node that works and red on one where its thing is broken."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kubelet.cli.doctor import CHECKS, NodeChecks
from kubelet.config import NodeConfig
from kubelet.identity.provisioning import create_identity
from kubelet.settings import KUBELET
from relay.settings.environment import now_ms
from schemas.addresses import BrokerAddress
from schemas.frames import SUBPROTOCOL, SUBPROTOCOLS, FrameReader
from schemas.identity_files import IdentityFiles
from schemas.manifest import etag_of
from schemas.process.doctor import Finding, Severity
from schemas.process.doctor import made as made_of
from schemas.process.status_view import AskedProcess
from schemas.settings import Given, Settings
from tests.fakes.broker import Broker
from tests.fakes.daemon import NO_BROKER, NO_RELAY, Daemon, daemon
from tests.fakes.lines import LogLines
from tests.fakes.played_relay import PlayedRelay, RelayEnd
from tests.fakes.raw_http_server import RawServer, http_answer
from tests.fakes.signer import DAY_MS, NODE_ID, SimulatedCa

pytestmark = pytest.mark.integration

SKIPPED, OK, WARNING, FAILURE = Severity
ECHO: dict[str, Any] = {"tool": f"sysecho.{NODE_ID}.echo.invoke", "arguments": {"message": "echo"}}
ERROR = {"code": "E_MANIFEST_INVALID", "message": "old", "suggested_fix": "sign anew"}
NAMES = [
    "process",
    "keys",
    "certificate",
    "chain",
    "relay",
    "clock",
    "broker",
    "session",
    "announce",
    "echo",
    "kinds",
    "files",
    "watchdog",
]


@pytest.fixture
def checks(enrolled: IdentityFiles) -> NodeChecks:
    """The checks of a node whose daemon does not run, with neither relay nor broker."""
    expected = Settings(KUBELET.table, [{"state_dir": Given(str(enrolled.root), "--state-dir")}])
    process = AskedProcess.ask(KUBELET, enrolled.root)
    return NodeChecks(NodeConfig(NO_BROKER, NO_RELAY), process, expected, enrolled, now_ms)


async def made(checks: NodeChecks, name: str) -> Finding:
    """Make one check anew of the daemon that runs now, on a thread as it blocks."""

    def look() -> Finding:
        process = AskedProcess.ask(KUBELET, checks.files.root)
        (row,) = (row for row in CHECKS if row.name == name)
        return made_of(row, replace(checks, process=process))

    return await asyncio.to_thread(look)


def test_each_check_has_an_explanation() -> None:
    assert [row.name for row in CHECKS] == NAMES
    assert all(len(row.explanation) > 50 for row in CHECKS)


# --- what lies on this machine ----------------------------------------------------------------------------


async def test_a_key_that_others_can_read_is_found(checks: NodeChecks, enrolled: IdentityFiles) -> None:
    assert (await made(checks, "keys")).severity is OK
    enrolled.key.chmod(0o644)
    finding = await made(checks, "keys")
    assert (finding.severity, "chmod 600" in finding.found) == (FAILURE, True)


@pytest.mark.parametrize(("days", "severity"), [(0, OK), (80, WARNING), (91, FAILURE)])
async def test_a_leaf_that_ends_is_found(checks: NodeChecks, days: int, severity: Severity) -> None:
    later = replace(checks, now_ms=lambda: now_ms() + days * DAY_MS)
    assert (await made(later, "certificate")).severity is severity


async def test_a_leaf_of_another_root_is_found(checks: NodeChecks, enrolled: IdentityFiles) -> None:
    assert (await made(checks, "chain")).found == "the leaf is the root's, for tenant acme"
    enrolled.root_certificate.write_text(SimulatedCa("another", now_ms()).root_pem)
    assert (await made(checks, "chain")).severity is FAILURE


async def test_a_leaf_that_no_ca_has_issued_is_found(tmp_path: Path, checks: NodeChecks) -> None:
    own = IdentityFiles(tmp_path / "own")
    create_identity(own, now_ms(), bytes)
    finding = await made(replace(checks, files=own), "chain")
    assert (finding.severity, finding.fix) == (FAILURE, "enrol with `edge-kubelet enroll`")


async def test_a_node_without_identity_fails_and_is_told_so(tmp_path: Path, checks: NodeChecks) -> None:
    nothing = replace(checks, files=IdentityFiles(tmp_path / "nothing"))
    finding = await made(nothing, "certificate")
    assert (finding.severity, "run `edge-kubelet init`" in finding.found) == (FAILURE, True)
    for name in ("chain", "broker"):
        finding = await made(nothing, name)
        assert finding == Finding(SKIPPED, "not checked: the node's identity cannot be used")


# --- the relay and the broker -----------------------------------------------------------------------------


def http_relay(**headers: str) -> AbstractAsyncContextManager[RawServer]:
    return RawServer.running(http_answer(200, b"", **headers))


def with_relay(checks: NodeChecks, url: str) -> NodeChecks:
    return replace(checks, config=replace(checks.config, relay_url=url))


def with_broker(checks: NodeChecks, broker: BrokerAddress) -> NodeChecks:
    return replace(checks, config=replace(checks.config, broker=broker))


SEES = {"announced": True, "lacks": None}
HIDDEN = {"announced": True, "lacks": "processes of other users are hidden"}
NO_SYSTEMD = {"announced": False, "lacks": "systemd does not run"}
NOT_KNOWN = {"announced": False, "lacks": "its relay does not know it", "relay": False}


@pytest.mark.parametrize(
    ("kinds", "severity", "found", "fix"),
    [
        ({"system.echo": SEES}, OK, "1 kind", ""),
        (
            {"linux.units": NO_SYSTEMD, "linux.health": NO_SYSTEMD},
            OK,
            "2 kinds; linux.units, linux.health: systemd does not run",
            "",
        ),
        (
            {"linux.processes": HIDDEN, "system.echo": SEES},
            WARNING,
            "2 kinds; linux.processes: processes of other users are hidden",
            "sudo kubelet kinds enable linux.processes",
        ),
        (
            {"linux.journal": NOT_KNOWN, "linux.processes": HIDDEN},
            WARNING,
            f"2 kinds; linux.journal: {NOT_KNOWN['lacks']}; linux.processes: {HIDDEN['lacks']}",
            "name them in kinds of relay.toml: linux.journal",
        ),
    ],
)
def test_what_a_kind_does_not_see_is_told_with_what_lets_it_see(
    checks: NodeChecks, kinds: dict[str, Any], severity: Severity, found: str, fix: str
) -> None:
    running = AskedProcess(KUBELET, checks.files.root, {"kinds": kinds})
    (row,) = (row for row in CHECKS if row.name == "kinds")
    finding = made_of(row, replace(checks, process=running))
    assert (finding.severity, finding.found, finding.fix or "") == (severity, found, fix)


async def test_a_relay_that_is_not_reached_is_found(checks: NodeChecks) -> None:
    async with http_relay() as relay:
        assert (await made(with_relay(checks, relay.url), "relay")).severity is OK
    assert (await made(checks, "relay")).severity is FAILURE


async def test_one_relay_of_several_that_is_not_reached_is_a_warning(checks: NodeChecks) -> None:
    gone = checks.config.relay_url
    async with http_relay() as relay:
        several = replace(checks, config=replace(checks.config, other_relays=(relay.url,)))
        finding = await made(several, "relay")
        assert finding.severity is WARNING
        assert finding.found.startswith(f"{gone} is not reached")
        assert (await made(several, "clock")).severity is WARNING  # its answer has no date
    several = replace(checks, config=replace(checks.config, other_relays=(f"{gone}9",)))
    assert (await made(several, "relay")).severity is FAILURE


async def test_a_clock_that_is_wrong_is_found(checks: NodeChecks) -> None:
    noon = 1_763_812_800_000
    async with http_relay(Date="Sat, 22 Nov 2025 12:00:00 GMT") as relay:
        here = with_relay(checks, relay.url)
        found = [
            (await made(replace(here, now_ms=lambda ms=ms: noon + ms), "clock")).severity  # type: ignore[misc]
            for ms in (0, 60_000, 600_000)
        ]
    assert found == [OK, WARNING, FAILURE]
    async with http_relay() as relay:
        assert (await made(with_relay(checks, relay.url), "clock")).severity is WARNING
    assert await made(checks, "clock") == Finding(SKIPPED, "not checked: no relay is reached")


async def test_a_time_that_an_earlier_clock_has_left_is_found(checks: NodeChecks) -> None:
    noon = 1_763_812_800_000
    file = checks.files.root / "last_issued_ms"
    found: list[Finding] = []
    async with http_relay(Date="Sat, 22 Nov 2025 12:00:00 GMT") as relay:
        here = replace(with_relay(checks, relay.url), now_ms=lambda: noon)
        for ahead_ms in (10_000, 100 * DAY_MS):
            file.write_text(f"{noon + ahead_ms}\n")
            found.append(await made(here, "clock"))
    assert [finding.severity for finding in found] == [OK, WARNING]
    assert "signed by a clock 144000 min ahead" in found[1].found
    assert str(file) in found[1].fix


async def test_a_broker_that_is_not_there_or_refuses_what_is_published_is_found(
    checks: NodeChecks, broker: BrokerAddress, broker_kind: str, tmp_path: Path
) -> None:
    assert (await made(with_broker(checks, broker), "broker")).severity is OK
    assert (await made(checks, "broker")).severity is FAILURE
    mute = Broker(broker_kind, tmp_path, mute=True)
    mute.start()
    try:
        finding = await made(with_broker(checks, mute.address), "broker")
    finally:
        mute.stop()
    # nats-server confirms it all the same: `announce` finds that.
    assert finding.severity is (FAILURE if broker_kind == "mosquitto" else OK)


# --- what the daemon tells --------------------------------------------------------------------------------


class Site:
    """A daemon, and the relay that a test plays to it."""

    def __init__(self, checks: NodeChecks, running: Daemon, end: RelayEnd) -> None:
        self.checks = checks
        self.running = running
        self.end = end


@asynccontextmanager
async def site(
    checks: NodeChecks, log: LogLines, reader: FrameReader, broker: BrokerAddress, *subprotocols: str
) -> AsyncIterator[Site]:
    relay = PlayedRelay(reader, subprotocols=subprotocols or SUBPROTOCOLS)
    async with relay.running(), daemon(checks.files.root, log, broker, relay.url) as running:
        end = await relay.next()
        await end.admit()
        yield Site(with_relay(checks, relay.url), running, end)


async def acknowledge_two_heartbeats(end: RelayEnd) -> None:
    announce = await end.receive("announce")
    beat = await end.receive("heartbeat")
    await end.send("heartbeat_ack", answers=beat.msg_id)
    # It announces itself anew, and sends another heartbeat with it.
    rejected = {"ok": False, "error": ERROR, "mark_issued_at_ms": announce.payload["issued_at_ms"]}
    await end.send_payload("announce_ack", rejected, answers=announce.msg_id)
    await end.accept()
    beat = await end.receive("heartbeat")
    await end.send("heartbeat_ack", answers=beat.msg_id)
    await end.command(**ECHO)


async def test_a_daemon_that_does_not_run_is_found_once(checks: NodeChecks) -> None:
    finding = await made(checks, "process")
    assert (finding.severity, "nothing runs" in finding.found) == (FAILURE, True)
    for name in ("session", "announce", "echo", "files", "watchdog"):
        finding = await made(checks, name)
        assert finding == Finding(SKIPPED, "not checked: the kubelet does not run")


async def test_what_the_daemon_lacks_of_calls_that_flow_is_found_step_by_step(
    checks: NodeChecks, log: LogLines, reader: FrameReader, broker: BrokerAddress
) -> None:
    async with site(checks, log, reader, broker) as here:

        async def severities() -> list[Severity]:
            return [(await made(here.checks, name)).severity for name in ("session", "announce", "echo")]

        assert await severities() == [FAILURE, WARNING, FAILURE]
        announce = await here.end.accept()
        beat = await here.end.receive("heartbeat")
        await here.running.until_relay_is("announced")
        await log.until("broker connected")
        assert await severities() == [OK, WARNING, FAILURE]
        await here.end.command(**ECHO)
        await here.running.until_ready()
        assert await severities() == [OK, WARNING, OK]
        # The relay names what another has published for this node.
        await here.end.send("heartbeat_ack", answers=beat.msg_id, broker_etag=etag_of(b"forged"))
        await here.end.command(**ECHO)
        finding = await made(here.checks, "announce")
        assert (finding.severity, "another announce" in finding.found) == (FAILURE, True)
        assert announce.payload["node_id"] == NODE_ID
        assert [(await made(here.checks, name)).severity for name in ("files", "watchdog")] == [OK, OK]


async def test_a_broker_by_which_the_relay_receives_nothing_is_found(
    checks: NodeChecks, log: LogLines, reader: FrameReader, broker: BrokerAddress
) -> None:
    async with site(checks, log, reader, broker) as here:
        await acknowledge_two_heartbeats(here.end)
        await log.until("broker connected")
        finding = await made(here.checks, "announce")
        assert (finding.severity, "no announce" in finding.found) == (FAILURE, True)


async def test_a_broker_that_is_away_is_a_warning_while_calls_flow(
    checks: NodeChecks, log: LogLines, reader: FrameReader
) -> None:
    async with site(checks, log, reader, NO_BROKER) as here:
        assert (await made(here.checks, "broker")).severity is FAILURE
        await acknowledge_two_heartbeats(here.end)
        await here.running.until_ready()
        assert [(await made(here.checks, name)).severity for name in ("broker", "announce")] == [WARNING] * 2


async def test_what_the_relay_receives_by_the_broker_is_what_is_published(
    checks: NodeChecks, log: LogLines, reader: FrameReader, broker: BrokerAddress
) -> None:
    async with site(checks, log, reader, broker) as here:
        announce = await here.end.accept()
        beat = await here.end.receive("heartbeat")
        await log.until("broker connected")
        await here.end.send("heartbeat_ack", answers=beat.msg_id, broker_etag=etag_of(announce.wire))
        await here.end.command(**ECHO)
        assert (await made(here.checks, "announce")).severity is OK


async def test_with_a_relay_of_the_version_before_two_things_are_not_known(
    checks: NodeChecks, log: LogLines, reader: FrameReader
) -> None:
    async with site(checks, log, reader, NO_BROKER, SUBPROTOCOL) as here:
        await here.end.accept()
        await here.running.until_ready()
        assert [(await made(here.checks, name)).severity for name in ("announce", "echo")] == [WARNING] * 2
