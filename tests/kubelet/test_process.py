"""The edges of a process of the node."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kubelet.process import fail, hold_alone, run_until_signal
from schemas.files import UntrustedFileError
from schemas.identity_files import IdentityFilesError
from schemas.process.command_errors import EXIT_NO
from tests.fakes.command_lines import give_away


def test_failing_says_one_line_and_ends_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("it cannot be", EXIT_NO)
    assert ended.value.code == EXIT_NO
    assert capsys.readouterr() == ("", "kubelet: it cannot be\n")


@pytest.mark.usefixtures("signals_restored")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_work_that_is_told_to_stop_may_tidy_up_undisturbed_and_has_done_its_job(
    number: signal.Signals,
) -> None:
    tidied: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
        finally:
            os.kill(os.getpid(), number)
            await asyncio.sleep(0)
            tidied.append("tidied")

    run_until_signal(work())
    assert tidied == ["tidied"]
    os.kill(os.getpid(), number)  # the process has not ended yet


@pytest.mark.usefixtures("signals_restored")
def test_work_may_end_by_itself() -> None:
    run_until_signal(asyncio.sleep(0))


@pytest.mark.usefixtures("signals_restored")
def test_of_what_went_wrong_in_task_groups_the_first_is_told() -> None:
    async def breaks() -> None:
        raise OSError("the port is taken")

    async def work() -> None:
        async with asyncio.TaskGroup() as outer:
            outer.create_task(inner())

    async def inner() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(breaks())

    with pytest.raises(OSError, match="the port is taken"):
        run_until_signal(work())


HOLD = "import sys; from pathlib import Path; from kubelet.process import hold_alone\n"
HOLD += "with hold_alone(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def test_a_second_holder_is_told_what_to_do(tmp_path: Path) -> None:
    with (
        hold_alone(tmp_path),
        pytest.raises(IdentityFilesError, match="another kubelet runs with"),
        hold_alone(tmp_path),
    ):
        pytest.fail("held twice")


def test_what_was_let_go_of_can_be_held_again(tmp_path: Path) -> None:
    for _ in range(2):
        with hold_alone(tmp_path):
            pass
    assert [file.name for file in tmp_path.iterdir()] == ["lock"]


def test_a_link_in_the_place_of_the_lock_is_refused_and_its_target_is_not_emptied(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(UntrustedFileError, match="lock is a symbolic link"), hold_alone(tmp_path):
        pytest.fail("held")
    assert victim.read_text() == "untouched"


def test_the_lock_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with hold_alone(tmp_path):
        pass
    give_away(tmp_path / "lock", monkeypatch)
    with pytest.raises(UntrustedFileError, match="belongs to user"), hold_alone(tmp_path):
        pytest.fail("held")


@pytest.mark.integration
def test_a_daemon_that_was_killed_holds_nothing(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(IdentityFilesError), hold_alone(tmp_path):
        pytest.fail("held twice")
    holder.kill()
    holder.communicate()
    with hold_alone(tmp_path):
        pass
