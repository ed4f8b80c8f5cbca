"""The edges of a process of the node."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from kubelet.process import errors_in_one_line, fail, run_until_signal
from schemas.addresses import AddressError
from schemas.error_roots import OperatorError, PeerError, StateError
from schemas.faults import FailedError
from schemas.files import ExposedFileError
from schemas.identity_files import IdentityFilesError
from schemas.process.exit_codes import EXIT_CANNOT_RUN, EXIT_FAULT, EXIT_NO, EXIT_USAGE
from schemas.session import ProtocolError
from schemas.violations import ViolationError


def test_failing_says_one_line_and_ends_with_its_code(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        fail("it cannot be", EXIT_NO)
    assert ended.value.code == EXIT_NO
    assert capsys.readouterr() == ("", "kubelet: it cannot be\n")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(AddressError("no HOST:PORT"), EXIT_USAGE, id="an address"),
        pytest.param(IdentityFilesError("run init"), EXIT_CANNOT_RUN, id="an identity"),
        pytest.param(ExposedFileError(Path("node.key")), EXIT_CANNOT_RUN, id="a key that others can read"),
        pytest.param(OSError("in use"), EXIT_CANNOT_RUN, id="the system"),
        pytest.param(OperatorError("no PEM"), EXIT_CANNOT_RUN, id="a file that the operator named"),
        pytest.param(PeerError("no reply"), EXIT_CANNOT_RUN, id="the relay"),
        pytest.param(StateError("damaged"), EXIT_CANNOT_RUN, id="a file's content"),
        pytest.param(FailedError(KeyError("x")), EXIT_CANNOT_RUN, id="a daemon that has logged why"),
    ],
)
def test_what_an_operator_can_mend_is_one_line(
    capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    with pytest.raises(SystemExit) as ended, errors_in_one_line():
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == f"kubelet: {error}\n"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("a bug"),
        ValueError("a bug"),
        ViolationError("/cap_id", "pattern"),
        ProtocolError("a bug"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_fault_of_our_own_has_a_traceback_and_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    with pytest.raises(SystemExit) as ended, errors_in_one_line():
        raise error
    assert ended.value.code == EXIT_FAULT == 70
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"kubelet: fault\nTraceback, innermost call first:\n{type(error).__name__}: ")
    assert f"{Path(__file__).name}:" in shown.err


def test_the_traceback_of_a_fault_holds_neither_control_characters_nor_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "A1_" * 20
    with pytest.raises(SystemExit), errors_in_one_line():
        raise KeyError(f"\x1b[31m{secret}")
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert secret not in shown
    assert "(left out)" in shown


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
