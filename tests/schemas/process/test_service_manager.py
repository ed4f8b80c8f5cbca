import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from schemas.process.logs import make_logger
from schemas.process.service_manager import ServiceManager, call_at
from tests.fakes.lines import LogLines

BOUND_S = 30
PID = 4711


class Manager:
    """What a service manager receives at ``address``."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        self.socket.setblocking(False)  # noqa: FBT003 - as the standard library has it

    async def next(self) -> list[str]:
        text = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(self.socket, 4096), BOUND_S)
        return text.decode().split("\n")

    async def until(self, line: str) -> None:
        async with asyncio.timeout(BOUND_S):
            while line not in await self.next():
                pass

    def waiting(self) -> list[str]:
        """Return all that has come and was not read."""
        texts = []
        with suppress(BlockingIOError):
            while True:
                texts.append(self.socket.recv(4096).decode())
        return texts


@pytest.fixture
def log() -> LogLines:
    return LogLines()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[Manager]:
    manager = Manager(str(tmp_path / "notify"))
    yield manager
    manager.socket.close()


def manager_at(manager: Manager, log: LogLines, **environment: str) -> ServiceManager:
    address = str(manager.socket.getsockname())
    return ServiceManager.of({"NOTIFY_SOCKET": address, **environment}, PID, make_logger("kubelet", log))


async def test_the_manager_is_told_of_each_state(manager: Manager, log: LogLines) -> None:
    ours = manager_at(manager, log)
    ours.ready()
    assert await manager.next() == ["READY=1"]
    ours.reloading()
    state, clock = await manager.next()
    assert state == "RELOADING=1"
    assert clock.startswith("MONOTONIC_USEC=")
    ours.stopping()
    assert (await manager.next())[0] == "STOPPING=1"


async def test_an_abstract_address_is_reached(log: LogLines) -> None:
    abstract = Manager("\0edge-test-schemas")
    ours = ServiceManager.of({"NOTIFY_SOCKET": "@edge-test-schemas"}, PID, make_logger("kubelet", log))
    ours.ready()
    assert await abstract.next() == ["READY=1"]
    abstract.socket.close()


async def test_the_watchdog_is_fed_while_no_loop_is_stalled(manager: Manager, log: LogLines) -> None:
    stalled, status = [""], ["announced"]
    ours = manager_at(manager, log, WATCHDOG_USEC="40000", WATCHDOG_PID=str(PID))
    running = asyncio.create_task(ours.run(lambda: [name for name in stalled if name], lambda: status[0]))
    assert await manager.next() == ["STATUS=announced"]
    await manager.until("WATCHDOG=1")
    await manager.until("WATCHDOG=1")
    stalled[0] = "session"
    await log.until("service loops are stalled")
    assert log.entries("service loops are stalled")[0]["loops"] == ["session"]
    manager.waiting()
    for line in ("connecting", "announced"):
        status[0] = line
        assert await manager.next() == [f"STATUS={line}"]
    stalled[0] = ""
    await manager.until("WATCHDOG=1")
    running.cancel()


async def test_without_a_watchdog_of_this_process_only_the_status_is_told(
    manager: Manager, log: LogLines
) -> None:
    ours = manager_at(manager, log, WATCHDOG_USEC="40000", WATCHDOG_PID="1")
    running = asyncio.create_task(ours.run(list, lambda: "ready"))
    assert await manager.next() == ["STATUS=ready"]
    await asyncio.sleep(0)
    assert manager.waiting() == []
    running.cancel()


async def test_without_a_manager_nothing_is_told_and_the_work_goes_on(log: LogLines) -> None:
    ours = ServiceManager.of({}, PID, make_logger("kubelet", log))
    ours.ready()
    running = asyncio.create_task(ours.run(list, lambda: "ready"))
    await asyncio.sleep(0)
    assert not running.done()
    running.cancel()


def test_a_manager_that_does_not_listen_is_a_line_in_the_log(tmp_path: Path, log: LogLines) -> None:
    ServiceManager.of({"NOTIFY_SOCKET": str(tmp_path / "none")}, PID, make_logger("kubelet", log)).ready()
    assert "No such file" in log.entries("service manager not reached")[0]["reason"]


@pytest.fixture
def handler_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGUSR1)
    yield
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.usefixtures("handler_restored")
async def test_a_signal_is_a_call_in_the_loop_each_time() -> None:
    calls: asyncio.Queue[object] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    call_at(signal.SIGUSR1, loop, lambda: calls.put_nowait(asyncio.get_running_loop()))
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
        assert calls.empty()  # not within the code that the signal interrupts
        assert await asyncio.wait_for(calls.get(), BOUND_S) is loop


@pytest.mark.usefixtures("handler_restored")
async def test_a_signal_wakes_a_loop_that_waits() -> None:
    called = asyncio.Event()
    loop = asyncio.get_running_loop()
    call_at(signal.SIGUSR1, loop, called.set)
    killing = loop.run_in_executor(None, os.kill, os.getpid(), signal.SIGUSR1)
    await asyncio.wait_for(called.wait(), BOUND_S)
    await killing


@pytest.mark.usefixtures("handler_restored")
def test_a_signal_is_ignored_once_the_loop_is_closed() -> None:
    loop = asyncio.new_event_loop()
    calls: list[None] = []
    call_at(signal.SIGUSR1, loop, lambda: calls.append(None))
    loop.close()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert calls == []
