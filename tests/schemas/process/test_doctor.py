import io
import json
from collections.abc import Callable

import pytest

from schemas.error_roots import CommandLineError, OperatorError
from schemas.process.doctor import DoctorCheck, Finding, NotCheckedError, Severity, examine, run_doctor
from tests.fakes.lines import Terminal

GOOD = Finding.good("it is there")
WARNING = Finding.warning("it ends soon", "renew it")
FAILURE = Finding.failure("it is gone\x1b[2J", "look for it")


def checks(*findings: Finding) -> list[DoctorCheck[None]]:
    return [check(f"check-{n}", lambda _, f=finding: f) for n, finding in enumerate(findings)]  # type: ignore[misc]


def check(name: str, look: Callable[[None], Finding]) -> DoctorCheck[None]:
    return DoctorCheck(name, look, "")


def test_each_check_is_one_line_with_what_was_found_and_what_to_do() -> None:
    stream = io.StringIO()
    examine(checks(GOOD, WARNING, FAILURE), None, stream, as_json=False)
    assert stream.getvalue().splitlines() == [
        "ok       check-0  it is there",
        "warning  check-1  it ends soon: renew it",
        "failure  check-2  it is gone\\x1b[2J: look for it",
    ]


@pytest.mark.parametrize(
    ("findings", "code", "strict"),
    [((GOOD, GOOD), 0, 0), ((GOOD, WARNING), 0, 1), ((WARNING, FAILURE, GOOD), 3, 3)],
)
def test_the_exit_code_is_that_of_the_worst_and_a_warning_counts_where_one_is_strict(
    findings: tuple[Finding, ...], code: int, strict: int
) -> None:
    assert examine(checks(*findings), None, io.StringIO(), as_json=False) == code
    assert examine(checks(*findings), None, io.StringIO(), as_json=False, strict=True) == strict


def test_json_is_one_object_a_check() -> None:
    stream = io.StringIO()
    examine(checks(WARNING), None, stream, as_json=True)
    assert json.loads(stream.getvalue()) == {
        "check": "check-0",
        "severity": "warning",
        "found": "it ends soon",
        "fix": "renew it",
    }


@pytest.mark.parametrize("error", [OperatorError("it is damaged"), OSError("no such file")])
def test_a_check_that_cannot_be_made_has_failed_and_the_next_is_made(error: Exception) -> None:
    def broken(_: None) -> Finding:
        raise error

    stream = io.StringIO()
    code = examine([check("broken", broken), *checks(GOOD)], None, stream, as_json=False)
    first, second = stream.getvalue().splitlines()
    assert (code, first) == (3, f"failure  broken   {error}: see --explain broken")
    assert second.startswith("ok")


def test_a_check_of_which_another_says_why_it_cannot_be_made_is_skipped() -> None:
    def skipped(_: None) -> Finding:
        raise NotCheckedError("the relay does not run")

    stream = io.StringIO()
    code = examine([check("echo", skipped), *checks(GOOD)], None, stream, as_json=False)
    assert (code, stream.getvalue().splitlines()[0]) == (
        0,
        "skipped  echo     not checked: the relay does not run",
    )


def test_colour_is_for_terminals() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        examine(checks(FAILURE), None, stream, as_json=False)
    assert ("\x1b[31m" in terminal.getvalue(), "\x1b[31m" in pipe.getvalue()) == (True, False)
    assert [severity.name for severity in Severity] == ["SKIPPED", "OK", "WARNING", "FAILURE"]


def test_one_check_is_explained_and_none_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    def never() -> Finding:
        raise AssertionError

    rows = [DoctorCheck[Finding]("clock", lambda finding: finding, "Compares clocks.")]
    assert run_doctor(rows, never, "clock", as_json=False) == 0
    assert capsys.readouterr().out == "Compares clocks.\n"
    with pytest.raises(CommandLineError, match="--explain: 'clocks' is none of clock"):
        run_doctor(rows, never, "clocks", as_json=False)
    assert run_doctor(rows, lambda: Finding.warning("late", "wait"), None, as_json=False, strict=True) == 1
