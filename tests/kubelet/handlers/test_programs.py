"""Programs that a handler runs: real ones, of this machine."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from kubelet.handlers.machine import printed_by
from tests.fakes.polling import until

pytestmark = pytest.mark.integration

BOUND_S = 30
ENDLESS = "import os, sys\nprint(os.getpid())\nwhile True: print('x' * 1000)"
WAITING = "import os, sys, time\nopen(sys.argv[1], 'w').write(str(os.getpid()))\ntime.sleep(600)"


def python(program: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-c", program, *arguments]


@pytest.mark.parametrize(
    ("program", "text", "code"),
    [
        ("print('T\u00fcr')", "T\u00fcr\n", 0),
        ("import sys; sys.stdout.buffer.write(b'\\xff')", "\ufffd", 0),
        ("import sys; print('no', file=sys.stderr); sys.exit(3)", "", 3),
    ],
)
async def test_what_a_program_prints_and_how_it_ends(program: str, text: str, code: int) -> None:
    command = ["env", "PYTHONUTF8=1", *python(program)]
    assert await asyncio.wait_for(printed_by(command), BOUND_S) == (text, code)


async def test_one_that_prints_without_end_is_stopped_at_the_limit() -> None:
    printed = await asyncio.wait_for(printed_by(python(ENDLESS), 5000), BOUND_S)
    assert (len(printed.text), printed.code) == (5000, None)
    assert not psutil.pid_exists(int(printed.text.split()[0]))


async def test_one_whose_caller_is_cancelled_is_stopped(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    running = asyncio.create_task(printed_by(python(WAITING, str(file))))
    await until(lambda: file.exists() and file.read_text())
    running.cancel()
    await asyncio.wait([running], timeout=BOUND_S)
    assert running.cancelled()
    assert not psutil.pid_exists(int(file.read_text()))


async def test_what_one_that_has_ended_leaves_behind_is_stopped() -> None:
    leaves = "import os, time\nchild = os.fork()\nprint(child) if child else time.sleep(600)"
    printed = await asyncio.wait_for(printed_by(python(leaves), within_s=1.0), BOUND_S)
    await until(lambda: not psutil.pid_exists(int(printed.text)))


async def test_what_one_leaves_behind_in_a_session_of_its_own_keeps_no_file_open_here() -> None:
    own = psutil.Process()
    before = own.num_fds()
    printed = await asyncio.wait_for(
        printed_by(["sh", "-c", "setsid sleep 600 & echo $!"], within_s=1.0), BOUND_S
    )
    try:
        await until(lambda: own.num_fds() == before)
    finally:
        os.kill(int(printed.text), signal.SIGKILL)


async def test_one_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        await printed_by(["/absent/program"])
