import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from relay.cli.demo.processes import ClaimedPorts, Processes, StartError
from tests.fakes.polling import until
from tests.fakes.ports import unused_port

pytestmark = pytest.mark.integration

BOUND_S = 30
WAIT = "import signal; signal.pause()"
SHOW = "import os, signal; print(os.environ['EDGE_TEST'], flush=True); signal.pause()"
# Says on which port it listens, then waits.
LISTEN = (
    "import signal, socket, sys; s = socket.socket(); s.bind(('127.0.0.1', int(sys.argv[1]))); s.listen();"
    "signal.pause()"
)


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", code, *arguments]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
async def processes(tmp_path: Path) -> AsyncIterator[Processes]:
    async with asyncio.timeout(BOUND_S), Processes.running(tmp_path) as processes:
        yield processes


async def test_a_process_has_the_variables_that_it_is_given(processes: Processes) -> None:
    await processes.start("one", python(SHOW), {"EDGE_TEST": "yes"})
    await until(lambda: processes.log("one").read_text() == "yes\n")


async def test_all_are_gone_on_the_way_out(tmp_path: Path) -> None:
    async with asyncio.timeout(BOUND_S):
        async with Processes.running(tmp_path) as processes:
            pids = [await processes.start(name, python(WAIT)) for name in ("one", "two")]
            assert all(alive(pid) for pid in pids)
            processes.check()
        assert not any(alive(pid) for pid in pids)


async def test_they_are_gone_after_an_error_too(tmp_path: Path) -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with asyncio.timeout(BOUND_S), Processes.running(tmp_path) as processes:
            pids.append(await processes.start("one", python(WAIT)))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await fail()
    assert not alive(pids[0])


async def test_they_are_gone_when_a_signal_comes_while_they_are_stopped(tmp_path: Path) -> None:
    # Each says that it was asked to stop, and needs the answer to end.
    slow = (
        "import os, signal, sys\n"
        "def stop(*_):\n"
        "    os.kill(int(sys.argv[1]), signal.SIGUSR1)\n"
        "    signal.sigwait({signal.SIGUSR2})\n"
        "    sys.exit()\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "open(sys.argv[2], 'w').close()\n"
        "while True: signal.pause()\n"
    )
    stopping: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, stopping.put_nowait, None)
    pids: list[int] = []

    async def demo() -> None:
        async with Processes.running(tmp_path) as processes:
            for name in ("1", "2"):
                ready = tmp_path / name
                pids.append(await processes.start(name, python(slow, str(os.getpid()), str(ready))))
                await until(ready.exists)

    async with asyncio.timeout(BOUND_S):
        running = asyncio.create_task(demo())
        for number in (1, 0):
            await stopping.get()
            running.cancel()
            os.kill(pids[number], signal.SIGUSR2)
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not any(alive(pid) for pid in pids)
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_the_newest_is_stopped_first(tmp_path: Path) -> None:
    note = (
        "import os, signal, sys\n"
        "def note(*_):\n"
        "    os.write(1, b'stopped')\n"
        "    open(sys.argv[1], 'a').write(sys.argv[2])\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, note)\n"
        "open(sys.argv[3], 'w').close()\n"
        "os.kill(int(sys.argv[4]), signal.SIGUSR1)\n"
        "while True: signal.pause()\n"
    )
    ready: asyncio.Queue[None] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR1, ready.put_nowait, None)
    order = tmp_path / "order"
    async with asyncio.timeout(BOUND_S):
        async with Processes.running(tmp_path) as processes:
            for name in ("1", "2", "3"):
                arguments = (str(order), name, str(tmp_path / name), str(os.getpid()))
                await processes.start(name, python(note, *arguments))
                await ready.get()
        assert order.read_text() == "321"
    loop.remove_signal_handler(signal.SIGUSR1)


async def test_a_process_that_ended_is_said_with_its_last_words(processes: Processes) -> None:
    await processes.start("broken", python("import sys; print('no such luck'); sys.exit(3)"))
    with pytest.raises(StartError, match="broken ended with status 3: no such luck"):
        await processes.during(asyncio.Event().wait())
    assert processes.last_lines() == "broken: no such luck"


async def test_of_each_log_the_last_warning_is_shown_before_what_came_after_it(processes: Processes) -> None:
    lines = ['{"level": "info"}', '{"level": "warning", "event": "connections refused"}', '{"level": "info"}']
    await processes.start("relay", python(f"print({chr(10).join(lines)!r})"))
    with pytest.raises(StartError):
        await processes.during(asyncio.Event().wait())
    assert processes.last_lines() == f"relay: {lines[1]}"


async def test_work_that_needs_the_processes_is_cancelled_when_one_ends(processes: Processes) -> None:
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    await processes.start("broken", python("import sys; sys.exit(3)"))
    with pytest.raises(StartError, match="broken ended with status 3"):
        await processes.during(work())
    assert cancelled.is_set()


async def test_the_end_of_a_process_is_named_before_the_failure_that_it_caused(processes: Processes) -> None:
    pid = await processes.start("one", python(WAIT))

    async def connected() -> None:
        os.kill(pid, signal.SIGKILL)
        async with asyncio.TaskGroup() as group:
            group.create_task(broken())

    async def broken() -> None:
        raise ConnectionResetError

    with pytest.raises(StartError, match="one ended with status -9"):
        await processes.during(connected())


async def test_a_failure_of_the_work_alone_is_its_own(processes: Processes) -> None:
    await processes.start("one", python(WAIT))

    async def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await processes.during(broken())


async def test_waiting_for_a_port_ends_when_it_is_listened_on(processes: Processes) -> None:
    port = unused_port()
    await processes.start("listener", python(LISTEN, str(port)))
    await processes.until_listening(port)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    assert not reader.at_eof()
    writer.close()
    await writer.wait_closed()


async def test_waiting_for_a_port_ends_when_a_process_does(processes: Processes) -> None:
    await processes.start("broken", python("import sys; sys.exit(4)"))
    with pytest.raises(StartError, match="broken ended with status 4"):
        await processes.until_listening(unused_port())


async def test_the_output_of_a_command_is_returned_or_why_it_failed(processes: Processes) -> None:
    assert await processes.output(python("print('hello')")) == "hello\n"
    with pytest.raises(StartError, match="no such luck"):
        await processes.output(python("import sys; sys.exit('no such luck')"))


async def test_ctrl_c_is_not_for_the_parts(processes: Processes) -> None:
    pid = await processes.start("one", python(WAIT))
    assert os.getsid(pid) == pid


def test_a_port_in_use_is_left_to_its_owner() -> None:
    wanted = unused_port()
    with socket.socket() as taken, ClaimedPorts() as ports:
        taken.bind(("127.0.0.1", wanted))
        taken.listen()
        assert ports.take(wanted) != wanted


def test_a_port_that_another_demo_has_chosen_and_not_bound_yet_is_left_to_it() -> None:
    wanted = unused_port()
    with ClaimedPorts() as first, ClaimedPorts() as second:
        chosen = [ports.take(wanted) for ports in (first, second) * 25]
    assert chosen[0] == wanted
    assert len(set(chosen)) == 50


def test_the_usual_port_is_taken_where_it_is_free_as_that_of_a_demo_that_has_ended() -> None:
    wanted = unused_port()
    for _ in range(2):
        with ClaimedPorts() as ports:
            assert ports.take(wanted) == wanted
