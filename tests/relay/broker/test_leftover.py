import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.broker.leftover import end_leftover, record

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
def test_what_is_recorded_is_ended_and_named(started: Started, tmp_path: Path) -> None:
    record(started.process.pid, tmp_path / "process")
    assert end_leftover(tmp_path / "process", CONFIG) == started.process.pid
    assert started.process.wait() == -signal.SIGTERM
    # And then there is none.
    assert end_leftover(tmp_path / "process", CONFIG) is None


@pytest.mark.integration
def test_a_suspended_process_is_ended_too(started: Started, tmp_path: Path) -> None:
    record(started.process.pid, tmp_path / "process")
    os.kill(started.process.pid, signal.SIGSTOP)
    assert end_leftover(tmp_path / "process", CONFIG) == started.process.pid
    assert started.process.wait() == -signal.SIGTERM


@pytest.mark.integration
@pytest.mark.parametrize("started", [DEAF], indirect=True)
def test_one_that_does_not_end_is_killed(
    started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relay.broker.leftover._END_TIMEOUT_S", 0.1)
    record(started.process.pid, tmp_path / "process")
    assert end_leftover(tmp_path / "process", CONFIG) == started.process.pid
    assert started.process.wait() == -signal.SIGKILL


@pytest.mark.integration
def test_another_process_with_the_same_number_is_left_alone(started: Started, tmp_path: Path) -> None:
    record(started.process.pid, tmp_path / "process")
    assert end_leftover(tmp_path / "process", Path("/etc/another.conf")) is None
    pid, ticks = (tmp_path / "process").read_text("ascii").split()
    (tmp_path / "process").write_text(f"{pid} {int(ticks) - 1}\n", "ascii")
    assert end_leftover(tmp_path / "process", CONFIG) is None
    assert started.process.poll() is None


@pytest.mark.parametrize("text", ["", "x", "1", "-1 x y", "0 x y", "99999999999999999999 x y", "\x00\xff"])
def test_a_record_that_is_damaged_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "process").write_text(text, "utf-8")
    assert end_leftover(tmp_path / "process", CONFIG) is None


def test_without_a_record_there_is_none(tmp_path: Path) -> None:
    assert end_leftover(tmp_path / "process", CONFIG) is None
