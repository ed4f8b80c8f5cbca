import sys
from pathlib import Path
from typing import NoReturn

import pytest

from schemas.addresses import AddressError
from schemas.error_roots import CommandLineError, ConfigError, OperatorError, PeerError, StateError
from schemas.faults import FailedError
from schemas.files import ExposedFileError
from schemas.identity_files import IdentityFilesError
from schemas.process.command_errors import (
    EXIT_CANNOT_RUN,
    EXIT_CONFIG,
    EXIT_FAULT,
    EXIT_USAGE,
    errors_in_one_line,
)
from schemas.session import ProtocolError
from schemas.violations import ViolationError


def fail(text: str, code: int) -> NoReturn:
    print(f"program: {text}", file=sys.stderr)
    raise SystemExit(code)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        pytest.param(ConfigError(["no relay"]), EXIT_CONFIG, id="a setting"),
        pytest.param(CommandLineError("no such node"), EXIT_USAGE, id="an argument"),
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
    with pytest.raises(SystemExit) as ended, errors_in_one_line(fail):
        raise error
    assert ended.value.code == code
    assert capsys.readouterr().err == f"program: {error}\n"


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
    with pytest.raises(SystemExit) as ended, errors_in_one_line(fail):
        raise error
    assert ended.value.code == EXIT_FAULT == 70
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"program: fault\nTraceback, innermost call first:\n{type(error).__name__}: ")
    assert f"{Path(__file__).name}:" in shown.err


def test_the_traceback_of_a_fault_holds_neither_control_characters_nor_secrets(
    capsys: pytest.CaptureFixture[str],
) -> None:
    secret = "A1_" * 20
    with pytest.raises(SystemExit), errors_in_one_line(fail):
        raise KeyError(f"\x1b[31m{secret}")
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert secret not in shown
    assert "(left out)" in shown


def test_an_error_of_the_system_names_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    missing = tmp_path / "node.key"
    with pytest.raises(SystemExit) as ended, errors_in_one_line(fail):
        missing.read_bytes()
    assert ended.value.code == EXIT_CANNOT_RUN
    assert capsys.readouterr().err == f"program: {missing}: No such file or directory\n"


def test_a_body_without_an_error_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with errors_in_one_line(fail):
        pass
    assert capsys.readouterr() == ("", "")
