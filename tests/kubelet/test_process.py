"""The edges of a process of the node."""

import asyncio
import os
import signal

import pytest

from kubelet.process import fail, run_until_signal
from schemas.process.command_errors import EXIT_NO


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
