import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from relay.broker.program import find_nats_server
from relay.broker.supervisor import BrokerStartError, BrokerSupervisor
from schemas.addresses import BrokerAddress
from schemas.process.logs import make_logger
from tests.fakes.broker import publish
from tests.fakes.lines import LogLines
from tests.fakes.polling import until
from tests.fakes.ports import unused_port
from tests.fakes.signer import NODE_ID

pytestmark = pytest.mark.integration


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
    task = asyncio.create_task(supervisor.run())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
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


async def test_it_gets_nothing_of_the_relays_environment(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGE_TOKEN", "a secret")
    async with running(stage.supervisor()):
        assert set(psutil.Process(stage.pid).environ()) == {"PATH"}


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


async def test_one_that_does_not_listen_in_time_is_stopped(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.broker.supervisor._START_TIMEOUT_S", 0.5)
    started, before = stage.supervisor(script(stage.directory, "exec /bin/sleep 60")), children()
    with pytest.raises(BrokerStartError, match="does not listen"):
        await started.start()
    assert children() <= before


async def test_a_start_that_is_cancelled_leaves_nothing(stage: Stage) -> None:
    before = children()
    starting = asyncio.create_task(stage.supervisor(script(stage.directory, "exec /bin/sleep 60")).start())
    await until((stage.directory / "broker" / "nats-server.process").exists)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() <= before


async def test_two_of_one_directory_do_not_run_at_once(stage: Stage) -> None:
    async with running(stage.supervisor()):
        pid = stage.pid
        with pytest.raises(BrokerStartError, match="another relay runs with"):
            await stage.supervisor().start()
        assert psutil.pid_exists(pid)


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
