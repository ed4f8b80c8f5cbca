"""Who may do what on a broker: with the files that ship and those that are generated, on both brokers."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from cryptography import x509

from relay.pki.broker_access import BrokerAccess, nats_users
from relay.pki.errors import AuthorityStateError
from schemas import topics
from schemas.manifest import MAX_MANIFEST_BYTES
from schemas.process.logs import make_logger
from tests.fakes.broker import BOUND_S, SHIPPED
from tests.fakes.command_lines import OTHER_OWNER
from tests.fakes.lines import LogLines
from tests.fakes.signer import NODE_ID, OTHER_NODE_ID, SimulatedCa
from tests.fakes.tls_broker import Peer, PlayedAuthority, Shown, TlsBroker, until

NOW_MS = time.time_ns() // 1_000_000
TOPIC, OTHER_TOPIC = f"$devices/{NODE_ID}/announce", f"$devices/{OTHER_NODE_ID}/announce"
ALL = ("$devices/+/identity", "$devices/+/announce", "$devices/+/heartbeat")


class Stage:
    """A broker, who may come in, and who came."""

    def __init__(self, kind: str, directory: Path, stack: ExitStack) -> None:
        self.log = LogLines()
        self.authority = PlayedAuthority(directory, NOW_MS)
        self.authority.nodes = {NODE_ID, OTHER_NODE_ID}
        self.broker = TlsBroker(kind, directory, self.authority.server("edge-broker"))
        self.access = BrokerAccess(
            self.authority, self.broker.edge, self.broker.pid_file, make_logger("relay", self.log)
        )
        self.access.refresh()
        self.broker.start()
        stack.callback(self.broker.stop)
        self.node = self.authority.node(NODE_ID)
        self.other = self.authority.node(OTHER_NODE_ID)
        self._stack = stack

    def connect(self, shown: Shown | None, **options: Any) -> Peer:
        peer = Peer(self.broker.address, self.authority.context_of(shown), **options)
        self._stack.callback(peer.close)
        return peer

    def listening_relay(self) -> Peer:
        relay = self.connect(self.authority.relay())
        assert relay.connected
        assert relay.subscribe(*ALL)
        return relay

    def forbidden(self, shown: Shown, topic: str, payload: bytes, **options: Any) -> None:
        """Write where one may not. mosquitto confirms it and then hangs up, nats-server only confirms."""
        offender = self.connect(shown, **options)
        if offender.connected:
            for retain in (True, False):
                offender.try_publish(topic, payload, retain=retain)

    def revoke(self, node_id: str, shown: Shown) -> None:
        self.authority.nodes.discard(node_id)
        self.authority.revoked.append(serial_of(shown))
        self.access.refresh()


def serial_of(shown: Shown) -> int:
    return x509.load_pem_x509_certificate(shown.certificate.read_bytes()).serial_number


@pytest.fixture
def stage(broker_kind: str, tmp_path: Path) -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(broker_kind, tmp_path, stack)


def test_a_node_publishes_below_its_own_id_and_the_relay_receives_it(stage: Stage) -> None:
    relay = stage.listening_relay()
    stage.connect(stage.node).publish(TOPIC, b"mine")
    assert relay.next() == (TOPIC, b"mine")


def test_what_a_node_writes_on_anothers_topic_changes_nothing_there(stage: Stage) -> None:
    stage.connect(stage.other).publish(OTHER_TOPIC, b"theirs")
    for payload in (b"forged", b""):
        stage.forbidden(stage.node, OTHER_TOPIC, payload)
    stage.forbidden(stage.node, "elsewhere/entirely", b"stray")
    node = stage.connect(stage.node)
    node.publish(TOPIC, b"mine")
    relay = stage.connect(stage.authority.relay())
    assert relay.subscribe("$devices/+/announce")
    assert {relay.next(), relay.next()} == {(TOPIC, b"mine"), (OTHER_TOPIC, b"theirs")}
    node.publish(TOPIC, b"the end")
    assert relay.next() == (TOPIC, b"the end")


def test_a_node_writes_its_four_topics_and_no_other_below_its_id(stage: Stage) -> None:
    below = f"$devices/{NODE_ID}"
    written = {topic: topic.encode() for topic in topics.written_by(NODE_ID)}
    assert set(written) == {f"{below}/{last}" for last in ("identity", "announce", "heartbeat", "telemetry")}
    for topic in (f"{below}/more", f"{below}/announce/more"):
        stage.forbidden(stage.node, topic, b"kept for how many topics?")
    node = stage.connect(stage.node)
    for topic, payload in written.items():
        node.publish(topic, payload)
    relay = stage.connect(stage.authority.relay())
    assert relay.subscribe("$devices/+/+", "$devices/+/+/+")
    assert dict(relay.next() for _ in written) == written
    node.publish(TOPIC, b"the end")
    assert relay.next() == (TOPIC, b"the end")


def test_the_largest_manifest_passes_and_what_is_far_larger_or_has_qos_2_does_not(stage: Stage) -> None:
    relay, largest = stage.listening_relay(), bytes(MAX_MANIFEST_BYTES)
    for payload, qos in ((bytes(MAX_MANIFEST_BYTES + 8192), 1), (b"never confirmed", 2)):
        node = stage.connect(stage.node)
        node.try_publish(TOPIC, payload, retain=True, qos=qos)
        assert node.gone.wait(BOUND_S)
    stage.connect(stage.node).publish(TOPIC, largest)
    assert relay.next() == (TOPIC, largest)


def test_the_will_of_a_node_counts_on_its_own_topic_alone(stage: Stage) -> None:
    relay = stage.listening_relay()
    stage.connect(stage.node, will=OTHER_TOPIC).vanish()
    stage.connect(stage.node, will=TOPIC).vanish()
    assert relay.next() == (TOPIC, b"a will")


def test_a_node_reads_nothing_not_even_its_own(stage: Stage) -> None:
    node, relay = stage.connect(stage.node), stage.listening_relay()
    granted = node.subscribe(*ALL, "#", TOPIC)
    # mosquitto says yes, and withholds the messages.
    assert granted is (stage.broker.kind == "mosquitto")
    if not granted:
        node = stage.connect(stage.node)
    stage.connect(stage.other).publish(OTHER_TOPIC, b"theirs")
    node.publish(TOPIC, b"mine")
    assert {relay.next(), relay.next()} == {(TOPIC, b"mine"), (OTHER_TOPIC, b"theirs")}
    node.publish(TOPIC, b"again")  # what was before it on the same connection has come when it is confirmed
    assert node.messages.empty()


def test_the_relay_writes_nothing(stage: Stage) -> None:
    relay = stage.listening_relay()
    for topic in (TOPIC, OTHER_TOPIC, "$devices/edge-relay/announce"):
        stage.forbidden(stage.authority.relay(), topic, b"forged")
    stage.connect(stage.node).publish(TOPIC, b"mine")
    assert relay.next() == (TOPIC, b"mine")


@pytest.mark.holds("RFC-0001/1/agents-subscribe")
def test_a_reader_has_the_manifests_of_all_nodes_and_nothing_else(stage: Stage) -> None:
    name = "edge-reader-inventory"
    shown = stage.authority.client(name, "urn:edge-kubelet:reader")
    stage.connect(stage.node).publish(TOPIC, b"mine")
    if stage.broker.kind == "mosquitto":
        with (stage.broker.edge / "mosquitto.acl").open("a") as rules:
            shown_there = (SHIPPED / "mosquitto.acl").read_text("utf-8")
            rules.write("\n".join(line[4:] for line in shown_there.splitlines() if line.startswith("#   ")))
    stage.authority.readers_in_force = [name]
    stage.access.refresh()

    def admitted(peer: Peer) -> bool:
        return peer.connected and peer.subscribe("$devices/+/announce") and bool(peer.next())

    reader = until(lambda: stage.connect(shown), admitted)
    for topic in (TOPIC, "$devices/edge-reader-inventory/announce"):
        stage.forbidden(shown, topic, b"forged")
    wider = stage.connect(shown)
    granted = wider.subscribe(f"$devices/{NODE_ID}/heartbeat", "$devices/#", "#", "$MQTT/sub/#")
    assert granted is (stage.broker.kind == "mosquitto")
    node = stage.connect(stage.node)
    node.publish(f"$devices/{NODE_ID}/heartbeat", b"not for readers")
    node.publish(TOPIC, b"again")
    assert reader.next() == (TOPIC, b"again")
    if granted:  # mosquitto grants it, and delivers what may be read of it alone
        assert {wider.next(), wider.next()} == {(TOPIC, b"mine"), (TOPIC, b"again")}
    assert wider.messages.empty()
    stage.authority.readers_in_force = []
    stage.authority.revoked.append(serial_of(shown))
    stage.access.refresh()
    until(lambda: stage.connect(shown), lambda peer: not peer.connected)


def test_a_name_without_a_certificate_is_not_admitted(stage: Stage) -> None:
    relay = stage.listening_relay()
    for username in ("edge-relay", "CN=edge-relay", OTHER_NODE_ID, f"CN={OTHER_NODE_ID}"):
        stage.forbidden(stage.node, OTHER_TOPIC, b"forged", username=username)
    stage.connect(stage.node).publish(TOPIC, b"mine")
    assert relay.next() == (TOPIC, b"mine")


def test_without_a_certificate_of_the_root_no_client_is_admitted(stage: Stage) -> None:
    assert not stage.connect(None).connected
    assert not stage.connect(stage.authority.node(NODE_ID, SimulatedCa("another", NOW_MS))).connected
    assert stage.connect(stage.node).connected


def test_a_revoked_node_is_disconnected_and_no_other_client_is(stage: Stage) -> None:
    node, other, relay = stage.connect(stage.node), stage.connect(stage.other), stage.listening_relay()
    assert node.connected
    stage.revoke(NODE_ID, stage.node)
    if stage.broker.kind == "nats-server":
        assert node.gone.wait(BOUND_S)
    until(lambda: stage.connect(stage.node), lambda peer: not peer.connected)
    other.publish(OTHER_TOPIC, b"still here")
    assert relay.next() == (OTHER_TOPIC, b"still here")
    assert other.connected
    assert relay.connected


def test_two_revocations_of_one_second_both_count(stage: Stage) -> None:
    stage.revoke(NODE_ID, stage.node)
    until(lambda: stage.connect(stage.node), lambda peer: not peer.connected)
    stage.revoke(OTHER_NODE_ID, stage.other)
    until(lambda: stage.connect(stage.other), lambda peer: not peer.connected)
    assert not stage.connect(stage.node).connected


def test_a_node_that_has_just_been_enrolled_is_admitted_and_no_other_client_is_disconnected(
    broker_kind: str, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        stage = Stage(broker_kind, tmp_path, stack)
        stage.revoke(OTHER_NODE_ID, stage.other)
        until(lambda: stage.connect(stage.other), lambda peer: not peer.connected)
        node, relay = stage.connect(stage.node), stage.listening_relay()
        stage.authority.nodes.add(OTHER_NODE_ID)
        stage.access.refresh()
        again = stage.authority.node(OTHER_NODE_ID)  # another serial number
        until(lambda: stage.connect(again), lambda peer: peer.connected).publish(OTHER_TOPIC, b"new")
        assert relay.next() == (OTHER_TOPIC, b"new")
        assert node.connected


def test_a_new_root_counts_beside_the_old_one(stage: Stage) -> None:
    old = stage.connect(stage.node)
    new = SimulatedCa("root of tomorrow", NOW_MS)
    stage.authority.cas.append(new)
    stage.access.refresh()
    renewed = stage.authority.node(OTHER_NODE_ID, new)
    until(lambda: stage.connect(renewed), lambda peer: peer.connected)
    assert old.connected
    assert stage.connect(stage.node).connected


@pytest.mark.integration
def test_the_protocol_of_nats_itself_admits_no_client(tmp_path: Path) -> None:
    with ExitStack() as stack:
        stage = Stage("nats-server", tmp_path, stack)
        for said in ("", '"user":"CN=edge-relay",', '"user":"CN=edge-relay","pass":"",'):
            with socket.create_connection(("127.0.0.1", stage.broker.own_port), BOUND_S) as plain:
                plain.settimeout(BOUND_S)
                assert plain.recv(4096).startswith(b"INFO")
                plain.sendall(b'CONNECT {%s"verbose":false}\r\nPING\r\n' % said.encode())
                assert plain.recv(4096).startswith(b"-ERR 'Authorization Violation'")


# --- what is generated --------------------------------------------------------------------------------


@pytest.fixture
def authority(tmp_path: Path) -> PlayedAuthority:
    return PlayedAuthority(tmp_path, NOW_MS)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "edge-relay2",
        "edge-reader-",
        "edge-reader-X",
        'x", permissions: {}',
        NODE_ID.upper(),
        NODE_ID + "\n",
    ],
)
def test_what_is_no_node_id_never_becomes_a_user(name: str) -> None:
    with pytest.raises(AuthorityStateError, match="is no node id"):
        nats_users([NODE_ID, name])


def test_without_nodes_the_relay_is_the_only_user() -> None:
    assert nats_users([]).count("user") == 2  # "users", and one


@pytest.mark.integration
def test_a_broker_is_told_by_the_process_id_in_its_file(authority: PlayedAuthority, tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    # Blocked and waited for: one that comes just before a handler could run would be seen only after it.
    program = (
        "import signal; hangup = {signal.SIGHUP}; signal.pthread_sigmask(signal.SIG_BLOCK, hangup); "
        "signal.signal(signal.SIGHUP, print); print(flush=True); print(bool(signal.sigtimedwait(hangup, 60)))"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", program], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        pid_file.write_text(f"{process.pid}\n")
        BrokerAccess(authority, tmp_path / "broker", pid_file, make_logger("relay", LogLines())).refresh()
        assert process.wait(BOUND_S) == 0
        out = process.stdout.read()
    assert out == "True\n"


@pytest.mark.integration
def test_a_process_that_does_not_handle_the_signal_yet_is_not_ended_by_it(
    authority: PlayedAuthority, tmp_path: Path
) -> None:
    pid_file, log = tmp_path / "pid", LogLines()
    # A broker writes its number down first, and installs its handler later: here, when it is told.
    default = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); print(flush=True); input()"
    handle = "signal.signal(signal.SIGHUP, lambda *_: os.write(1, b'SIGHUP')); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-P", "-c", f"{default}; {handle}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "\n"
        pid_file.write_text(f"{process.pid}\n")
        access = BrokerAccess(authority, tmp_path / "broker", pid_file, make_logger("relay", log))
        early = access.refresh()
        process.stdin.write("go on\n")
        process.stdin.flush()
        assert process.stdout.readline() == "\n"
        late = access.refresh()
        out, _ = process.communicate("end\n", timeout=BOUND_S)
    assert (early, late, out, process.returncode) == (False, True, "SIGHUP", 0)
    [line] = log.entries("broker not signalled for new access lists")
    assert line["reason"].endswith("does not handle SIGHUP, or not yet")


@pytest.fixture
def handles_sighup() -> Iterator[None]:
    """Let this process handle the signal, as a broker does."""
    before = signal.signal(signal.SIGHUP, lambda *_: None)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(None, id="missing"),
        pytest.param("", id="empty"),
        pytest.param("mosquitto", id="a name"),
        pytest.param("-1", id="all processes"),
        pytest.param("0", id="this group"),
        pytest.param("1", id="the first process"),
        pytest.param("9" * 40, id="no number of a process"),
        pytest.param(str(2**22 + 1), id="a process that is not there"),
        pytest.param("1" * (8 << 20), id="without end"),
        pytest.param("a pipe", id="a pipe"),
    ],
)
def test_a_pid_file_that_names_no_broker_is_a_line_in_the_log(
    authority: PlayedAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process was signalled"))
    pid_file, log = tmp_path / "pid", LogLines()
    if content == "a pipe":
        os.mkfifo(pid_file)
    elif content is not None:
        pid_file.write_text(content)
    assert not BrokerAccess(authority, tmp_path / "broker", pid_file, make_logger("relay", log)).refresh()
    [line] = log.entries("broker not signalled for new access lists")
    assert line["pid_file"] == str(pid_file)
    assert (tmp_path / "broker" / "roots.pem").read_text() == authority.ca.root_pem


@pytest.mark.usefixtures("handles_sighup")
def test_a_process_that_is_younger_than_the_file_is_not_the_broker(
    authority: PlayedAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("a process was signalled"))
    pid_file, log = tmp_path / "pid", LogLines()
    pid_file.write_text(str(os.getpid()))
    os.utime(pid_file, (1, 1))
    BrokerAccess(authority, tmp_path / "broker", pid_file, make_logger("relay", log)).refresh()
    assert log.entries("broker not signalled for new access lists")


async def test_a_refresh_waits_on_a_thread_and_says_whether_it_is_done(
    authority: PlayedAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = Event()

    def slow() -> str:
        assert go_on.wait(BOUND_S)
        raise AuthorityStateError("no CA")

    access = BrokerAccess(authority, tmp_path / "broker", None, make_logger("relay", LogLines()))
    with monkeypatch.context() as patch:
        patch.setattr(authority, "crl_pem", slow)
        task = asyncio.create_task(access.follow())
        await asyncio.sleep(0)
        go_on.set()  # on the loop itself it would never have come to this
        assert await asyncio.wait_for(task, BOUND_S) is False
    assert await access.follow() is True


def failing(error: Exception) -> Callable[[], str]:
    def fail() -> str:
        raise error

    return fail


def test_the_generation_is_written_when_everything_else_is_in_place(
    authority: PlayedAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[str] = []
    replace = Path.replace

    def watching(self: Path, target: Path) -> Path:
        written.append(target.name)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", watching)
    access = BrokerAccess(authority, tmp_path / "broker", None, make_logger("relay", LogLines()))
    assert access.refresh()
    assert set(written[:-1]) == {"roots.pem", "nats-users.conf", "revoked.pem"}
    assert written[-1] == "generation"
    before = (tmp_path / "broker" / "generation").read_text()
    authority.nodes.add(NODE_ID)
    assert access.refresh()
    assert (tmp_path / "broker" / "generation").read_text() != before


@pytest.mark.usefixtures("handles_sighup")
def test_without_the_roots_key_the_users_are_written_and_the_broker_is_told_once(
    authority: PlayedAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, told = LogLines(), list[int]()
    pid_file = tmp_path / "pid"
    pid_file.write_text(str(os.getpid()))
    monkeypatch.setattr(os, "kill", lambda pid, _: told.append(pid))
    access = BrokerAccess(authority, tmp_path / "broker", pid_file, make_logger("relay", log))
    assert access.refresh()
    told.clear()
    generation = (tmp_path / "broker" / "generation").read_text()
    monkeypatch.setattr(authority, "crl_pem", failing(AuthorityStateError("no key")))
    authority.nodes.add(NODE_ID)
    for _ in range(3):
        assert not access.refresh()
    assert NODE_ID in (tmp_path / "broker" / "nats-users.conf").read_text()
    assert (tmp_path / "broker" / "generation").read_text() != generation
    assert told == [os.getpid()]
    assert len(log.entries("broker access not written")) == 1


def test_a_directory_of_the_brokers_group_hands_that_group_what_is_written(
    authority: PlayedAuthority, tmp_path: Path
) -> None:
    directory = tmp_path / "broker"
    directory.mkdir()
    group = OTHER_OWNER if os.geteuid() == 0 else os.getgid()
    os.chown(directory, -1, group)
    directory.chmod(0o2750)
    assert BrokerAccess(authority, directory, None, make_logger("relay", LogLines())).refresh()
    facts = [path.stat() for path in directory.iterdir()]
    assert {(fact.st_gid, stat.S_IMODE(fact.st_mode)) for fact in facts} == {(group, 0o640)}
    assert stat.S_IMODE(directory.stat().st_mode) == 0o2750


@pytest.mark.parametrize("error", [AuthorityStateError("no CA"), OSError("no disk")])
def test_what_cannot_be_written_is_a_line_in_the_log_and_the_old_files_stay(
    authority: PlayedAuthority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    log = LogLines()
    access = BrokerAccess(authority, tmp_path / "broker", None, make_logger("relay", log))
    access.refresh()
    before = {path.name: path.read_bytes() for path in (tmp_path / "broker").iterdir()}
    assert set(before) == {"roots.pem", "revoked.pem", "nats-users.conf", "generation"}
    with monkeypatch.context() as patch:
        patch.setattr(authority, "crl_pem", failing(error))
        assert not access.refresh()
        assert not access.refresh()  # it is tried again and again, and said once
    assert [line["reason"] for line in log.entries("broker access not written")] == [str(error)]
    assert {path.name: path.read_bytes() for path in (tmp_path / "broker").iterdir()} == before
    assert access.refresh()
    with monkeypatch.context() as patch:
        patch.setattr(authority, "crl_pem", failing(error))
        assert not access.refresh()
    assert len(log.entries("broker access not written")) == 2
