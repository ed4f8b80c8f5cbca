import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.polling import until
from tests.fakes.small_fleet import is_running

pytestmark = pytest.mark.integration
CHILD = [sys.executable, "-P", "-m", "relay.broker.child"]
# A parent that starts the child, says which process that is, and waits.
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([*sys.argv[1:5], str(os.getpid()), *sys.argv[5:]])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "$0 $*"; umask; env; exec /bin/sleep 60\n', "ascii")
    program.chmod(0o755)
    return program


async def test_it_becomes_the_program_which_ends_when_its_parent_is_killed(program: Path) -> None:
    command = [sys.executable, "-P", "-c", PARENT, *CHILD, str(program), "the.conf"]
    environment = {**os.environ, "EDGE_TOKEN": "a secret"}
    with subprocess.Popen(  # noqa: ASYNC220 - nothing else runs in this loop
        command, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        said = [parent.stdout.readline().decode().strip() for _ in range(2)]
        assert said == [f"{program} -c the.conf", "0077"]
        parent.send_signal(signal.SIGKILL)
        rest = parent.stdout.read()  # to its end: the child has closed it
    assert b"EDGE_TOKEN" not in rest
    await until(lambda: not is_running(pid))


@pytest.mark.parametrize(
    ("arguments", "reason"), [(["1", "/bin/true", "the.conf"], b"the relay has ended"), (["1"], b"")]
)
def test_it_starts_nothing_without_its_parent(arguments: list[str], reason: bytes) -> None:
    ran = subprocess.run([*CHILD, *arguments], capture_output=True, check=False, timeout=30)
    assert ran.returncode != 0
    assert reason in ran.stderr
