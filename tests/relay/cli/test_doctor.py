"""``relay doctor`` of a relay that runs, with its own broker over TLS, as its operator types it."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest

from relay.cli.cluster import set_up
from relay.cli.doctor import CHECKS, RelayChecks
from relay.fleet.facts import NodeWarnings
from relay.observability.metrics import Metrics
from relay.pki.authority import CertificateAuthority
from relay.pki.relay_tls import cluster_certificate, served_certificate
from relay.settings.config import AuditKeep, ClusterConfig, ClusterServer, RelayConfig, TlsFiles
from relay.settings.environment import now_ms
from relay.settings.table import RELAY
from schemas.addresses import BrokerAddress, HostPort
from schemas.identity import first_certificate_in, validity_of
from schemas.process.doctor import Finding, Severity
from schemas.process.doctor import made as made_of
from schemas.process.status_socket import served
from schemas.process.status_view import AskedProcess
from schemas.settings import Given, Settings
from schemas.times import SystemMs, iso
from tests.fakes.broker import Broker
from tests.fakes.environment import config
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.signer import NODE_ID, NOW_MS
from tests.fakes.small_fleet import SmallFleet, small_fleet

pytestmark = pytest.mark.integration


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[SmallFleet]:
    async with small_fleet(tmp_path, secure=True) as fleet:
        await fleet.start_relay(*fleet.listening)
        await fleet.until_ready()
        yield fleet


async def doctor(fleet: SmallFleet, *options: str) -> tuple[int, Mapping[str, dict[str, Any]]]:
    """Return the exit code, and what each check that is not well has found."""
    command = [sys.executable, "-P", "-m", "relay", "doctor", "--json", "--state-dir", str(fleet.state.root)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RELAY_")}
    ended = await asyncio.to_thread(
        subprocess.run,
        [*command, *options],
        env={**plain, "RELAY_CONFIG": ""},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    found = {line["check"]: line for line in map(json.loads, ended.stdout.splitlines())}
    return ended.returncode, {name: line for name, line in found.items() if line["severity"] != "ok"}


def severities(found: Mapping[str, dict[str, Any]]) -> dict[str, str]:
    return {name: line["severity"] for name, line in found.items()}


@pytest.mark.long
async def test_a_relay_is_checked_with_the_settings_that_it_runs_with(fleet: SmallFleet) -> None:
    code, found = await doctor(fleet)
    # What is kept needs no option: the public URL, where the broker listens, where and how the relay serves.
    assert (code, severities(found)) == (0, {})
    listen = f"127.0.0.1:{fleet.port}"
    code, found = await doctor(fleet, "--tls-own", "--listen", listen)
    assert (code, severities(found)) == (0, {})
    code, found = await doctor(fleet, "--tls-own", "--listen", listen, "--agent-rps", "7")
    assert found["process"]["found"] == "settings that are not in effect: agent_rps (--agent-rps)"


@pytest.mark.long
async def test_a_check_looks_in_the_log_like_neither_a_fault_nor_an_attack(fleet: SmallFleet) -> None:
    await doctor(fleet)
    await until(lambda: fleet.log("the broker refuses what relay doctor tries, as it should"))
    lines = fleet.processes.log("relay").read_text("utf-8").splitlines()
    entries = [json.loads(line) for line in lines if line.startswith("{")]
    assert [entry for entry in entries if entry["level"] != "info"] == []


SKIPPED, OK, WARNING, FAILURE = Severity
UP = {"started": True, "live": True, "ready": True}
STATUS: dict[str, Any] = {
    "settings": {"tls_own": {"text": "true", "source": "--tls-own"}},
    "subsystems": {
        "audit": UP,
        "broker": UP,
        "clock": UP,
        "calls": {**UP, "state": "10 of 10 canaries answered"},
    },
    "nodes": NodeWarnings(Metrics()).status(known=3, connected=3),
    "broker": {"missing": 0},
    "open_files": 30,
    "max_open_files": 1024,
    "watchdog_s": 30.0,
}


def issue(files: TlsFiles, authority: CertificateAuthority) -> None:
    """Have what the relay serves with issued by ``authority``."""
    served_certificate(files, authority.servers, "edge-relay", ["127.0.0.1"], now_ms, os.urandom).renew()


@pytest.fixture
def wanted(tmp_path: Path) -> RelayConfig:
    """The configuration of a relay that serves TLS by its own CA, which is there."""
    plain = config(tmp_path)
    url = f"https://127.0.0.1:{unused_port()}"
    return replace(plain, public_url=url, tls=plain.state.own_tls, own_root=True)


@pytest.fixture
def checks(wanted: RelayConfig) -> RelayChecks:
    authority = CertificateAuthority(wanted.state.ca, now_ms, os.urandom)
    authority.create()
    issue(wanted.state.own_tls, authority)
    expected = Settings(RELAY.table, [{"state_dir": Given(str(wanted.state.root), "--state-dir")}])
    process = AskedProcess.ask(RELAY, wanted.state.root)
    return RelayChecks(wanted, process, expected, authority, now_ms, lambda: NODE_ID)


async def made(checks: RelayChecks, name: str) -> Finding:
    """Make one check anew of the relay that runs now, on a thread as it blocks."""

    def look() -> Finding:
        process = AskedProcess.ask(RELAY, checks.config.state.root)
        (row,) = (row for row in CHECKS if row.name == name)
        return made_of(row, replace(checks, process=process))

    return await asyncio.to_thread(look)


def changed(status: Mapping[str, Any], *path: str, to: Any) -> dict[str, Any]:
    """Return ``status`` with another value at ``path``."""
    first, *rest = path
    return {**status, first: changed(status[first], *rest, to=to) if rest else to}


def test_each_check_has_an_explanation() -> None:
    assert all(len(row.explanation) > 50 for row in CHECKS)


async def test_a_key_that_others_can_read_is_found(checks: RelayChecks) -> None:
    assert (await made(checks, "keys")).severity is OK
    (checks.config.state.ca / "root.key").chmod(0o640)
    finding = await made(checks, "keys")
    assert (finding.severity, "chmod 600" in finding.found) == (FAILURE, True)


@pytest.mark.parametrize(("part", "severity"), [(0.1, OK), (0.9, WARNING), (1.1, FAILURE)])
async def test_a_certificate_that_ends_is_found(checks: RelayChecks, part: float, severity: Severity) -> None:
    pem = checks.config.state.own_tls.certificate.read_text()
    begin_ms, end_ms = validity_of(first_certificate_in(pem))
    later = replace(checks, now_ms=lambda: SystemMs(int(begin_ms + part * (end_ms - begin_ms))))
    assert (await made(later, "certificates")).severity is severity


async def test_the_root_of_servers_is_looked_at_too(checks: RelayChecks) -> None:
    _, end_ms = validity_of(first_certificate_in(checks.authority.servers.roots()[0]))
    later = replace(checks, config=replace(checks.config, tls=None), now_ms=lambda: SystemMs(end_ms - 1))
    assert "the root of servers" in (await made(later, "certificates")).found


@pytest.mark.parametrize(("part", "severity"), [(0.1, OK), (0.9, WARNING), (1.1, FAILURE)])
async def test_a_certificate_for_the_servers_of_the_cluster_that_ends_is_found(
    checks: RelayChecks, tmp_path: Path, part: float, severity: Severity
) -> None:
    set_up(tmp_path / "cluster", ["nats.example"], ["relay1"], "main")
    file = tmp_path / "cluster" / "relays" / "relay1" / "cluster.pem"
    begin_ms, end_ms = validity_of(first_certificate_in(file.read_text()))
    cluster = ClusterConfig((), file, None, "main", "edge_main")
    later = replace(
        checks,
        config=replace(checks.config, cluster=cluster, tls=None),
        now_ms=lambda: SystemMs(int(begin_ms + part * (end_ms - begin_ms))),
    )
    finding = await made(later, "certificates")
    assert finding.severity is severity
    if severity is not OK:
        assert finding.found.startswith("the certificate of --cluster-credentials")
        assert finding.fix == "`relay cluster renew`"


async def test_a_certificate_for_the_other_relays_that_ends_is_found(checks: RelayChecks) -> None:
    state, ca = checks.config.state, checks.authority
    cluster_certificate(state.cluster_tls, ca, checks.now_ms, os.urandom).renew()
    _, end_ms = validity_of(first_certificate_in(state.cluster_tls.certificate.read_text()))
    state.own_tls.certificate.unlink()
    later = replace(checks, config=replace(checks.config, tls=None), now_ms=lambda: SystemMs(end_ms + 1))
    finding = await made(later, "certificates")
    assert (finding.severity, "the certificate for the other relays" in finding.found) == (FAILURE, True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        pytest.param("no certificate\n", "there is none in PEM", id="no PEM"),
        pytest.param(
            "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not a certificate", id="no DER"
        ),
    ],
)
async def test_a_certificate_that_is_damaged_is_told_in_words(
    checks: RelayChecks, text: str, why: str
) -> None:
    checks.config.state.own_tls.certificate.write_text(text)
    finding = await made(checks, "certificates")
    assert (finding.severity, finding.found) == (FAILURE, f"the server's certificate cannot be read: {why}")


async def test_a_certificate_that_the_relay_has_not_made_yet_is_told_in_words(checks: RelayChecks) -> None:
    file = checks.config.state.own_tls.certificate
    file.unlink()
    finding = await made(checks, "certificates")
    assert finding.found == f"the server's certificate {file} is not there"
    assert (finding.severity, finding.fix) == (FAILURE, "start the relay, which makes it")
    of_another = replace(checks, config=replace(checks.config, own_root=False))
    assert (await made(of_another, "certificates")).fix == "supply it"
    assert (await made(checks, "chain")).severity is Severity.SKIPPED


async def test_a_certificate_that_is_not_the_keys_or_not_the_roots_is_found(
    checks: RelayChecks, tmp_path: Path
) -> None:
    assert (await made(checks, "chain")).severity is OK
    other = CertificateAuthority(tmp_path / "other", now_ms, os.urandom)
    other.create()
    assert (await made(replace(checks, authority=other), "chain")).severity is FAILURE
    files = TlsFiles(tmp_path / "other.pem", tmp_path / "other.key")
    issue(files, other)
    checks.config.state.own_tls.certificate.write_bytes(files.certificate.read_bytes())
    assert (await made(checks, "chain")).severity is FAILURE


async def test_a_relay_without_tls_has_no_chain(checks: RelayChecks) -> None:
    plain = replace(checks.config, tls=None, own_root=False)
    assert (await made(replace(checks, config=plain), "chain")).severity is OK


async def test_a_broker_without_access_list_or_one_that_refuses_is_found(
    checks: RelayChecks, broker: BrokerAddress, broker_kind: str, tmp_path: Path
) -> None:
    def of(address: BrokerAddress) -> RelayChecks:
        return replace(checks, config=replace(checks.config, broker=address))

    open_to_all = await made(of(broker), "broker")
    assert (open_to_all.severity, "for any node" in open_to_all.found) == (WARNING, True)
    assert (await made(of(BrokerAddress("127.0.0.1", unused_port())), "broker")).severity is FAILURE
    found: list[Severity] = []
    for refusal in ({"mute": True}, {"deaf": True}):
        directory = tmp_path / str(len(found))
        directory.mkdir()
        refusing = Broker(broker_kind, directory, **refusal)
        refusing.start()
        try:
            found.append((await made(of(refusing.address), "broker")).severity)
        finally:
            refusing.stop()
    assert found == [OK, FAILURE]


async def test_the_relays_own_broker_on_loopback_is_for_this_machine_alone(
    checks: RelayChecks, broker: BrokerAddress
) -> None:
    own = replace(checks, config=replace(checks.config, broker=broker, own_broker=broker))
    async with served(own.config.state.root, lambda: STATUS):
        finding = await made(own, "broker")
    assert (finding.severity, "for this machine alone" in finding.found) == (OK, True)


async def test_a_relay_without_a_broker_lacks_nothing_of_it(checks: RelayChecks) -> None:
    without = replace(checks, config=replace(checks.config, broker=None))
    subsystems = {name: part for name, part in STATUS["subsystems"].items() if name != "broker"}
    status = {**STATUS, "subsystems": subsystems, "broker": {"url": "none", "missing": 0}}
    async with served(checks.config.state.root, lambda: status):
        for name in ("broker", "announces"):
            assert (await made(without, name)).severity is OK, name


async def test_a_relay_that_is_not_reached_is_found(checks: RelayChecks) -> None:
    finding = await made(checks, "relay")
    assert (finding.severity, "is not reached" in finding.found) == (FAILURE, True)


async def test_a_relay_that_does_not_run_is_found_once(checks: RelayChecks) -> None:
    finding = await made(checks, "process")
    assert (finding.severity, "nothing runs" in finding.found) == (FAILURE, True)
    for name in ("clock", "sessions", "announces", "echo", "audit", "files", "watchdog"):
        finding = await made(checks, name)
        assert finding == Finding(SKIPPED, "not checked: the relay does not run")
    own = replace(checks, config=replace(checks.config, own_broker=checks.config.broker))
    assert (await made(own, "broker")).severity is SKIPPED


async def test_a_relay_that_does_not_answer_is_found_once(checks: RelayChecks) -> None:
    async def close(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_unix_server(close, checks.config.state.root / "status.sock"):
        finding = await made(checks, "process")
        assert (finding.severity, "does not answer" in finding.found) == (FAILURE, True)
        skipped = await made(checks, "audit")
    assert skipped == Finding(SKIPPED, "not checked: the relay does not answer")


@pytest.mark.parametrize(
    ("name", "path", "to", "severity"),
    [
        ("process", ("settings", "tls_own", "source"), "default", WARNING),
        ("process", ("watchdog_s",), None, OK),  # it was started in a terminal
        ("process", ("settings",), None, WARNING),
        ("clock", ("subsystems", "clock", "ready"), False, FAILURE),
        ("clock", ("nodes", "wrong_clocks"), {NODE_ID: "ahead"}, WARNING),
        ("sessions", ("nodes", "connected"), 0, WARNING),
        ("sessions", ("nodes",), {"known": 0, "connected": 0, "silent": {}}, OK),
        ("announces", ("subsystems", "broker", "ready"), False, FAILURE),
        ("announces", ("broker", "missing"), 2, WARNING),
        ("echo", ("subsystems", "calls", "ready"), False, FAILURE),
        ("echo", ("nodes", "silent"), {NODE_ID: "node"}, WARNING),
        ("audit", ("subsystems", "audit", "ready"), False, FAILURE),
        ("files", ("open_files",), 1000, FAILURE),
        ("watchdog", ("watchdog_s",), None, OK),
        ("watchdog", ("subsystems", "broker", "live"), False, FAILURE),
    ],
)
async def test_what_the_relay_says_of_itself_is_judged(
    checks: RelayChecks, name: str, path: tuple[str, ...], to: object, severity: Severity
) -> None:
    found: list[Severity] = []
    for status in (STATUS, changed(STATUS, *path, to=to)):
        async with served(checks.config.state.root, lambda shown=status: shown):  # type: ignore[misc]
            found.append((await made(checks, name)).severity)
    assert found == [OK, severity]


@pytest.mark.parametrize(("days", "severity"), [(5, WARNING), (60, OK)])
async def test_the_day_is_named_on_which_the_audits_disk_is_full(
    checks: RelayChecks, days: int, severity: Severity
) -> None:
    audit, day_ms = checks.config.state.audit, 86_400_000
    disk = os.statvfs(audit.parent)
    with audit.open("wb") as file:  # as large as what was written in a day; without its blocks
        file.write(b'{"prev":"","ts_ms":%d}\n' % (NOW_MS - day_ms))
        file.truncate(int(disk.f_bavail * disk.f_frsize / (days + 0.5)))
        file.seek(0, os.SEEK_END)
        file.write(b'{"prev":"","ts_ms":%d}\n' % NOW_MS)
    then = replace(checks, now_ms=lambda: NOW_MS)
    async with served(checks.config.state.root, lambda: STATUS):
        finding = await made(then, "audit")
        kept = await made(
            replace(then, config=replace(then.config, audit_keep=AuditKeep(max_bytes=1))), "audit"
        )
    # Others use the disk too: a day more or less.
    named = [iso(NOW_MS + (days + more) * day_ms)[:10] for more in (-1, 0, 1)]
    assert finding.severity is severity
    assert finding.found in {
        f"the audit is written; at the last week's rate its disk is full on {day}" for day in named
    }
    assert bool(finding.fix) is (severity is WARNING)
    assert kept == Finding.good("the audit is written, and its old files are removed")


async def test_nodes_with_wrong_clocks_are_named(checks: RelayChecks) -> None:
    wrong = {f"node-{number}": "ahead" for number in range(4)} | {"node-2": "behind"}
    async with served(checks.config.state.root, lambda: changed(STATUS, "nodes", "wrong_clocks", to=wrong)):
        finding = await made(checks, "clock")
    assert finding.found.endswith("more than 5 min: node-0 (ahead), node-1 (ahead), node-2 (behind)")
    assert finding.found.startswith("4 nodes ")


@pytest.mark.parametrize(
    ("ready", "cluster_status", "severity", "found"),
    [
        (True, {"sealed": True}, OK, "as it is; sealed"),
        (True, {"sealed": False}, Severity.WARNING, "as it is; not sealed: "),
        (True, {}, Severity.WARNING, "as it is; not sealed: "),
        (False, {"sealed": False}, FAILURE, "as it is"),
    ],
    ids=["sealed", "not sealed", "older", "not connected"],
)
async def test_a_relay_of_a_cluster_tells_whether_it_is_connected_and_sealed(
    checks: RelayChecks,
    ready: bool,  # noqa: FBT001 - a parameter of the test
    cluster_status: dict[str, bool],
    severity: Severity,
    found: str,
) -> None:
    assert (await made(checks, "cluster")).severity is OK  # there is none
    servers = (ClusterServer("127.0.0.1", 4222, tls=False),)
    cluster = ClusterConfig(servers, checks.config.state.root / "seed", None, "main", "edge_main")
    joined = replace(checks, config=replace(checks.config, cluster=cluster))
    said = {"started": True, "live": True, "ready": ready, "state": "as it is"}
    subsystems = {**STATUS["subsystems"], "cluster": said}
    status = {**STATUS, "subsystems": subsystems, "cluster": cluster_status}
    async with served(joined.config.state.root, lambda: status):
        finding = await made(joined, "cluster")
    assert finding.severity is severity
    assert finding.found.startswith(found)


def test_the_doctor_names_the_setting_for_a_proxy_of_this_machine(checks: RelayChecks) -> None:
    alone = replace(checks.config, public_url="http://127.0.0.1:8700", tls=None, own_root=False)
    behind = replace(alone, public_url="https://relay.example", listen=HostPort("127.0.0.1", 8700))
    named = replace(behind, trusted_proxies=(ip_network("127.0.0.1"), ip_network("::1")))
    found = [replace(checks, config=wanted).proxies() for wanted in (alone, behind, named)]
    assert [finding.severity for finding in found] == [Severity.OK, Severity.WARNING, Severity.OK]
    assert "set trusted_proxies" in (found[1].fix or "")
    assert found[2].found == "trusted: 127.0.0.1/32, ::1/128"


def test_the_doctor_says_where_metrics_are_and_what_to_set(checks: RelayChecks, tmp_path: Path) -> None:
    plain = replace(checks.config, tls=None, own_root=False)
    socket = replace(plain, metrics_listen=tmp_path / "metrics.sock")
    tls = replace(plain, tls=plain.state.own_tls, own_root=True)
    found = [replace(checks, config=wanted).metrics() for wanted in (plain, socket, tls)]
    assert [finding.severity for finding in found] == [Severity.OK, Severity.OK, Severity.WARNING]
    assert "set metrics_listen" in found[0].found
    assert found[1].found == f"served on {tmp_path}/metrics.sock"
    assert (found[2].fix or "").startswith("set metrics_listen")
