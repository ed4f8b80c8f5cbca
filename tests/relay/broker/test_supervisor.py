"""The broker as a child process, its log, and one that was left behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from relay.broker.nats_server import find_nats_server
from relay.broker.supervisor import BrokerLines, BrokerStartError, BrokerSupervisor, end_leftover, record
from schemas.addresses import BrokerAddress
from schemas.process.logs import make_logger
from tests.fakes.background import in_background
from tests.fakes.broker import publish
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.seconds import Seconds
from tests.fakes.signer import NODE_ID


@dataclass
class Stage:
    """A supervisor of a real broker, whose waits a test sees and ends."""

    directory: Path
    address: BrokerAddress = field(default_factory=lambda: BrokerAddress("127.0.0.1", unused_port()))
    log: LogLines = field(default_factory=LogLines)
    waits: list[float] = field(default_factory=list)
    ends: int = 0
    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def paused(self, seconds: float) -> None:
        """Stand for a sleep."""
        self.waits.append(seconds)
        await self.goes_on.wait()

    def supervisor(self, program: Path | None = None) -> BrokerSupervisor:
        return BrokerSupervisor(
            self.address,
            self.directory / "broker",
            None,
            find_program=lambda: program or find_nats_server(),
            on_end=self._ended,
            probe_node=NODE_ID,
            log=make_logger("relay", self.log),
            sleep=self.paused,
        )

    @property
    def pid(self) -> int:
        return int((self.directory / "broker" / "nats-server.process").read_text("ascii").split()[0])

    def _ended(self) -> None:
        self.ends += 1


@asynccontextmanager
async def running(supervisor: BrokerSupervisor) -> AsyncIterator[None]:
    await supervisor.start()
    try:
        async with in_background(supervisor.run()):
            yield
    finally:
        await supervisor.close()


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    stage = Stage(tmp_path)
    stage.goes_on.set()
    return stage


def script(directory: Path, text: str) -> Path:
    program = directory / "nats-server"
    program.write_text(f"#!/bin/sh\n{text}\n", "ascii")
    program.chmod(0o755)
    return program


@pytest.mark.integration
async def test_it_listens_once_it_is_started_and_has_ended_once_it_is_closed(stage: Stage) -> None:
    supervisor = stage.supervisor()
    async with running(supervisor):
        await asyncio.to_thread(publish, stage.address, ("$devices/x/announce", b"{}"))
        pid = stage.pid
        # A session of its own: Ctrl-C at the relay's terminal is not for it.
        assert os.getsid(pid) == pid
    assert not supervisor.is_running
    assert not psutil.pid_exists(pid)
    assert not (stage.directory / "broker" / "nats-server.process").exists()
    assert (stage.ends, stage.log.entries("broker killed")) == (0, [])


@pytest.mark.integration
async def test_it_gets_nothing_of_the_relays_environment(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "a secret")
    async with running(stage.supervisor()):
        assert set(psutil.Process(stage.pid).environ()) == {"PATH"}


@pytest.mark.integration
async def test_it_is_started_again_whenever_it_ends_with_longer_waits(stage: Stage) -> None:
    supervisor = stage.supervisor()
    async with running(supervisor):
        for count in (1, 2, 3):
            os.kill(stage.pid, signal.SIGKILL)
            await stage.log.until("broker started", count + 1)
        assert stage.waits == [1.0, 2.0, 4.0]
        assert stage.ends == 3
        assert [line["status"] for line in stage.log.entries("broker ended")] == [-signal.SIGKILL] * 3
        await asyncio.to_thread(publish, stage.address, ("$devices/x/announce", b"{}"))


@pytest.mark.integration
async def test_while_its_port_is_taken_meanwhile_it_is_tried_again_and_says_why(stage: Stage) -> None:
    supervisor = stage.supervisor()
    async with running(supervisor):
        stage.goes_on.clear()
        os.kill(stage.pid, signal.SIGKILL)
        await stage.log.until("broker ended")
        with socket.create_server((stage.address.host, stage.address.port)):
            stage.goes_on.set()
            ended = await stage.log.until("broker ended", 2)
            assert "address already in use" in ended["last_lines"]
            assert not supervisor.is_running
        await stage.log.until("broker started", 2)


@pytest.mark.integration
async def test_a_store_that_is_torn_is_said_and_the_broker_serves(stage: Stage) -> None:
    async with running(stage.supervisor()):
        await asyncio.to_thread(publish, stage.address, ("$devices/x/announce", b"{}" * 1000))
    store = stage.directory / "broker" / "store"
    torn = [*store.rglob("meta.inf"), *store.rglob("*.blk")]
    assert torn
    for file in torn:
        file.write_bytes(b"torn")
    async with running(stage.supervisor()):
        said = await stage.log.until("the broker reports")
        assert "meta.inf" in said["line"]
        await asyncio.to_thread(publish, stage.address, ("$devices/x/announce", b"{}"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'cannot read it' >&2; exit 3", "ended with status 3: cannot read it"),
        ("exit 0", "ended with status 0: no output"),
    ],
)
@pytest.mark.integration
async def test_a_program_that_ends_at_once_is_an_error_with_its_last_words(
    stage: Stage, text: str, reason: str
) -> None:
    with pytest.raises(BrokerStartError, match=reason):
        await stage.supervisor(script(stage.directory, text)).start()
    # Nothing is held: the next start can have the directory.
    async with running(stage.supervisor()):
        pass


def children() -> set[psutil.Process]:
    """Return the processes that this one has started: fixtures that many tests share have some too."""
    return set(psutil.Process().children())


@pytest.mark.integration
async def test_one_that_does_not_listen_in_time_is_stopped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.broker.supervisor._START_TIMEOUT_S", 0.5)
    started, before = stage.supervisor(script(stage.directory, "exec /bin/sleep 60")), children()
    with pytest.raises(BrokerStartError, match="does not listen"):
        await started.start()
    assert children() <= before


@pytest.mark.integration
async def test_a_start_that_is_cancelled_leaves_nothing(stage: Stage) -> None:
    before = children()
    starting = asyncio.create_task(stage.supervisor(script(stage.directory, "exec /bin/sleep 60")).start())
    await until((stage.directory / "broker" / "nats-server.process").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() <= before


@pytest.mark.integration
async def test_two_of_one_directory_do_not_run_at_once(stage: Stage) -> None:
    async with running(stage.supervisor()):
        pid = stage.pid
        with pytest.raises(BrokerStartError, match="another relay runs with"):
            await stage.supervisor().start()
        assert psutil.pid_exists(pid)


@pytest.mark.integration
async def test_a_reload_reaches_the_broker_and_is_pending_while_it_starts(stage: Stage) -> None:
    supervisor = stage.supervisor()
    assert supervisor.reload()  # it reads the lists when it starts
    async with running(supervisor):
        told: Callable[[], bool] = supervisor.reload
        assert told()
        supervisor.is_running = False
        assert not told()
        supervisor.is_running = True
        assert psutil.pid_exists(stage.pid)


EVENT = "the broker reports"
PROBE = "01hzx9k3m4p7q8r9s0t1v2w3xd"
OTHER = "01hzx9k3m4p7q8r9s0t1v2w3xy"


@pytest.fixture
def log() -> LogLines:
    return LogLines()


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def lines(log: LogLines, seconds: Seconds) -> BrokerLines:
    return BrokerLines(make_logger("relay", log), seconds, PROBE)


async def read(lines: BrokerLines, *pieces: bytes) -> None:
    stream = asyncio.StreamReader()
    for piece in pieces:
        stream.feed_data(piece)
    stream.feed_eof()
    await lines.read(stream)


async def test_warnings_and_errors_are_logged_and_notices_are_not(lines: BrokerLines, log: LogLines) -> None:
    await read(lines, b"[7] [INF] Starting\n[7] [WRN] a meta file is bro", b"ken\n[7] [ERR] no\n\npanic: x\n")
    assert [(line["level"], line["line"]) for line in log.entries(EVENT)] == [
        ("warning", "a meta file is broken"),
        ("error", "no"),
        ("error", "panic: x"),
    ]
    assert lines.last() == "a meta file is broken | no | panic: x"


def refused(client: str, node_id: str) -> bytes:
    """Return the line about ``client``, which may not publish for that node."""
    subject = f"$devices.{node_id}.heartbeat"
    return f'[7] [ERR] 127.0.0.1:4 - mid:31 - "{client}" - Publish Violation - Subject "{subject}"\n'.encode()


async def test_what_is_no_fault_and_no_attack_is_no_warning(lines: BrokerLines, log: LogLines) -> None:
    await read(
        lines,
        b'[7] [WRN] User "CN=edge-relay" found in connect proto, but user required from cert\n',
        b'[7] [ERR] 127.0.0.1:4 - mid:30 - "" - unacceptable protocol version of 5\n',
        refused("edge-doctor-01hz", PROBE),
    )
    assert [(line["level"], line["event"]) for line in log.entries()] == [
        ("info", "a client tries MQTT 5, which the broker does not speak"),
        ("info", "the broker refuses what relay doctor tries, as it should"),
    ]
    assert lines.last() == ""


async def test_a_client_that_calls_itself_the_doctor_is_not_taken_for_it(
    lines: BrokerLines, log: LogLines
) -> None:
    await read(lines, refused("edge-doctor-01hz", OTHER), refused(refused("x", PROBE)[11:-1].decode(), OTHER))
    assert [line["level"] for line in log.entries(EVENT)] == ["error", "error"]


async def test_what_a_stranger_has_put_into_a_line_is_escaped_and_cut(
    lines: BrokerLines, log: LogLines
) -> None:
    await read(lines, b"[7] [ERR] \x1b[31m\xff" + b"a" * 1_000_000 + b"\n[7] [WRN] next\n", b"[7] [ERR] end")
    hostile, after, last = [line["line"] for line in log.entries(EVENT)]
    assert hostile.startswith("\\x1b[31m\\ufffd")
    assert len(hostile) <= 400
    assert (after, last) == ("next", "end")


async def test_a_stranger_who_causes_errors_without_end_fills_no_disk(
    lines: BrokerLines, log: LogLines, seconds: Seconds
) -> None:
    await read(lines, b"[7] [ERR] TLS handshake error\n" * 10_000)
    assert len(log.entries(EVENT)) == 30
    seconds.now += 1
    await read(lines, b"[7] [ERR] later\n")
    last = log.entries(EVENT)[-1]
    assert (last["line"], last["left_out"]) == ("later", 9_970)


CONFIG = Path("/var/lib/edge-relay/broker/nats-server.conf")
SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
DEAF = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"


class Started:
    """A process that was started, and has said that it runs."""

    def __init__(self, code: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", code, str(CONFIG)], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"

    def close(self) -> int:
        self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return self.process.wait()


@pytest.fixture(params=[SLEEPS])
def started(request: pytest.FixtureRequest) -> Iterator[Started]:
    started = Started(request.param)
    yield started
    started.close()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("started", "before", "by"),
    [
        pytest.param(SLEEPS, signal.SIGCONT, signal.SIGTERM, id="running"),
        pytest.param(SLEEPS, signal.SIGSTOP, signal.SIGTERM, id="suspended"),
        pytest.param(DEAF, signal.SIGCONT, signal.SIGKILL, id="ignores SIGTERM"),
    ],
    indirect=["started"],
)
def test_what_is_recorded_is_ended_and_named(
    started: Started,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    before: signal.Signals,
    by: signal.Signals,
) -> None:
    if by is signal.SIGKILL:
        monkeypatch.setattr("relay.broker.supervisor._END_TIMEOUT_S", 0.1)
    record(started.process.pid, tmp_path / "process")
    os.kill(started.process.pid, before)
    assert end_leftover(tmp_path / "process", CONFIG) == started.process.pid
    assert started.process.wait() == -by
    # And then there is none.
    assert end_leftover(tmp_path / "process", CONFIG) is None


@pytest.mark.integration
def test_another_process_with_the_same_number_is_left_alone(started: Started, tmp_path: Path) -> None:
    record(started.process.pid, tmp_path / "process")
    assert end_leftover(tmp_path / "process", Path("/etc/another.conf")) is None
    pid, ticks = (tmp_path / "process").read_text("ascii").split()
    (tmp_path / "process").write_text(f"{pid} {int(ticks) - 1}\n", "ascii")
    assert end_leftover(tmp_path / "process", CONFIG) is None
    assert started.process.poll() is None


@pytest.mark.parametrize(
    "text", [None, "", "x", "1", "-1 x y", "0 x y", "99999999999999999999 x y", "\x00\xff"]
)
def test_a_record_that_is_missing_or_damaged_names_none(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "process").write_text(text, "utf-8")
    assert end_leftover(tmp_path / "process", CONFIG) is None
